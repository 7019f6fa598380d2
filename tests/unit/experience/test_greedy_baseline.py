"""Groups with a greedy rollout, whose reward is the baseline of the others (ReMax)."""

import asyncio
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_rl import batch as keys
from nemo_rl.algorithms.advantages import is_informative
from nemo_rl.algorithms.estimators import make_advantage_estimator
from nemo_rl.algorithms.grpo import transform_rewards
from nemo_rl.config.master import GRPOConfig
from nemo_rl.config.registries import ADVANTAGE_ESTIMATORS, LOSSES
from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.assembly import assemble_batch
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.failure_limits import ConsecutiveFailureLimit
from nemo_rl.experience.replay_buffer import ReplayBufferState
from nemo_rl.experience.replay_buffer_state import buffer_state_from_dict, buffer_state_to_dict
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import CollectedGroups, EnvStep, Failure, FailureClass, StopReason, Trajectory, TrajectoryGroup
from tests.fakes.environments import FakeEnvironment, reward_by_length
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.async_setup import LIMITS, engine, names, step
from tests.unit.experience.rollout_setup import OPTIONS, SAMPLING, dependencies, prompt

FAILURE = Failure(FailureClass.ENVIRONMENT, "no verdict")
BACKGROUND: dict[str, Any] = {"max_age_steps": 1, "stale_groups": "wait", "max_generation_failures": 10}


def source(kind: type, generation: FakeGeneration, environment: FakeEnvironment | None = None, **options: Any) -> Any:
    sampling = replace(SAMPLING, top_p=0.9, top_k=4)
    return kind(
        PromptLoader([prompt(i) for i in range(8)], shuffle=False, seed=0, max_epochs=1),
        dependencies(generation, {"game": environment or FakeEnvironment()}, limits=LIMITS),
        replace(OPTIONS, sampling=sampling),
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        failures=RolloutConfig(
            **{key: options.pop(key) for key in ("oversample", "max_failed_share") if key in options}
        ),
        **{"greedy_baseline": True, **(BACKGROUND if kind is AsyncSource else {}), **options},
    )


def groups_of(rewards: list[float], baseline: Trajectory | float) -> tuple[TrajectoryGroup, ...]:
    """One group: `rewards`, and its baseline or the reward of that."""

    def rollout(index: int, reward: float) -> Trajectory:
        return Trajectory(prompt(0), "g", index, (), StopReason.DONE, {"score": reward})

    members = tuple(rollout(index, reward) for index, reward in enumerate(rewards))
    greedy = baseline if isinstance(baseline, Trajectory) else rollout(len(rewards), baseline)
    return (TrajectoryGroup("g", prompt(0), members, greedy),)


FAILED = Trajectory(prompt(0), "g", 2, (), StopReason.FAILED, failure=FAILURE)


@pytest.mark.parametrize(
    ("kind", "options"), [(SyncSource, {}), (SyncSource, {"oversample": 1.5}), (AsyncSource, {})], ids=str
)
def test_each_group_has_one_greedy_rollout_beside_those_that_are_counted(kind: type, options: dict[str, Any]) -> None:
    async def main() -> None:
        generation = engine()
        one = source(kind, generation, **options)
        collected: CollectedGroups = await step(one, generation, 0)
        assert names(collected) == ["p0", "p1"]
        assert collected.metrics["num_rollouts"] == 4
        for group in collected.groups:
            assert [t.generation_index for t in group.trajectories] == [0, 1]
            assert group.baseline is not None
            assert (group.baseline.generation_index, group.baseline.prompt) == (2, group.prompt)
        for request in generation.requests:
            sampling = (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k)
            index = int(request.request_id.split(":")[3])
            assert sampling == ((0.0, 1.0, -1) if index == 2 else (1.0, 0.9, 4))
        await one.close()

    run_in_virtual_time(main())


