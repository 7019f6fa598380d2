"""A reward model through the command line, trained and then trained against: a few steps of each."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.cli import DEADLINE_S, ROOT, environment, run_grpo

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.slow  # two whole runs; contracts have the scores
def test_a_reward_model_that_run_rm_trained_rewards_grpo(tmp_path: Path) -> None:
    directory = tmp_path / "reward_model"
    trained = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "run_rm.py"),
            "policy.model_name=nemo_rl/fresh_classifier",
            "rm.max_num_steps=2",
            "policy.train_global_batch_size=16",
            "policy.train_micro_batch_size=16",
            f"checkpointing.checkpoint_dir={directory}",
            f"logger.log_dir={tmp_path / 'rm'}",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(),
        cwd=ROOT,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr
    assert "Validation pairs ranked right" in trained.stdout
    run = run_grpo(
        tmp_path / "grpo",
        "--config",
        str(ROOT / "examples" / "configs" / "reward_model.yaml"),
        f"scorers.rm.model_name={directory}",
        "++scorers.letters={type: function, function: 'tests.functional.rules:num_letters', weight: 0.5}",
        "env.spelling.scorers=[rm,letters]",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "grpo.max_val_samples=4",
        "grpo.val_at_start=false",
    )
    assert run.returncode == 0, run.stdout + run.stderr
    metrics = run.metrics()
    for step in (1, 2):
        row = metrics[step]
        assert row["train/reward"] == pytest.approx(row["train/reward/rm"] + row["train/reward/letters"], abs=1e-5)
        assert row["train/reward/letters"] > 0
        assert sum(value for name, value in row.items() if name.startswith("train/failures/")) == 0
    assert 0 <= metrics[2]["validation/accuracy"] <= 1  # of the right answers, not of the scores
