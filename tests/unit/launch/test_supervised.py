"""run_rm.py's whole run, small, in this process."""

import asyncio
import json
from pathlib import Path

import pytest

from nemo_rl.commands import ExitCode, run_command
from nemo_rl.environments.scorers.reward_model import RewardModelScorer, RewardModelScorerConfig
from nemo_rl.interfaces import ScoreRequest
from nemo_rl.launch.commands import REWARD_MODEL_JOB
from nemo_rl.metric_names import find_undocumented
from nemo_rl.types import Failure, Message

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

    async def scores() -> list[float | Failure]:
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


def test_a_dry_run_prints_the_configuration(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(recipe, "--dry-run", "rm.seed=3") == 0
    assert "seed: 3" in capsys.readouterr().out
    assert not (recipe.parent / "runs").exists()
