"""The groups of a step, with and without dynamic sampling, and what happens when rollouts fail."""

import asyncio
import json

import pytest

from nemo_rl.config.run import RolloutConfig
from nemo_rl.data.loader import PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.sources import FilteredSource, SyncSource, prompts_per_batch
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import CollectedGroups
from nemo_rl.types import EnvStep, Failure, FailureClass, TrajectoryGroup
from tests.fakes.environments import FakeEnvironment, draws_of
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, prompt


def source(
    environment: FakeEnvironment | None = None,
    *,
    num_prompts: int = 10,
    batch: int = 4,
    group: int = 2,
    epochs: int = 1,
    is_async: bool = True,
    failures: RolloutConfig | None = None,
    writer: RolloutWriter | None = None,
) -> SyncSource:
    engine = FakeGeneration(vocab_size=VOCAB_SIZE, is_async=is_async)
    return SyncSource(
        PromptLoader([prompt(i) for i in range(num_prompts)], shuffle=False, seed=0, max_epochs=epochs),
        dependencies(engine, {"game": environment or FakeEnvironment()}),
        OPTIONS,
        num_prompts_per_step=batch,
        num_generations_per_prompt=group,
        failures=failures or RolloutConfig(),
        writer=writer,
    )


def steps(the_source, count: int) -> list[CollectedGroups]:
    async def main() -> list[CollectedGroups]:
        return [await the_source.next_groups(step) for step in range(count)]

    return asyncio.run(main())


def test_groups_come_in_the_order_of_the_prompts_with_their_rollouts_in_order():
    (collected,) = steps(source(), 1)
    assert [g.prompt.prompt_id for g in collected.groups] == ["p0", "p1", "p2", "p3"]
    assert all([t.generation_index for t in g.trajectories] == [0, 1] for g in collected.groups)
    assert collected.metrics["num_rollouts"] == 8
    assert collected.metrics["avg_trajectory_age"] == 0


def test_last_step_may_be_short_and_then_the_data_is_spent():
    the_source = source()
    assert [len(s.groups) for s in steps(the_source, 3)] == [4, 4, 2]
    with pytest.raises(StopAsyncIteration):
        steps(the_source, 1)


def test_group_ids_differ_over_epochs_and_steps():
    collected = steps(source(num_prompts=2, batch=2, epochs=3), 3)
    ids = [g.group_id for one in collected for g in one.groups]
    assert ids == ["0:p0:0", "0:p1:1", "1:p0:2", "1:p1:3", "2:p0:4", "2:p1:5"]
    tokens = {t.message_log[-1].token_ids for one in collected for g in one.groups for t in g.trajectories}
    assert len(tokens) > 6  # another epoch has other seeds


def test_engine_without_async_generation_gives_the_same_groups():
    def logs(is_async: bool) -> list:
        (collected,) = steps(source(is_async=is_async), 1)
        return [t.message_log for g in collected.groups for t in g.trajectories]

    assert logs(True) == logs(False)


def test_resumed_source_goes_on_as_the_uninterrupted_one():
    whole, first = source(), source()
    expected = steps(whole, 2)[1]
    steps(first, 1)
    state = first.state_dict()
    assert (state["consumed_prompts"], state["epoch"]) == (4, 0)
    resumed = source()
    resumed.load_state_dict(state)
    (actual,) = steps(resumed, 1)
    assert [g.group_id for g in actual.groups] == [g.group_id for g in expected.groups]
    assert [t.message_log for g in actual.groups for t in g.trajectories] == [
        t.message_log for g in expected.groups for t in g.trajectories
    ]


def test_environment_that_always_fails_stops_the_run_within_its_bound_with_the_first_cause():
    async def refuse(conversations) -> None:
        raise ValueError("no judge")

    environment = FakeEnvironment(before=refuse)
    with pytest.raises(RolloutError, match="first cause: environment: ValueError: no judge"):
        steps(source(environment, num_prompts=50, batch=50), 1)
    assert len(environment.calls) <= 100


