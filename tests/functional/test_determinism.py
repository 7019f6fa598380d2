"""Two runs in the mode that docs/observability.md describes are equal in every bit; a stored step can be replayed."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.viewer.replay import format_replay, replay
from tests.functional.cli import Run, run_grpo

pytestmark = pytest.mark.timeout(1200)  # two runs one after the other, perhaps beside other work

DETERMINISTIC = (
    "policy.generation.backend=hf",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=3",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "checkpointing.metric_name=null",
    "checkpointing.save_period=2",
    "rollout.write_token_ids=true",
    "logger.progress=false",
)
CLOCKS = ("timing/", "performance/", "efficiency/")  # the only metrics that may differ


def metrics_without_clocks(run: Run) -> dict[int, dict[str, float]]:
    return {
        step: {name: value for name, value in row.items() if not name.startswith(CLOCKS)}
        for step, row in run.metrics().items()
    }


def rollouts(run: Run) -> list[dict[str, Any]]:
    assert run.directory is not None
    lines = (run.directory / "rollouts" / "train.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow  # the resumed run of test_interrupt_and_resume.py equals an uninterrupted one
def test_two_runs_are_equal_in_every_bit(tmp_path: Path) -> None:
    one, other = (run_grpo(tmp_path / name, *DETERMINISTIC) for name in ("one", "other"))
    assert one.returncode == other.returncode == 0, one.stderr + other.stderr
    first, second = metrics_without_clocks(one), metrics_without_clocks(other)
    assert {"train/loss", "train/grad_norm", "train/reward"} <= first[3].keys()
    assert first == second
    assert [{**row, "timings": None} for row in rollouts(one)] == [{**row, "timings": None} for row in rollouts(other)]
    assert one.directory is not None
    for step in (1, 3):  # from the initial model, and from the checkpoint of step 2
        result = replay(one.directory, step)
        assert result.no_loss_because is None
        assert {c.name for c in result.comparisons} >= {"train/loss", "train/advantages/max", "train/reward"}
        assert all(c.agrees for c in result.comparisons), format_replay(result)
    metrics = one.directory / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"train/advantages/max": ', '"train/advantages/max": 1'))
    assert not all(c.agrees for c in replay(one.directory, 1).comparisons)


@pytest.mark.slow  # two runs
def test_validations_beside_training_give_the_metrics_of_those_that_are_waited_for(tmp_path: Path) -> None:
    validating = (
        *(one for one in DETERMINISTIC if not one.startswith("grpo.val_")),
        *("grpo.val_at_start=true", "grpo.val_period=1", "grpo.val_greedy=true", "grpo.max_val_samples=24"),
    )
    alone, beside = (
        run_grpo(tmp_path / str(overlap), *validating, f"grpo.val_overlap={overlap}") for overlap in ("false", "true")
    )
    assert alone.returncode == beside.returncode == 0, alone.stderr + beside.stderr
    expected = metrics_without_clocks(alone)
    assert [step for step, row in expected.items() if "validation/greedy_accuracy" in row] == [0, 1, 2, 3]
    assert metrics_without_clocks(beside) == expected
