"""More groups are begun than a step takes: which it takes, what becomes of the others, and what a resume repeats."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.oversampling import FirstComplete, collect_first, num_begun
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import (
    CollectedGroups,
    EnvStep,
    Failure,
    FailureClass,
    GenerationRequest,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)
from tests.fakes.environments import FakeEnvironment, draws_of
from tests.fakes.generation import FakeGeneration, sample
from tests.unit.experience.rollout_setup import OPTIONS, VOCAB_SIZE, dependencies, prompt

GROUP = 2


def group_of(one: LoadedPrompt, num_survivors: int) -> TrajectoryGroup:
    failures = [None if i < num_survivors else Failure(FailureClass.ENVIRONMENT, "broken") for i in range(GROUP)]
    return TrajectoryGroup(
        one.group_id,
        one.prompt,
        tuple(
            Trajectory(
                one.prompt, one.group_id, i, (), StopReason.FAILED if failure else StopReason.DONE, failure=failure
            )
            for i, failure in enumerate(failures)
        ),
    )


def collected(order: list[int], survivors: list[int], *, count: int, num_required: int) -> tuple[FirstComplete, int]:
    """Return what is collected when the groups end one after another in `order`, and how many are left running."""

    async def main() -> tuple[FirstComplete, int]:
        ends = [asyncio.Event() for _ in order]
        prompts = [LoadedPrompt(prompt(i), 0, i) for i in range(len(order))]

        async def collect(one: LoadedPrompt) -> TrajectoryGroup:
            await ends[one.prompt_index].wait()
            return group_of(one, survivors[one.prompt_index])

        async def end_in_order() -> None:
            for index in order:
                ends[index].set()
                for _ in range(10):  # until the group is seen to have ended
                    await asyncio.sleep(0)

        ending = asyncio.create_task(end_in_order())
        first = await collect_first(prompts, collect, count=count, num_required=num_required, min_group_size=GROUP)
        ending.cancel()
        await asyncio.wait([ending])
        return first, len(asyncio.all_tasks()) - 1

    return asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_step_takes_the_required_and_then_the_first_that_end(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 9))
    order = data.draw(st.permutations(range(num)))
    survivors = data.draw(st.lists(st.sampled_from([GROUP, GROUP, GROUP, 1, 0]), min_size=num, max_size=num))
    count = data.draw(st.integers(1, num))
    num_required = data.draw(st.integers(0, count))
    first, num_running = collected(list(order), survivors, count=count, num_required=num_required)

    assert num_running == 0
    assert len(first.taken) == count
    taken, failed, deferred = (
        [int(one.prompt.prompt_id[1:]) for one in part] for part in (first.taken, first.failed, first.deferred)
    )
    assert sorted((*taken, *failed, *deferred)) == list(range(num))
    assert taken == sorted(taken)
    usable = [i for i in order if survivors[i] == GROUP]
    assert not set(range(num_required)) & set(deferred)  # none is deferred twice
    expected = [i for i in usable if i < num_required] + [i for i in usable if i >= num_required]
    assert {i for i in taken if i in usable} == set(expected[:count])
    assert all(survivors[i] < GROUP for i in failed)
    assert {one.group_id for one in first.discarded} <= {one.group_id for one in first.deferred}


def test_an_error_cancels_all_groups() -> None:
    cancelled: list[int] = []

    async def collect(one: LoadedPrompt) -> TrajectoryGroup:
        if one.prompt_index == 1:
            raise RolloutError("no judge")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(one.prompt_index)
        raise AssertionError

    prompts = [LoadedPrompt(prompt(i), 0, i) for i in range(3)]
    with pytest.raises(RolloutError, match="no judge"):
        asyncio.run(collect_first(prompts, collect, count=2, num_required=0, min_group_size=1))
    assert sorted(cancelled) == [0, 2]


@pytest.mark.parametrize(("num_prompts", "factor", "expected"), [(6, 1.25, 8), (10, 1.1, 11), (4, 1.0, 4), (3, 2.0, 6)])
def test_begun_groups_are_rounded_up(num_prompts: int, factor: float, expected: int) -> None:
    assert num_begun(num_prompts, factor) == expected


def slow_by_draw(salt: int) -> FakeEnvironment:
    """An environment whose answers take a drawn number of turns of the event loop, which differs from try to try."""
    tries: Counter[str] = Counter()

    async def wait(conversations: Any) -> None:
        question = conversations[0][0].content
        tries[question] += 1
        for _ in range(draws_of(salt, question, tries[question]).choice((0, 0, 0, 5, 400))):
            await asyncio.sleep(0)

    return FakeEnvironment(lambda conversation, state: EnvStep(rewards={"right": 1.0}), before=wait)


def source(
    environment: FakeEnvironment, *, oversample: float = 1.5, num_prompts: int = 22, batch: int = 4
) -> SyncSource:
    return SyncSource(
        PromptLoader([prompt(i) for i in range(num_prompts)], shuffle=True, seed=3, max_epochs=1),
        dependencies(FakeGeneration(vocab_size=VOCAB_SIZE, is_async=True), {"game": environment}),
        OPTIONS,
        num_prompts_per_step=batch,
        num_generations_per_prompt=GROUP,
        failures=RolloutConfig(oversample=oversample),
        min_group_size=GROUP,
    )


async def drain(one: SyncSource, num_steps: int = 100) -> list[CollectedGroups]:
    steps: list[CollectedGroups] = []
    while len(steps) < num_steps:
        try:
            steps.append(await one.next_groups(len(steps)))
        except StopAsyncIteration:
            break
    return steps


@pytest.mark.parametrize("salt", range(4))
def test_every_prompt_is_trained_on_once_also_over_a_resume(salt: int) -> None:
    environment = slow_by_draw(salt)

    async def main() -> tuple[list[CollectedGroups], list[CollectedGroups]]:
        first = source(environment)
        before = await drain(first, num_steps=salt + 1)
        resumed = source(environment)
        resumed.load_state_dict(first.state_dict())
        return before, await drain(resumed)

    before, after = asyncio.run(main())
    ids = [group.prompt.prompt_id for step in (*before, *after) for group in step.groups]
    assert sorted(ids) == sorted(f"p{i}" for i in range(22))
    assert all(len(step.groups) == 4 for step in (*before, *after)[:-1])
    assert sum(step.metrics.get("oversampling/deferred_groups", 0) for step in (*before, *after)) > 0
    rollouts = [t for step in (*before, *after) for group in step.groups for t in group.trajectories]
    assert len(rollouts) == 22 * GROUP
    assert all(one.failure is None and one.reward == 1.0 for one in rollouts)  # none of those that were cancelled


def test_a_slow_prompt_waits_for_one_step_and_is_counted() -> None:
    held = asyncio.Event()

    async def hold_first(conversations: Any) -> None:
        if conversations[0][0].content == "question0":
            await held.wait()

    async def main() -> tuple[CollectedGroups, CollectedGroups, dict[str, Any]]:
        one = SyncSource(
            PromptLoader([prompt(i) for i in range(8)], shuffle=False, seed=0, max_epochs=1),
            dependencies(
                FakeGeneration(vocab_size=VOCAB_SIZE, is_async=True), {"game": FakeEnvironment(before=hold_first)}
            ),
            OPTIONS,
            num_prompts_per_step=2,
            num_generations_per_prompt=GROUP,
            failures=RolloutConfig(oversample=1.5),
            min_group_size=GROUP,
        )
        first = await one.next_groups(0)
        state = one.state_dict()
        held.set()
        return first, await one.next_groups(1), state

    first, second, state = asyncio.run(main())
    assert [group.prompt.prompt_id for group in first.groups] == ["p1", "p2"]
    assert first.metrics["oversampling/begun_groups"] == 3
    assert first.metrics["oversampling/deferred_groups"] == first.metrics["oversampling/cancelled_groups"] == 1
    assert first.metrics["num_rollouts"] == 4
    assert (state["consumed_prompts"], state["put_back"]) == (2, [0])
    assert "p0" in [group.prompt.prompt_id for group in second.groups]


async def run_by_length(factor: float, num_steps: int) -> tuple[float, float, FakeGeneration]:
    """Return a step's duration and a rollout's length in tokens, if a token takes a second, and the engine."""

    async def token_by_token(request: GenerationRequest) -> None:
        await asyncio.sleep(len(sample(request, VOCAB_SIZE).token_ids))

    engine = FakeGeneration(vocab_size=VOCAB_SIZE, is_async=True, latency=token_by_token)
    one = SyncSource(
        PromptLoader([prompt(i) for i in range(4 * num_steps)], shuffle=False, seed=0, max_epochs=1),
        dependencies(engine, {"game": FakeEnvironment(lambda conversation, state: EnvStep(rewards={"right": 1.0}))}),
        OPTIONS,
        num_prompts_per_step=4,
        num_generations_per_prompt=GROUP,
        failures=RolloutConfig(oversample=factor),
        min_group_size=GROUP,
    )
    steps = await drain(one, num_steps + 1)
    assert len(steps) == num_steps
    trained = [t for step in steps for group in step.groups for t in group.trajectories]
    tokens = sum(len(m.token_ids) for t in trained for m in t.message_log if m.generation_logprobs is not None)
    return asyncio.get_running_loop().time() / num_steps, tokens / len(trained), engine


def test_a_deferred_group_is_sampled_from_other_seeds() -> None:
    _, _, engine = run_in_virtual_time(run_by_length(1.5, 20))
    seeds: dict[str, list[int]] = {}
    for request in engine.requests:
        seeds.setdefault(request.request_id, []).append(request.seed)
    again = [of_one for of_one in seeds.values() if len(of_one) > 1]
    assert again
    assert all(len(set(of_one)) == len(of_one) == 2 for of_one in again)  # deferred once, never twice
    _, _, plain = run_in_virtual_time(run_by_length(1.0, 20))
    assert {one.request_id: one.seed for one in plain.requests} == {name: of_one[0] for name, of_one in seeds.items()}


@pytest.mark.parametrize("factor", [1.25, 1.5])
def test_over_sampling_shortens_steps_and_prefers_short_rollouts_also_with_seeds(factor: float) -> None:
    duration, length, engine = run_in_virtual_time(run_by_length(factor, 300))
    plain_duration, plain_length, plain = run_in_virtual_time(run_by_length(1.0, 300))
    assert duration < 0.95 * plain_duration
    assert length < plain_length
    assert len(engine.requests) <= factor * len(plain.requests)


def test_without_oversampling_nothing_is_deferred() -> None:
    steps = asyncio.run(drain(source(slow_by_draw(0), oversample=1.0)))
    assert [len(step.groups) for step in steps] == [4, 4, 4, 4, 4, 2]
    assert not [name for step in steps for name in step.metrics if name.startswith("oversampling/")]