def test_failed_rollouts_stay_in_their_groups_and_are_counted():
    def fail_some(conversation, state):
        if state["number"] == 1:
            return Failure(FailureClass.ENVIRONMENT, "broken puzzle")
        return EnvStep(rewards={"r": 1.0})

    (collected,) = steps(source(FakeEnvironment(fail_some)), 1)
    assert [len(g.survivors) for g in collected.groups] == [2, 0, 2, 2]
    assert collected.metrics["failures/environment"] == 2


def test_all_rollouts_are_written_with_the_step_that_trains_on_them(tmp_path):
    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        steps(source(writer=writer), 2)
    rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8


def rewards_by_prompt(*informative: int):
    """Prompts of these numbers have rewards that differ; those of all others are equal."""

    def answer(conversation, state) -> EnvStep:
        chance = draws_of(conversation[-1].content, state["number"]).random()
        return EnvStep(rewards={"r": chance if state["number"] in informative else 0.5})

    return FakeEnvironment(answer)


def differs(group: TrajectoryGroup) -> bool:
    return len({t.reward for t in group.survivors}) > 1


def filtered(inner, *, max_batches: int = 10, min_group_size: int = 2) -> FilteredSource:
    return FilteredSource(
        inner,
        is_informative=differs,
        num_prompts_per_step=2,
        max_gen_batches=max_batches,
        min_group_size=min_group_size,
    )


def test_dynamic_sampling_fills_a_step_with_informative_groups():
    inner = source(rewards_by_prompt(1, 4, 5), num_prompts=12, batch=3)
    (collected,) = steps(filtered(inner), 1)
    assert [g.prompt.prompt_id for g in collected.groups] == ["p1", "p4"]
    metrics = collected.metrics
    assert metrics["dynamic_sampling_num_gen_batches"] == 2
    assert metrics["dynamic_sampling_num_discarded_valid_samples"] == 2  # p5
    assert metrics["num_rollouts"] == 12
    assert metrics["avg_trajectory_age"] == 0
    kept = [t.reward for g in collected.groups for t in g.trajectories]
    assert metrics["filtered_reward"] == pytest.approx(sum(kept) / 4)
    assert metrics["reward"] != metrics["filtered_reward"]


def test_dynamic_sampling_gives_up_after_its_bound():
    with pytest.raises(RolloutError, match=r"1 of a step's 2 groups .* after 3 batches \(grpo\.dynamic_sampling_max_g"):
        steps(filtered(source(rewards_by_prompt(1), num_prompts=40), max_batches=3), 1)


def test_dynamic_sampling_ends_with_what_the_data_set_leaves():
    the_source = filtered(source(rewards_by_prompt(1, 2, 9), num_prompts=10, batch=4))
    first, last = steps(the_source, 2)
    assert [g.prompt.prompt_id for g in first.groups] == ["p1", "p2"]
    assert [g.prompt.prompt_id for g in last.groups] == ["p9"]
    with pytest.raises(StopAsyncIteration):
        steps(the_source, 1)
    assert the_source.state_dict()["consumed_prompts"] == 10


def test_dynamic_sampling_leaves_groups_without_enough_survivors_out():
    def answer(conversation, state):
        if state["number"] == 0 and draws_of(conversation[-1].content).random() < 0.5:
            return Failure(FailureClass.ENVIRONMENT, "broken")
        return EnvStep(rewards={"r": draws_of(conversation[-1].content).random()})

    inner = source(FakeEnvironment(answer), batch=3, group=6)
    (collected,) = steps(filtered(inner, min_group_size=6), 1)
    assert 0 < collected.metrics["failures/environment"] < 5
    assert [g.prompt.prompt_id for g in collected.groups] == ["p1", "p2"]


def test_prompts_per_batch_rounds_up():
    assert [prompts_per_batch(4, m) for m in (1.0, 1.5, 1.6)] == [4, 6, 7]
