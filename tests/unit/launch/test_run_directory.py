"""A run that resumes goes on in its own directory, without what it recorded after its checkpoint."""

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_rl import durable_files
from nemo_rl.checkpoint import CheckpointStore, TrainingInfo
from nemo_rl.config.loading import load_config
from nemo_rl.config.shared_sections import CheckpointingConfig, LoggerConfig
from nemo_rl.durable_files import hold_directory
from nemo_rl.errors import ConfigError
from nemo_rl.launch import run_directory
from nemo_rl.launch.run_directory import choose_run_directory, discard_records_after, name_run
from nemo_rl.launch.training import open_checkpoints, open_records
from nemo_rl.observability.lost_records import LostRecords
from tests.unit.config.conftest import SMALLEST


def write_steps(path: Path, steps: list[int], *, end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps({"step": step, "text": "é" * step}) for step in steps) + end)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def save(directory: Path, step: int) -> CheckpointStore:
    section = CheckpointingConfig(enabled=True, checkpoint_dir=str(directory))
    store = CheckpointStore(section, directory)
    path = store.begin(step)
    (path / "policy" / "weights").mkdir(parents=True)
    (path / "policy" / "weights" / "config.json").write_text("{}")
    store.commit(path, TrainingInfo(step, 1, 0))
    return store


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory of runs with one that has saved step 2, in a directory of its own choice, and recorded step 4."""
    first = choose_run_directory(LoggerConfig(log_dir=str(tmp_path / "runs")), None)
    write_steps(first.path / "metrics.jsonl", [0, 1, 2, 2, 3, 4])
    save(tmp_path / "saved", 2)
    name_run(tmp_path / "saved", first.path)
    return tmp_path / "runs"


def checkpointing(runs: Path) -> CheckpointingConfig:
    return CheckpointingConfig(enabled=True, checkpoint_dir=str(runs.parent / "saved"))


def test_run_that_resumes_goes_on_in_its_own_directory(runs: Path) -> None:
    chosen = choose_run_directory(LoggerConfig(log_dir=str(runs)), checkpointing(runs))
    assert (chosen.path, chosen.is_resumed) == (runs / "exp_001", True)


@pytest.mark.parametrize("change", ["another log_dir", "no checkpoint", "the run is gone", "not enabled", "moved"])
def test_directory_is_new_unless_its_run_is_there(change: str, runs: Path) -> None:
    log_dir, section = runs, checkpointing(runs)
    if change == "another log_dir":
        log_dir = runs.parent / "others"
    elif change == "no checkpoint":
        shutil.rmtree(runs.parent / "saved" / "step_2")
    elif change == "the run is gone":
        (runs / "exp_001" / "metrics.jsonl").unlink()
    elif change == "not enabled":
        section = section.model_copy(update={"enabled": False})
    else:  # the project moved as a whole, so the relative path still holds
        os.rename(runs.parent, runs.parent.with_name("moved"))
        log_dir = runs.parent.with_name("moved") / "runs"
        section = section.model_copy(update={"checkpoint_dir": str(log_dir.parent / "saved")})
        assert choose_run_directory(LoggerConfig(log_dir=str(log_dir)), section).is_resumed
        return
    chosen = choose_run_directory(LoggerConfig(log_dir=str(log_dir)), section)
    assert not chosen.is_resumed
    assert chosen.path.name == ("exp_001" if change == "another log_dir" else "exp_002")


@pytest.mark.parametrize("block", [8, 1 << 20])
def test_records_after_the_checkpoint_are_moved_aside(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "BLOCK_BYTES", block)
    write_steps(tmp_path / "metrics.jsonl", [0, 1, 2, 0, 3, 4, 4, 5])
    write_steps(tmp_path / "rollouts" / "train.jsonl", [4, 5, 6], end="")  # all later, the last one cut off by a kill
    write_steps(tmp_path / "rollouts" / "validation.jsonl", [1, 3])
    for _ in range(2):  # the second time there is nothing left to move
        discard_records_after(tmp_path, 3)
        assert steps_of(tmp_path / "metrics.jsonl") == [0, 1, 2, 0, 3]
        assert steps_of(tmp_path / "discarded" / "metrics.jsonl") == [4, 4, 5]
        assert (tmp_path / "rollouts" / "train.jsonl").read_bytes() == b""
        assert steps_of(tmp_path / "discarded" / "train.jsonl") == [4, 5, 6]
        assert steps_of(tmp_path / "rollouts" / "validation.jsonl") == [1, 3]
        assert not (tmp_path / "discarded" / "validation.jsonl").exists()


def test_records_are_kept_up_to_the_checkpoint_that_is_resumed_from(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "LOCK_WAIT_S", 0.0)
    saved = runs.parent / "saved"
    save(saved, 4)
    (saved / "step_4" / "policy" / "weights" / "config.json").write_text("damaged")
    recipe = runs.parent / "recipe.yaml"
    recipe.write_text(SMALLEST)
    overrides = [f"logger.log_dir={runs}", f"checkpointing.checkpoint_dir={saved}", "checkpointing.enabled=true"]
    config = load_config(recipe, overrides)
    with ExitStack() as stack:
        run_dir, metrics_logger = open_records(config, stack, LostRecords())
        with hold_directory(saved, key="key"), pytest.raises(ConfigError, match="in use"):
            open_checkpoints(config, run_dir, metrics_logger, stack)
        assert steps_of(run_dir / "metrics.jsonl") == [0, 1, 2, 2, 3, 4]
        assert open_checkpoints(config, run_dir, metrics_logger, stack) is not None
    assert run_dir == runs / "exp_001"
    assert steps_of(run_dir / "metrics.jsonl") == [0, 1, 2, 2]
    assert steps_of(run_dir / "discarded" / "metrics.jsonl") == [3, 4]


def test_link_leads_to_the_weights_of_the_best_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "saved", 2).link_best(tmp_path / "model")
    assert (tmp_path / "model").resolve() == tmp_path / "saved/step_2/policy/weights"
    assert not os.path.isabs(os.readlink(tmp_path / "model"))
    save(tmp_path / "saved", 4).link_best(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    assert (tmp_path / "model").resolve() == tmp_path / "saved/step_4/policy/weights"
    (tmp_path / "own").mkdir()
    save(tmp_path / "saved", 6).link_best(tmp_path / "own")  # a reward model's directory, for example
    assert not (tmp_path / "own").is_symlink()
