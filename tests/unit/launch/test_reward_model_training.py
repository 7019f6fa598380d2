"""run_rm.py's whole run, small, in this process."""

import asyncio
import errno
import json
from pathlib import Path

import pytest

from nemo_rl import durable_files
from nemo_rl.command_line import ExitCode, run_command
from nemo_rl.environments.scorers.reward_model import RewardModelScorerConfig
from nemo_rl.environments.scorers.reward_model_replicas import RewardModelScorer
from nemo_rl.launch.recipe_commands import REWARD_MODEL_JOB
from nemo_rl.observability import loggers
from nemo_rl.types import Failure, Message, ResponseFault, ScoreRequest
from tests.support.metric_names import find_undocumented

QUESTION = "Spell this word backward (example: sun -> nus): ab"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    pairs = [{"prompt": QUESTION, "chosen": "ba", "rejected": wrong} for wrong in ("ab", "aa", "bbb", "a", "b" * 100)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    path = tmp_path / "recipe.yaml"
    path.write_text(f"""
rm: {{max_num_epochs: 100, max_num_steps: 4, val_period: 3}}
policy:
  model_name: nemo_rl/fresh_classifier
  device: cpu
  max_total_sequence_length: 64
  train_global_batch_size: 4
  train_micro_batch_size: 2
data:
  disjoint: false
  train: {{data_path: {tmp_path}/pairs.jsonl}}
  validation: {{data_path: {tmp_path}/pairs.jsonl, size: 4}}
checkpointing: {{checkpoint_dir: {tmp_path}/trained}}
logger: {{log_dir: {tmp_path}/runs, progress: false}}
""")
    return path


def run(recipe: Path, *arguments: str) -> int:
    return run_command(REWARD_MODEL_JOB.command("Train.", recipe), arguments)


def test_a_run_writes_a_directory_that_scores(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe) == 0
    directory = recipe.parent / "trained"
    assert str(directory) in capsys.readouterr().out
    lines = [
        json.loads(line)
        for line in (recipe.parent / "runs" / "exp_001" / "metrics.jsonl").read_text().split("\n")
        if line
    ]
    assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "validation/pair_accuracy" in line] == [3, 4]
    assert find_undocumented({name for line in lines for name in line} - {"step"}) == []

    async def scores() -> list[float | Failure | ResponseFault]:
        section = RewardModelScorerConfig(model_name=str(directory), device="cpu", in_actor=False)
        scorer = RewardModelScorer("rm", section)
        talks = [(Message("user", QUESTION), Message("assistant", answer)) for answer in ("ba", "ab")]
        try:
            return await scorer.score([ScoreRequest(talk, {}) for talk in talks])
        finally:
            await scorer.close()

    better, worse = asyncio.run(scores())
    assert isinstance(better, float)
    assert isinstance(worse, float)
    assert better != worse


def test_pairs_that_are_all_too_long_are_no_data(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "policy.max_total_sequence_length=8") == ExitCode.BAD_INPUT
    assert "no pairs (of 5 that were read)" in capsys.readouterr().err
    assert not (recipe.parent / "trained").exists()
    assert run(recipe, "policy.max_total_sequence_length=8", "++data.overlong=mask") == ExitCode.BAD_INPUT
    assert run(recipe, "policy.max_total_sequence_length=8", "++data.overlong=refuse") == ExitCode.BAD_INPUT
    assert "data.overlong = 'refuse': pair 0 of 'train'" in capsys.readouterr().err


def test_a_directory_that_another_run_writes_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files, "LOCK_WAIT_S", 0.1)
    trained = recipe.parent / "trained"
    with durable_files.hold_directory(trained, key="key", is_replaced=True):
        assert run(recipe) == ExitCode.BAD_INPUT
    assert not (recipe.parent / "runs").exists()
    assert f"checkpointing.checkpoint_dir = {str(trained)!r}: in use by process" in capsys.readouterr().err
    assert run(recipe) == 0
    assert run(recipe) == 0  # replaced, under the same lock
    assert ".lock" not in {path.name for path in trained.iterdir()}


def test_records_that_a_full_disk_does_not_take_are_named_and_fail_the_run(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(loggers, "append_whole", refuse)
    assert run(recipe) == ExitCode.FAILED
    shown = capsys.readouterr()
    assert "Lost                           metrics.jsonl lacks 6\n" in shown.out
    assert "RecordError: records could not be written: metrics.jsonl lacks 6" in shown.err


def test_a_dry_run_prints_the_configuration(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "--dry-run", "rm.seed=3") == 0
    assert "seed: 3" in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()
