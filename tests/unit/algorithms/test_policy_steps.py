"""Steps of several policies: their batches, and their metrics."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl.algorithms.policy_steps import make_batches, merge_policy_metrics, train_policies
from nemo_rl.algorithms.stages import StepBatch
from nemo_rl.errors import RolloutError
from nemo_rl.observability.loggers import StepTimer
from nemo_rl.types import CollectedGroups, TrajectoryGroup
from tests.unit.experience.test_policy_views import PROMPT, played

GAME = TrajectoryGroup("g", PROMPT, (played(rewards={"won": 1.0}),))


class Recorded:
    """A policy and an algorithm that write down their calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.loss_fn = "loss"

    async def select(self, name: str) -> None:
        self.calls.append(f"select {name}")

    async def make_batch(self, collected: CollectedGroups, timer: StepTimer) -> StepBatch:
        self.calls.append(f"batch of {len(collected.groups)}")
        return StepBatch("a batch", (), {"reward": 1.0})  # type: ignore[arg-type]

    async def train_step(self, batch: Any, loss_fn: Any) -> dict[str, float]:
        self.calls.append("train")
        return {"loss": 2.0}


def run_of(recorded: Recorded, *names: str) -> Any:
    return SimpleNamespace(
        algorithms=dict.fromkeys(names, recorded), policy=recorded, config=SimpleNamespace(min_group_size=1)
    )


def test_all_batches_are_made_before_a_policy_is_trained() -> None:
    recorded = Recorded()
    run = run_of(recorded, "first", "silent", "second")
    batches = asyncio.run(make_batches(run, CollectedGroups((GAME,)), StepTimer()))
    assert list(batches) == ["first", "second"]  # the policy that has not spoken is left as it is
    metrics = asyncio.run(train_policies(run, batches))
    assert metrics["second"] == {"reward": 1.0, "loss": 2.0}
    made = ["select first", "batch of 1", "select second", "batch of 1"]
    assert recorded.calls == [*made, "select first", "train", "select second", "train"]


def test_a_step_in_which_no_policy_spoke_is_an_error() -> None:
    with pytest.raises(RolloutError, match="no policy of silent has a rollout"):
        asyncio.run(make_batches(run_of(Recorded(), "silent"), CollectedGroups((GAME,)), StepTimer()))


def test_a_single_policy_is_never_selected() -> None:
    recorded = Recorded()
    run = run_of(recorded, "")
    batches = asyncio.run(make_batches(run, CollectedGroups((GAME,)), StepTimer()))
    metrics = merge_policy_metrics(asyncio.run(train_policies(run, batches)), {"turns": 1.0})
    assert recorded.calls == ["batch of 1", "train"]
    assert metrics == {"reward": 1.0, "loss": 2.0}


def test_metrics_have_the_policys_name_and_counts_are_sums() -> None:
    by_policy = {"a": {"loss": 1.0, "total_num_tokens": 5.0}, "b": {"loss": 2.0, "total_num_tokens": 6.0}}
    assert merge_policy_metrics(by_policy, {"turns": 3.0}) == {
        "turns": 3.0,
        "loss": 1.0,
        "total_num_tokens": 11.0,
        "policies/a/loss": 1.0,
        "policies/a/total_num_tokens": 5.0,
        "policies/b/loss": 2.0,
        "policies/b/total_num_tokens": 6.0,
    }
