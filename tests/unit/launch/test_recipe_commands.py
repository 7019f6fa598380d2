import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.collect.shards import Chunk, KeySpace, ShardFiles, ShardIdentity
from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.config.loading import load_collect_config
from nemo_rl.config.master import GRPORunConfig
from nemo_rl.errors import ConfigError, RolloutError
from nemo_rl.jobs.submission import SUBMIT
from nemo_rl.launch import training as session
from nemo_rl.launch.recipe_commands import GRPO_JOB
from tests.fakes.slurm_commands import write_sbatch

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


COLLECT_RECIPE = Path(__file__).parents[3] / "examples" / "configs" / "collect.yaml"
SERVER = "slurm.server.model=org/model"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{write_sbatch(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_LOG", str(tmp_path / "calls"))
    return tmp_path


def submit(*overrides: str, config: Path = COLLECT_RECIPE) -> int:
    return run_command(SUBMIT, ["--config", str(config), "collect.output_dir=out", *overrides])


def calls(directory: Path) -> list[str]:
    path = directory / "calls"
    return path.read_text().splitlines() if path.exists() else []


def finish(directory: Path, seed: int, index: int, count: int) -> None:
    """A shard of the collection, done."""
    files = ShardFiles.of(directory / "out", seed, index)
    ShardIdentity(seed, KeySpace(10, 1, Chunk(index, count)), {}).write(files.identity)
    files.done.touch()


def test_array_and_aggregation_are_submitted_and_tied(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("collect.seeds=0,2,5..7", "slurm.num_chunks=4", SERVER) == 0
    submission = directory / "out/slurm/0001"
    assert calls(directory) == [
        f"--parsable {submission}/collect.sbatch",
        f"--parsable --dependency=afterok:100 --kill-on-invalid-dep=yes {submission}/aggregate.sbatch",
    ]
    script = (submission / "collect.sbatch").read_text()
    assert "--array=0-19" in script
    assert "seeds=(0 2 5 6 7)\n" in script
    assert capsys.readouterr().out.splitlines() == [
        "20 array tasks (5 seeds x 4 chunks), 0 of them done before",
        "collection: job 100",
        "aggregation: job 101",
        "logs: out/slurm/0001/logs",
    ]


@pytest.mark.parametrize("key", ["collect.output_dir", "slurm.directory"])
def test_a_backslash_in_the_logs_directory_is_refused(
    key: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(f"++{key}='a\\b'") == 2
    assert f"{key} = '{directory}/a" in capsys.readouterr().err
    assert not calls(directory)


def test_the_jobs_configuration_is_that_of_a_collection(directory: Path) -> None:
    assert submit("collect.seeds=3,4", SERVER, "server.model=m", "collect.num_repeats=7") == 0
    path = directory / "out/slurm/0001/collect.yaml"
    overrides = ["collect.seeds=4", "collect.chunk=1/2", "server.address=http://127.0.0.1:20000/v1"]
    config = load_collect_config(path, overrides)
    assert config.collect.all_seeds == (4,)
    assert config.collect.num_repeats == 7
    assert config.collect.output_dir == str(directory / "out")
    assert config.server.addresses == ("http://127.0.0.1:20000/v1",)
    assert config.server.model == "m"


def test_vllm_is_told_to_sample_as_the_collections_own_engine(directory: Path) -> None:
    assert submit(SERVER, "slurm.server.args=[--seed,'3']") == 0
    script = (directory / "out/slurm/0001/collect.sbatch").read_text()
    arguments = "--max-model-len 64 --dtype float32 --generation-config vllm --logprobs-mode processed_logprobs"
    assert f"serve org/model {arguments} --seed 3)" in script


def test_what_may_hold_secrets_is_its_owners_alone(directory: Path) -> None:
    assert submit(SERVER, "++slurm.server.environment.HF_TOKEN='it is abcdef'") == 0
    files = {path.name: path for path in (directory / "out/slurm/0001").iterdir() if path.is_file()}
    assert files.keys() == {"collect.sbatch", "collect.yaml", "aggregate.sbatch", "server.env"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files.values())
    assert files.pop("server.env").read_text() == "HF_TOKEN='it is abcdef'\n"
    assert not any("abcdef" in path.read_text() for path in files.values())


def test_a_dry_run_prints_scripts_and_environments_and_writes_nothing(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = ["++slurm.server.environment.HF_TOKEN=abcdef", "++slurm.server.environment.OMP_NUM_THREADS='4'"]
    assert submit("--dry-run", SERVER, "slurm.partition=gpu", *variables) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --partition=gpu\n" in shown
    assert "# sbatch --dependency=afterok:ARRAY --kill-on-invalid-dep=yes" in shown
    assert "# environment of the server\nHF_TOKEN='(hidden)'\nOMP_NUM_THREADS=4\n" in shown
    assert "abcdef" not in shown
    assert not (directory / "out").exists()
    assert calls(directory) == []


def test_a_second_call_submits_what_is_missing(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("collect.seeds=0,1", "slurm.num_chunks=2", SERVER) == 0
    finish(directory, 0, 1, 2)
    finish(directory, 1, 0, 2)
    assert submit("collect.seeds=0,1", "slurm.num_chunks=2", SERVER) == 0
    assert "--array=0,3\n" in (directory / "out/slurm/0002/collect.sbatch").read_text()
    assert "4 array tasks (2 seeds x 2 chunks), 2 of them done before" in capsys.readouterr().out
    # Further seeds are no other configuration.
    assert submit("collect.seeds=0..2", "slurm.num_chunks=2", SERVER) == 0
    assert "--array=0,3-5\n" in (directory / "out/slurm/0003/collect.sbatch").read_text()


def test_where_nothing_is_missing_the_aggregation_runs_alone(directory: Path) -> None:
    assert submit("slurm.num_chunks=2", SERVER) == 0
    for chunk in range(2):
        finish(directory, 0, chunk, 2)
    assert submit("slurm.num_chunks=2", SERVER) == 0
    assert calls(directory)[2:] == [f"--parsable {directory}/out/slurm/0002/aggregate.sbatch"]


def test_a_partial_aggregation_waits_for_the_end_alone(directory: Path) -> None:
    assert submit(SERVER, "slurm.aggregation.allow_partial=true") == 0
    assert calls(directory)[1] == f"--parsable --dependency=afterany:100 {directory}/out/slurm/0001/aggregate.sbatch"
    assert " --allow-partial)" in (directory / "out/slurm/0001/aggregate.sbatch").read_text()


def test_an_array_task_of_several_processes_is_done_when_all_its_chunks_are(directory: Path) -> None:
    arguments = ("slurm.num_chunks=2", "slurm.collection.num_tasks=2", SERVER)
    assert submit(*arguments) == 0
    for index in (0, 1, 2):
        finish(directory, 0, index, 4)
    assert submit(*arguments) == 0
    assert "--array=1\n" in (directory / "out/slurm/0002/collect.sbatch").read_text()


def test_with_another_configuration_finished_tasks_are_submitted_too(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert submit(SERVER, "slurm.num_chunks=2") == 0
    finish(directory, 0, 0, 2)
    assert submit(SERVER, "slurm.num_chunks=2", "policy.generation.temperature=0.5") == 0
    assert "--array=0-1\n" in (directory / "out/slurm/0002/collect.sbatch").read_text()
    assert "not that of the last submission" in caplog.text


def test_a_collection_that_was_cut_otherwise_is_refused(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(directory, 0, 0, 2)
    assert submit(SERVER, "slurm.num_chunks=4") == 2
    assert "seed 0 was begun in 2 chunks" in capsys.readouterr().err
    assert calls(directory) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["slurm.partion=gpu"], "did you mean slurm.partition?"),
        (["++slurm.collection.dependency=1"], "slurm.collection.dependency = 1: unknown key"),
        (["collect.chunk=0/2"], "collect.chunk = '0/2': the array has all chunks: set slurm.num_chunks"),
        ([SERVER, "server.address=http://a:1"], "server.address = 'http://a:1': slurm.server starts"),
        ([SERVER, "server.tensor_parallel_size=2"], "server.tensor_parallel_size = 2: is of an engine in the"),
        (["server.model=m"], "server.model = 'm': is of a server that runs already"),
        (["slurm.nodes=2"], "slurm.nodes = 2"),
    ],
)
def test_what_cannot_be_submitted_names_its_key(
    overrides: list[str], expected: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*overrides) == 2
    assert expected in capsys.readouterr().err
    assert not (directory / "out").exists()


@pytest.mark.parametrize(("refused", "jobs"), [("collect.sbatch", 0), ("aggregate.sbatch", 1)])
def test_slurms_refusal_is_told_in_its_own_words(
    refused: str, jobs: int, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_REFUSES", refused)
    assert submit(SERVER) == 1
    error = capsys.readouterr().err
    assert "Invalid partition" in error
    assert ("scancel 100" in error) == (jobs == 1)
    assert len(calls(directory)) == jobs


def test_without_slurm_the_error_says_so(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(directory))
    assert submit(SERVER) == 1
    assert "there is no sbatch on this machine; --dry-run shows" in capsys.readouterr().err


def test_a_recipe_may_hold_the_whole_section(directory: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(COLLECT_RECIPE.read_text())
    recipe["slurm"] = {"account": "me", "server": {"command": ["serve", "{port}"]}, "aggregation": {"enabled": False}}
    (directory / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert submit(config=directory / "recipe.yaml") == 0
    assert len(calls(directory)) == 1
    assert "#SBATCH --account=me\n" in (directory / "out/slurm/0001/collect.sbatch").read_text()


def test_env_vars_of_workers_reach_the_processes_that_a_run_starts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo-RL's `policy.dtensor_cfg.env_vars` and this project's `cluster.env_vars`."""
    monkeypatch.setenv("VARIABLE_OF_WORKERS", "of the shell")  # restored after the test
    monkeypatch.setenv("VARIABLE_OF_ALL", "of the shell")
    printed: list[bytes] = []

    async def run_training(config: GRPORunConfig, command: str) -> Training:
        code = "import os; print(os.environ['VARIABLE_OF_WORKERS'], os.environ['VARIABLE_OF_ALL'])"
        worker = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        printed.append((await worker.communicate())[0].strip())
        return Training(interrupted=False)

    monkeypatch.setattr(session, "run_training", run_training)
    variables = ["++policy.dtensor_cfg.env_vars.VARIABLE_OF_WORKERS=a", "++cluster.env_vars.VARIABLE_OF_ALL=b"]
    assert run_command(GRPO_JOB.command("Train.", recipe), variables) == 0
    assert printed == [b"a b"]
