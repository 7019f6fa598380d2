"""Background collection in the real loop, with the hf engine in float32."""

import asyncio
import json
import math
from pathlib import Path

import pytest

from nemo_rl.algorithms.loop import TrainingProgress
from nemo_rl.launch.training import run_training
from nemo_rl.metric_names import find_undocumented
from tests.unit.launch.conftest import Recipe

pytestmark = pytest.mark.usefixtures("process_state")

CORRECTED = (
    "grpo.max_num_steps=5",
    "grpo.max_num_epochs=2",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
    "policy.optimizer.kwargs.lr=0.01",
)


def trained(recipe: Recipe, runs: Path, *overrides: str) -> tuple[TrainingProgress, dict[int, dict[str, float]]]:
    """What a run reached, and its metrics by step."""
    training = asyncio.run(run_training(recipe(*CORRECTED, f"logger.log_dir={runs}", *overrides), "uv run train.py"))
    metrics: dict[int, dict[str, float]] = {}
    (path,) = runs.glob("*/metrics.jsonl")
    for line in path.read_text().splitlines():
        row = json.loads(line)
        metrics.setdefault(row["step"], {}).update(row)
    return training, metrics


def test_with_a_bound_of_0_the_asynchronous_run_equals_the_synchronous_one(recipe: Recipe, tmp_path: Path) -> None:
    _, sync = trained(recipe, tmp_path / "sync")
    _, background = trained(
        recipe, tmp_path / "async", "grpo.async_grpo.enabled=true", "grpo.async_grpo.max_trajectory_age_steps=0"
    )
    assert list(sync) == list(background) == [1, 2, 3, 4, 5]
    assert len({step["train/loss"] for step in sync.values()}) > 1
    for step, metrics in sync.items():
        for name, value in metrics.items():
            if name.startswith("train/"):
                assert math.isclose(background[step][name], value, rel_tol=1e-6, abs_tol=1e-6), (step, name)


def test_a_run_collects_ahead_within_its_bound_and_resumes_with_its_buffer(recipe: Recipe, tmp_path: Path) -> None:
    background = (
        "grpo.async_grpo.enabled=true",
        "grpo.async_grpo.max_trajectory_age_steps=2",
        "checkpointing.enabled=true",
        f"checkpointing.checkpoint_dir={tmp_path / 'checkpoints'}",
        "checkpointing.save_period=1",
        "checkpointing.keep_top_k=null",
    )
    _, first = trained(recipe, tmp_path / "first", *background, "grpo.max_num_steps=2")
    assert (tmp_path / "checkpoints" / "step_2" / "replay_buffer.pt").is_file()
    training, second = trained(recipe, tmp_path / "second", *background, "grpo.max_num_steps=100")
    assert training.data_exhausted
    ages = [step["train/max_trajectory_age"] for step in (first | second).values() if "train/loss" in step]
    assert len(ages) == 6
    assert 0 < max(ages) <= 2
    assert find_undocumented(name for step in (first | second).values() for name in step if "/" in name) == []
    rows = [json.loads(line) for path in sorted(tmp_path.glob("*/*/rollouts/train.jsonl")) for line in path.open()]
    assert sorted({row["group_id"].rpartition(":")[2] for row in rows}, key=int) == [str(place) for place in range(12)]
    assert len(rows) == 12 * 3
