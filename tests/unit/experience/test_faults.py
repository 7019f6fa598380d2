"""Faults injected by seed at every boundary: each rollout is accounted for, and no reward is made up."""

import asyncio
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from nemo_rl.algorithms.advantages import GroupRelativeAdvantages
from nemo_rl.config.run import RolloutConfig
from nemo_rl.data.loader import PromptLoader
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.sources import SyncSource
from nemo_rl.interfaces import CollectedGroups
from nemo_rl.types import (
    Completion,
    EnvStep,
    FailedRequest,
    FailureClass,
    GenerationRequest,
    Message,
    StopReason,
    TrajectoryGroup,
)
from tests.fakes.environments import FakeEnvironment, draws_of
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import LIMITS, OPTIONS, VOCAB_SIZE, dependencies, prompt

NUM_PROMPTS, GROUP = 40, 4
CLASSES = {FailureClass.INFRA, FailureClass.ENVIRONMENT, FailureClass.REWARD}


class FaultyEngine(FakeGeneration):
    """20% of the calls fail, by seed and attempt, so that a retry may succeed; half of them raise."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCAB_SIZE)
        self.num_faults = 0

    async def _answer(self, request: GenerationRequest) -> Completion | FailedRequest:
        attempt = self._attempts.get(request.request_id, 0)
        draw = draws_of("engine", request.seed, attempt).random()
        if draw < 0.2:
            self._attempts[request.request_id] = attempt + 1
            self.num_faults += 1
            if draw < 0.1:
                raise ConnectionError("replica 3 is gone")
            return FailedRequest(request.request_id, "preempted")
        return await super()._answer(request)


async def fail_a_tenth(conversations) -> None:
    if draws_of("call", [m.content for m in conversations[0]]).random() < 0.1:
        raise RuntimeError("the judge broke down")


def reward_above_zero(conversation, state) -> EnvStep:
    """Every honest reward is at least 1; a twentieth of them is no number."""
    draws = draws_of("reward", [m.content for m in conversation], state["number"])
    reward = float("nan") if draws.random() < 0.05 else draws.choice((1.0, 2.0, 3.0))
    return EnvStep((Message("user", "more"),), {"score": reward}, done=draws.random() < 0.4, state=state)


def collect(*, max_retries: int) -> tuple[CollectedGroups, FaultyEngine]:
    engine = FaultyEngine()
    environments = {"game": FakeEnvironment(reward_above_zero, before=fail_a_tenth)}
    limits = replace(LIMITS, max_turns=2, max_retries=max_retries)
    source = SyncSource(
        PromptLoader([prompt(i) for i in range(NUM_PROMPTS)], shuffle=False, seed=0, max_epochs=1),
        dependencies(engine, environments, limits=limits),
        OPTIONS,
        num_prompts_per_step=NUM_PROMPTS,
        num_generations_per_prompt=GROUP,
        failures=RolloutConfig(max_failed_share=1.0),
    )
    return asyncio.run(source.next_groups(0)), engine


def failed_classes(groups: tuple[TrajectoryGroup, ...]) -> Counter[FailureClass]:
    return Counter(t.failure.failure_class for g in groups for t in g.trajectories if t.failure is not None)


def test_every_rollout_is_accounted_for():
    collected, _ = collect(max_retries=0)
    reasons = Counter(t.stop_reason for g in collected.groups for t in g.trajectories)
    assert set(reasons) == set(StopReason)
    assert reasons.total() == NUM_PROMPTS * GROUP
    failed = failed_classes(collected.groups)
    assert set(failed) == CLASSES
    assert failed.total() == reasons[StopReason.FAILED]
    assert {name: collected.metrics[f"failures/{name}"] for name in CLASSES} == failed


def test_retries_bring_back_what_infrastructure_lost():
    without, _ = collect(max_retries=0)
    with_retries, engine = collect(max_retries=3)
    assert engine.num_faults > 20
    assert failed_classes(without.groups)[FailureClass.INFRA] > 20
    assert failed_classes(with_retries.groups)[FailureClass.INFRA] < 3


def test_no_reward_is_made_up():
    collected, _ = collect(max_retries=1)
    for group in collected.groups:
        assert all(t.reward >= 1.0 for t in group.survivors)
        assert all(not t.rewards for t in group.trajectories if t.failure is not None)


def test_batch_and_baselines_hold_survivors_alone():
    collected, _ = collect(max_retries=0)
    batch, _ = assemble_batch(collected.groups, min_group_size=2)
    kept = [group for group in collected.groups if len(group.survivors) >= 2]
    assert 0 < len(kept) <= NUM_PROMPTS
    assert batch.batch_size[0] == sum(len(group.survivors) for group in kept)
    estimate = GroupRelativeAdvantages(normalize=False)
    baselines = batch["reward"] - estimate(batch)[:, 0]
    for place, group in enumerate(kept):
        of_survivors = statistics.fmean(t.reward for t in group.survivors)
        assert baselines[batch["group_id"] == place].tolist() == pytest.approx([of_survivors] * len(group.survivors))
