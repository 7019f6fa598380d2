import asyncio
import sys
from pathlib import Path

import pytest

from nemo_rl.commands import ExitCode, run_command
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.launch import training as session
from nemo_rl.launch.commands import GRPO_JOB

RECIPE = """
grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 2}
policy: {model_name: m, device: cpu, train_global_batch_size: 8, train_micro_batch_size: 4}
data: {train: {dataset_name: gsm8k}}
env: {math: {}}
"""


class Training:
    def __init__(self, interrupted: bool) -> None:
        self.interrupted = interrupted


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["examples/run_grpo.py"])
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GRPORunConfig, str]]:
    """Configuration and command of the runs that would have been trained."""
    runs: list[tuple[GRPORunConfig, str]] = []

    async def run_training(config: GRPORunConfig, command: str) -> Training:
        runs.append((config, command))
        return Training(interrupted=False)

    monkeypatch.setattr(session, "run_training", run_training)
    return runs


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_training(config: GRPORunConfig, command: str) -> Training:
        raise error

    monkeypatch.setattr(session, "run_training", run_training)


def run(recipe: Path, *arguments: str) -> int:
    return run_command(GRPO_JOB.command("Train.", recipe), arguments)


def test_without_arguments_the_default_recipe_trains(recipe: Path, started: list[tuple[GRPORunConfig, str]]) -> None:
    assert run(recipe) == 0
    ((config, command),) = started
    assert config.grpo.num_prompts_per_step == 4
    assert command == "uv run examples/run_grpo.py"


def test_overrides_may_stand_before_and_after_options(recipe: Path, started: list[tuple[GRPORunConfig, str]]) -> None:
    assert run(Path("none"), "grpo.seed=3", "--config", str(recipe), "grpo.max_num_steps=5") == 0
    ((config, command),) = started
    assert (config.grpo.seed, config.grpo.max_num_steps) == (3, 5)
    assert command == f"uv run examples/run_grpo.py --config {recipe} grpo.seed=3 grpo.max_num_steps=5"


def test_the_command_can_be_pasted_into_a_shell(recipe: Path, started: list[tuple[GRPORunConfig, str]]) -> None:
    override = "data.train={dataset_name: gsm8k, size: 3}"
    assert run(recipe, override) == 0
    assert started[0][1] == f"uv run examples/run_grpo.py '{override}'"


@pytest.mark.parametrize("arguments", [(), ("--dry-run",)])
def test_a_wrong_key_is_one_message_and_exit_code_2(
    recipe: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert run(recipe, "grpo.num_prompt_per_step=4", *arguments) == ExitCode.BAD_INPUT == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: ")
    assert "grpo.num_prompts_per_step" in err
    assert "Traceback" not in err


def test_a_missing_recipe_is_one_message(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "--config", "no/such.yaml") == ExitCode.BAD_INPUT
    assert "no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a.b", 1, "cannot be"), ExitCode.BAD_INPUT),
        (RolloutError("nothing has progressed"), ExitCode.FAILED),
    ],
)
def test_errors_of_ours_while_training_are_one_message(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    failing_with(error, monkeypatch)
    assert run(recipe) == code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


def test_other_errors_keep_their_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        run(recipe)


def test_a_run_that_was_stopped_exits_with_130(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_training(config: GRPORunConfig, command: str) -> Training:
        return Training(interrupted=True)

    monkeypatch.setattr(session, "run_training", run_training)
    assert run(recipe) == ExitCode.INTERRUPTED == 130


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_a_run_that_was_stopped_at_once_exits_with_130_and_no_traceback(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    failing_with(error, monkeypatch)
    assert run(recipe) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_dry_run_prints_configuration_and_placement_and_trains_nothing(
    recipe: Path, started: list[tuple[GRPORunConfig, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(recipe, "--dry-run", "grpo.seed=3") == 0
    out = capsys.readouterr().out
    assert "seed: 3" in out
    assert "# placement\n#   policy: m, FSDP2" in out
    assert started == []


def test_dry_run_refuses_a_device_that_is_not_there(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(recipe, "--dry-run", "policy.device=cuda") == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("ConfigError: policy.device = 'cuda'")


def test_an_unknown_option_exits_with_2(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run(recipe, "--no-such-option")
    assert refused.value.code == ExitCode.BAD_INPUT
    assert "--no-such-option" in capsys.readouterr().err
