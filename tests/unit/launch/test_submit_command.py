"""`nemo-rl submit`: what is written and handed to Slurm, what is printed, and what a second call submits."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from nemo_rl.collect.shards import Chunk, KeySpace, ShardFiles, ShardIdentity
from nemo_rl.commands import run_command
from nemo_rl.config.loading import load_collect_config
from nemo_rl.launch.submit import SUBMIT
from tests.fakes.slurm_commands import write_sbatch

RECIPE = Path(__file__).parents[3] / "nemo_rl" / "quickstart" / "collect.yaml"
SERVER = "slurm.server.model=org/model"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{write_sbatch(tmp_path / 'bin')}:{os.environ['PATH']}")
    monkeypatch.setenv("SBATCH_LOG", str(tmp_path / "calls"))
    return tmp_path


def submit(*overrides: str, config: Path = RECIPE) -> int:
    return run_command(SUBMIT, ["--config", str(config), "collect.output_dir=out", *overrides])


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []


def finish(folder: Path, seed: int, index: int, count: int) -> None:
    """A shard of the collection, done."""
    files = ShardFiles.of(folder / "out", seed, index)
    ShardIdentity(seed, KeySpace(10, 1, Chunk(index, count)), {}).write(files.identity)
    files.done.touch()


def test_array_and_aggregation_are_submitted_and_tied(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("collect.seeds=0,2,5..7", "slurm.num_chunks=4", SERVER) == 0
    directory = folder / "out/slurm/0001"
    assert calls(folder) == [
        f"--parsable {directory}/collect.sbatch",
        f"--parsable --dependency=afterok:100 --kill-on-invalid-dep=yes {directory}/aggregate.sbatch",
    ]
    script = (directory / "collect.sbatch").read_text()
    assert "--array=0-19" in script
    assert "seeds=(0 2 5 6 7)\n" in script
    assert capsys.readouterr().out.splitlines() == [
        "20 array tasks (5 seeds x 4 chunks), 0 of them done before",
        "collection: job 100",
        "aggregation: job 101",
        "logs: out/slurm/0001/logs",
    ]


@pytest.mark.parametrize("key", ["collect.output_dir", "slurm.directory"])
def test_a_backslash_in_the_logs_folder_is_refused(key: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(f"++{key}='a\\b'") == 2
    assert f"{key} = '{folder}/a" in capsys.readouterr().err
    assert not calls(folder)


def test_the_jobs_configuration_is_that_of_a_collection(folder: Path) -> None:
    assert submit("collect.seeds=3,4", SERVER, "server.model=m", "collect.num_repeats=7") == 0
    path = folder / "out/slurm/0001/collect.yaml"
    overrides = ["collect.seeds=4", "collect.chunk=1/2", "server.address=http://127.0.0.1:20000/v1"]
    config = load_collect_config(path, overrides)
    assert config.collect.all_seeds == (4,)
    assert config.collect.num_repeats == 7
    assert config.collect.output_dir == str(folder / "out")
    assert config.server.addresses == ("http://127.0.0.1:20000/v1",)
    assert config.server.model == "m"


def test_vllm_is_told_to_sample_as_the_collections_own_engine(folder: Path) -> None:
    assert submit(SERVER, "slurm.server.args=[--seed,'3']") == 0
    script = (folder / "out/slurm/0001/collect.sbatch").read_text()
    arguments = "--max-model-len 64 --dtype float32 --generation-config vllm --logprobs-mode processed_logprobs"
    assert f"serve org/model {arguments} --seed 3)" in script


def test_what_may_hold_secrets_is_its_owners_alone(folder: Path) -> None:
    assert submit(SERVER, "++slurm.server.environment.HF_TOKEN='it is abcdef'") == 0
    files = {path.name: path for path in (folder / "out/slurm/0001").iterdir() if path.is_file()}
    assert files.keys() == {"collect.sbatch", "collect.yaml", "aggregate.sbatch", "server.env"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files.values())
    assert files.pop("server.env").read_text() == "HF_TOKEN='it is abcdef'\n"
    assert not any("abcdef" in path.read_text() for path in files.values())


def test_a_dry_run_prints_scripts_and_environments_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = ["++slurm.server.environment.HF_TOKEN=abcdef", "++slurm.server.environment.OMP_NUM_THREADS='4'"]
    assert submit("--dry-run", SERVER, "slurm.partition=gpu", *variables) == 0
    shown = capsys.readouterr().out
    assert "#SBATCH --partition=gpu\n" in shown
    assert "# sbatch --dependency=afterok:ARRAY --kill-on-invalid-dep=yes" in shown
    assert "# environment of the server\nHF_TOKEN='(hidden)'\nOMP_NUM_THREADS=4\n" in shown
    assert "abcdef" not in shown
    assert not (folder / "out").exists()
    assert calls(folder) == []


def test_a_second_call_submits_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("collect.seeds=0,1", "slurm.num_chunks=2", SERVER) == 0
    finish(folder, 0, 1, 2)
    finish(folder, 1, 0, 2)
    assert submit("collect.seeds=0,1", "slurm.num_chunks=2", SERVER) == 0
    assert "--array=0,3\n" in (folder / "out/slurm/0002/collect.sbatch").read_text()
    assert "4 array tasks (2 seeds x 2 chunks), 2 of them done before" in capsys.readouterr().out
    # Further seeds are no other configuration.
    assert submit("collect.seeds=0..2", "slurm.num_chunks=2", SERVER) == 0
    assert "--array=0,3-5\n" in (folder / "out/slurm/0003/collect.sbatch").read_text()


def test_where_nothing_is_missing_the_aggregation_runs_alone(folder: Path) -> None:
    assert submit("slurm.num_chunks=2", SERVER) == 0
    for chunk in range(2):
        finish(folder, 0, chunk, 2)
    assert submit("slurm.num_chunks=2", SERVER) == 0
    assert calls(folder)[2:] == [f"--parsable {folder}/out/slurm/0002/aggregate.sbatch"]


def test_a_partial_aggregation_waits_for_the_end_alone(folder: Path) -> None:
    assert submit(SERVER, "slurm.aggregation.allow_partial=true") == 0
    assert calls(folder)[1] == f"--parsable --dependency=afterany:100 {folder}/out/slurm/0001/aggregate.sbatch"
    assert " --allow-partial)" in (folder / "out/slurm/0001/aggregate.sbatch").read_text()


def test_an_array_task_of_several_processes_is_done_when_all_its_chunks_are(folder: Path) -> None:
    arguments = ("slurm.num_chunks=2", "slurm.collection.num_tasks=2", SERVER)
    assert submit(*arguments) == 0
    for index in (0, 1, 2):
        finish(folder, 0, index, 4)
    assert submit(*arguments) == 0
    assert "--array=1\n" in (folder / "out/slurm/0002/collect.sbatch").read_text()


def test_with_another_configuration_finished_tasks_are_submitted_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert submit(SERVER, "slurm.num_chunks=2") == 0
    finish(folder, 0, 0, 2)
    assert submit(SERVER, "slurm.num_chunks=2", "policy.generation.temperature=0.5") == 0
    assert "--array=0-1\n" in (folder / "out/slurm/0002/collect.sbatch").read_text()
    assert "not that of the last submission" in caplog.text


def test_a_collection_that_was_cut_otherwise_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finish(folder, 0, 0, 2)
    assert submit(SERVER, "slurm.num_chunks=4") == 2
    assert "seed 0 was begun in 2 chunks" in capsys.readouterr().err
    assert calls(folder) == []


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
    overrides: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*overrides) == 2
    assert expected in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("refused", "jobs"), [("collect.sbatch", 0), ("aggregate.sbatch", 1)])
def test_slurms_refusal_is_told_in_its_own_words(
    refused: str, jobs: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SBATCH_REFUSES", refused)
    assert submit(SERVER) == 1
    error = capsys.readouterr().err
    assert "Invalid partition" in error
    assert ("scancel 100" in error) == (jobs == 1)
    assert len(calls(folder)) == jobs


def test_without_slurm_the_error_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert submit(SERVER) == 1
    assert "there is no sbatch on this machine; --dry-run shows" in capsys.readouterr().err


def test_a_recipe_may_hold_the_whole_section(folder: Path) -> None:
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    recipe["slurm"] = {"account": "me", "server": {"command": ["serve", "{port}"]}, "aggregation": {"enabled": False}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert submit(config=folder / "recipe.yaml") == 0
    assert len(calls(folder)) == 1
    assert "#SBATCH --account=me\n" in (folder / "out/slurm/0001/collect.sbatch").read_text()