def test_the_baselines_of_buffered_groups_are_in_a_checkpoint_and_groups_without_are_collected_again() -> None:
    async def main() -> None:
        generation = engine()
        first = source(AsyncSource, generation)
        await step(first, generation, 0)
        await asyncio.sleep(10)
        state = first.state_dict()
        await first.close()
        buffered: ReplayBufferState = state["replay_buffer"]
        plain = buffer_state_to_dict(buffered)
        loader = PromptLoader([prompt(i) for i in range(8)], shuffle=False, seed=0, max_epochs=1)
        assert buffer_state_from_dict(plain, loader) == buffered
        assert all(one.group.baseline is not None for one in buffered.complete)
        for has_baseline in (True, False):
            second = source(AsyncSource, again := engine(), greedy_baseline=has_baseline)
            second.load_state_dict(state)
            assert names(await step(second, again, 1)) == ["p2", "p3"]
            asked = {request.request_id.split(":")[2] for request in again.requests}
            assert ("2" in asked) == (not has_baseline)
            await second.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize(("greedy_s", "expected"), [(1.0, ["p0", "p3"]), (1e6, ["p3", "p4"])], ids=["ended", "runs"])
def test_a_late_group_is_trimmed_only_once_its_greedy_rollout_has_ended(greedy_s: float, expected: list[str]) -> None:
    seconds = {(0, 1): 1e6, (0, 2): greedy_s}

    async def main() -> None:
        generation = engine(lambda place, index: seconds.get((place, index), 1.0))
        one = source(AsyncSource, generation, stale_groups="trim")
        assert names(await step(one, generation, 0)) == ["p1", "p2"]
        collected = await step(one, generation, 1)
        assert names(collected) == expected
        assert all(group.baseline is not None and group.baseline.failure is None for group in collected.groups)
        await one.close()

    run_in_virtual_time(main())


def test_scaling_reaches_the_baselines_reward_and_the_advantage_is_the_difference() -> None:
    scaling = {"enabled": True, "source_min": 0.0, "source_max": 1.0, "target_min": -1.0, "target_max": 3.0}
    config = GRPOConfig.model_validate({"max_num_steps": 1, "reward_scaling": scaling})
    groups = groups_of([1.0, 0.25], baseline=0.5)
    rewards = transform_rewards(groups, config, None)
    assert rewards == {("g", 0): 3.0, ("g", 1): 0.0, ("g", 2): 1.0}
    batch, rows = assemble_batch(groups, rewards, min_group_size=1)
    assert len(rows) == 2
    assert batch[keys.BASELINE_REWARD].tolist() == [1.0, 1.0]
    estimator = make_advantage_estimator(ADVANTAGE_ESTIMATORS.read({"name": "remax"}), LOSSES.new())
    assert estimator(batch)[:, 0].tolist() == [2.0, -1.0]


def test_a_group_whose_greedy_rollout_failed_is_not_trained_and_the_cause_is_told() -> None:
    groups = groups_of([1.0, 0.0], baseline=FAILED)
    assert transform_rewards(groups, GRPOConfig.model_validate({"max_num_steps": 1}), None) == {}
    with pytest.raises(RolloutError, match="no verdict"):
        assemble_batch(groups, min_group_size=1)


@pytest.mark.parametrize("kind", [SyncSource, AsyncSource])
def test_greedy_rollouts_that_fail_are_counted_and_written(kind: type, tmp_path: Path) -> None:
    async def main() -> None:
        generation = engine(lambda place, index: 2.0 if index == 2 else 1.0)
        calls: Counter[int] = Counter()

        def fail_last(conversation: Any, state: Any) -> EnvStep | Failure:
            calls[state["number"]] += 1
            return FAILURE if (state["number"], calls[0]) == (0, 3) else reward_by_length(conversation, state)

        with RolloutWriter(tmp_path / "train.jsonl") as writer:
            one = source(kind, generation, FakeEnvironment(fail_last), writer=writer, max_failed_share=0.9)
            collected = await step(one, generation, 0)
            await one.close()
        rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        assert [(row["prompt_id"], row["generation_index"]) for row in rows if row["failure"]] == [("p0", 2)]
        assert len(rows) == collected.metrics["num_rollouts"] == 5

    run_in_virtual_time(main())


def test_groups_in_a_row_whose_greedy_rollouts_failed_end_the_run() -> None:
    limit = ConsecutiveFailureLimit(1)
    (group,) = groups_of([1.0, 0.0], baseline=FAILED)
    limit.record(group)
    with pytest.raises(RolloutError, match=r"2 groups in a row failed.*no verdict"):
        limit.record(group)


@pytest.mark.parametrize(("rewards", "differ"), [([1.0], True), ([0.5], False), ([0.5, 0.5], False)])
def test_a_group_teaches_something_if_a_reward_differs_from_the_baselines(rewards: list[float], differ: bool) -> None:
    assert is_informative(groups_of(rewards, baseline=0.5)[0]) == differ
