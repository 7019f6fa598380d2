"""What is written as a path must lead to a model, before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.errors import ConfigError
from nemo_rl.launch import recipe_commands
from nemo_rl.launch.model_files import check_directory, check_model_name, find_shape, read_model_config
from nemo_rl.launch.recipe_commands import (
    COLLECT_JOB,
    DISTILLATION_JOB,
    EVAL_JOB,
    GRPO_JOB,
    REWARD_MODEL_JOB,
    SFT_JOB,
    Job,
)
from nemo_rl.policy.memory import UnknownShapeError
from tests.fakes.model_configs import MODEL_CONFIGS

KEY = "policy.model_name"
CONFIGS = Path(__file__).parents[3] / "examples" / "configs"


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-1.5B", "nemo_rl/quickstart-7", "nemo_rl/fresh_classifier"])
def test_a_name_on_the_hub_or_of_ours_passes(name: str) -> None:
    check_model_name(KEY, name)


@pytest.mark.parametrize("name", ["/no/such/directory", "./model", "../model", "~/model", "runs/exp_1/model", "model/"])
def test_a_path_to_nowhere_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"policy\.model_name = '.*no such directory; expected the directory of a model, or a name on"
    ):
        check_model_name(KEY, name)


def test_the_directory_that_is_spelt_alike_is_named(tmp_path: Path) -> None:
    (tmp_path / "step_150").mkdir()
    with pytest.raises(ConfigError, match=f"did you mean '{tmp_path}/step_150'"):
        check_model_name(KEY, f"{tmp_path}/step_105")


def test_a_directory_is_a_model_when_it_has_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        check_model_name(KEY, str(tmp_path))
    check_directory("policy.tokenizer.name", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    check_model_name(KEY, str(tmp_path))
    with pytest.raises(ConfigError, match="is not a directory"):
        check_model_name(KEY, str(tmp_path / "config.json"))


@pytest.mark.parametrize("check", [check_model_name, check_directory])
def test_a_path_that_cannot_be_read_says_why(check: Callable[[str, str], None]) -> None:
    with pytest.raises(ConfigError, match=r"policy\.model_name = '/x*': cannot be read: File name too long"):
        check(KEY, "/" + "x" * 280)


def test_a_checkpoint_is_a_model_and_the_directory_of_checkpoints_names_them(tmp_path: Path) -> None:
    (tmp_path / "step_5/policy/weights").mkdir(parents=True)
    check_model_name(KEY, f"{tmp_path}/step_5")
    with pytest.raises(ConfigError, match=f"did you mean '{tmp_path}/step_5'|known: {tmp_path}/step_5"):
        check_model_name(KEY, str(tmp_path))


SCORER = "++scorers={judge: {type: reward_model, model_name: /nope}}"
SERVED = "++teacher.server={base_urls: ['http://127.0.0.1:9'], model: theirs}"
NO_ENGINE = ("server.address=http://127.0.0.1:9", "policy.model_name=/models/theirs")


@pytest.mark.parametrize(
    ("job", "recipe", "overrides", "key"),
    [
        (GRPO_JOB, "quickstart", ("policy.model_name=/nope",), "policy.model_name"),
        (GRPO_JOB, "quickstart", ("++policy.tokenizer.name=/nope",), "policy.tokenizer.name"),
        (GRPO_JOB, "quickstart", (SCORER, "++env.reasoning_gym.scorers=[judge]"), "scorers.judge.model_name"),
        (DISTILLATION_JOB, "distillation", ("teacher.model_name=/nope",), "teacher.model_name"),
        (DISTILLATION_JOB, "distillation", ("teacher.model_name=/nope", SERVED), "teacher.model_name"),
        (DISTILLATION_JOB, "distillation", ("++teacher.tokenizer.name=/nope",), "teacher.tokenizer.name"),
        (SFT_JOB, "sft_quickstart", ("policy.model_name=/nope",), "policy.model_name"),
        (REWARD_MODEL_JOB, "rm_quickstart", ("policy.model_name=/nope",), "policy.model_name"),
        (EVAL_JOB, "eval", ("policy.model_name=/nope",), "policy.model_name"),
        (EVAL_JOB, "eval", ("++eval.baseline=/nope",), "eval.baseline"),
        (COLLECT_JOB, "collect", ("policy.model_name=/nope",), "policy.model_name"),
    ],
)
@pytest.mark.parametrize("dry_run", [("--dry-run",), ()])
def test_every_command_refuses_it_at_its_start(
    job: Job,
    recipe: str,
    overrides: tuple[str, ...],
    key: str,
    dry_run: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [*overrides, *dry_run]
    assert run_command(job.command("", CONFIGS / f"{recipe}.yaml"), arguments) == ExitCode.BAD_INPUT
    told = capsys.readouterr()
    assert told.err.startswith(f"ConfigError: {key} = '/nope': there is no such directory")
    assert told.out == ""


def test_a_server_may_call_its_model_as_it_likes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(recipe_commands.COLLECT, [*NO_ENGINE, "--dry-run"]) == 0
    assert "model_name: /models/theirs" in capsys.readouterr().out


def test_a_served_teacher_with_another_tokenizer_is_called_as_its_server_likes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    overrides = [SERVED, "teacher.model_name=/models/theirs", "++teacher.tokenizer.name=nemo_rl/quickstart"]
    recipe = CONFIGS / "distillation.yaml"
    assert run_command(DISTILLATION_JOB.command("", recipe), [*overrides, "--dry-run"]) == 0
    assert "model_name: /models/theirs" in capsys.readouterr().out


def test_a_local_model_needs_no_download(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIGS["Qwen/Qwen2.5-7B"]))
    shape = find_shape("policy.model_name", str(tmp_path), {"num_hidden_layers": 4})
    assert (shape.num_hidden_layers, shape.hidden_size, shape.is_tied) == (4, 3584, False)


def test_a_model_that_is_not_here_is_named_with_the_command_that_gets_it() -> None:
    with pytest.raises(UnknownShapeError, match=r"hf download no-such/model-here config\.json"):
        find_shape("policy.model_name", "no-such/model-here")


@pytest.mark.parametrize("name", ["/path/to/a/model", "no-such/model-here"])
def test_a_model_that_is_not_here_has_no_configuration(name: str) -> None:
    assert read_model_config("policy.model_name", name) is None
    with pytest.raises(UnknownShapeError, match=rf"config\.json of {name} is not on this machine") as unknown:
        find_shape("policy.model_name", name)
    assert ("hf download" in str(unknown.value)) == (not name.startswith("/"))
