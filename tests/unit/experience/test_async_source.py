"""Background collection: what is issued when, what is handed out, dropped, held, saved, and what fails."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.data.prompt_screen import LengthLimit, PromptScreen
from nemo_rl.errors import DataError, RolloutError
from nemo_rl.experience.async_source import AsyncSource
from nemo_rl.experience.filtered_source import FilteredSource
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import CollectedGroups, EnvStep, Failure, FailureClass, Prompt, Timings, TrajectoryGroup
from tests.fakes.encoder import FakeEncoder
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.async_setup import LIMITS, STALL_S, async_source, engine, names, places_asked, step
from tests.unit.experience.rollout_setup import OPTIONS, dependencies, prompt


def untimed(groups: tuple[TrajectoryGroup, ...]) -> list:
    return [replace(t, timings=Timings()) for group in groups for t in group.trajectories]


def num_running() -> int:
    """Tasks beside that of the test."""
    return len(asyncio.all_tasks()) - 1


# ---- what is issued, and when


def test_prompts_are_issued_as_far_as_the_age_bound_can_hold():
    """While the trainer waits (A + 1) N groups are under way, while it trains A N."""

    async def main() -> None:
        generation = engine()
        source = async_source(generation, batch=2, age=2, num_prompts=20)
        assert num_running() == 0
        waiting = asyncio.ensure_future(step(source, generation, 0))
        await asyncio.sleep(0.5)
        assert places_asked(generation) == [0, 1, 2, 3, 4, 5]
        assert names(await waiting) == ["p0", "p1"]
        await asyncio.sleep(10)
        assert places_asked(generation) == [0, 1, 2, 3, 4, 5]  # four are left: A N
        await step(source, generation, 1)
        await asyncio.sleep(0.5)
        assert places_asked(generation) == list(range(8))
        await source.close()
        assert num_running() == 0

    run_in_virtual_time(main())


def test_nothing_is_issued_that_no_step_will_train_on():
    async def main() -> None:
        generation = engine()
        source = async_source(generation, batch=2, age=3, num_steps=3)
        for version in range(3):
            await step(source, generation, version)
        assert places_asked(generation) == [0, 1, 2, 3, 4, 5]
        async with source.hold(until_idle=True):
            assert num_running() == 0
        assert source.state_dict()["replay_buffer"].prompt_indices == ()

    run_in_virtual_time(main())


def test_at_age_0_nothing_runs_between_two_steps_and_the_groups_are_those_of_a_synchronous_source():
    async def main() -> None:
        generation = engine()
        background = async_source(generation, age=0, num_prompts=5)
        sync = SyncSource(
            PromptLoader([prompt(i) for i in range(5)], shuffle=False, seed=0, max_epochs=1),
            dependencies(generation, {"game": FakeEnvironment()}, limits=LIMITS),
            OPTIONS,
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            failures=RolloutConfig(),
        )
        for version in range(3):
            collected = await step(background, generation, version)
            expected = await step(sync, generation, version)
            assert untimed(collected.groups) == untimed(expected.groups)
            assert num_running() == 0
            state = background.state_dict()
            assert state.pop("replay_buffer").prompt_indices == ()
            assert state == sync.state_dict()
        with pytest.raises(StopAsyncIteration):
            await step(background, generation, 3)

    run_in_virtual_time(main())


def test_an_engine_that_is_not_async_gets_whole_batches_one_after_another():
    async def main() -> None:
        generation = engine(is_async=False)
        source = async_source(generation, batch=2, group=2, age=1)
        assert names(await step(source, generation, 0)) == ["p0", "p1"]
        assert len(generation.requests) == 8  # (A + 1) N groups of 2 in the first call
        assert names(await step(source, generation, 1)) == ["p2", "p3"]
        assert len(generation.requests) == 12
        await source.close()

    run_in_virtual_time(main())


# ---- what is handed out


def slow(prompt_index: int, seconds: float):
    return lambda p, index: seconds if p == prompt_index else 1.0


def test_a_group_that_runs_on_is_passed_over_until_its_bound_and_then_awaited():
    async def main() -> None:
        generation = engine(slow(0, 7.5))
        source = async_source(generation, batch=2, age=2)
        clock = asyncio.get_running_loop().time
        assert names(await step(source, generation, 0)) == ["p1", "p2"]
        assert names(await step(source, generation, 1)) == ["p3", "p4"]
        assert clock() == 1.0
        collected = await step(source, generation, 2)  # the last version that may train on p0
        assert names(collected) == ["p0", "p5"]
        assert clock() == 7.5
        assert collected.metrics["max_trajectory_age"] == 2
        await source.close()

    run_in_virtual_time(main())


def test_more_slow_groups_than_later_steps_can_take_are_awaited_at_once():
    """At age 1 the four groups issued at version 0 have two steps of two: none may be passed over for a newer one."""

    async def main() -> None:
        generation = engine(slow(0, 5.0))
        source = async_source(generation, batch=2, age=1)
        clock = asyncio.get_running_loop().time
        assert names(await step(source, generation, 0)) == ["p1", "p2"]
        assert names(await step(source, generation, 1)) == ["p0", "p3"]
        assert clock() == 5.0
        await source.close()

    run_in_virtual_time(main())


def test_a_late_group_is_dropped_with_its_reason_where_asked():
    async def main() -> None:
        generation = engine(slow(0, 1e6))
        source = async_source(generation, batch=2, age=1, stale_groups="drop", num_prompts=7)
        assert names(await step(source, generation, 0)) == ["p1", "p2"]
        collected = await step(source, generation, 1)
        assert names(collected) == ["p3", "p4"]
        assert collected.metrics["replay_buffer/dropped_groups"] == 1
        (dropped,) = source.state_dict()["replay_buffer"].dropped
        assert (dropped.group_id, dropped.reason) == ("0:p0:0", "still running at the age bound, version 1")
        assert names(await step(source, generation, 2)) == ["p5", "p6"]
        with pytest.raises(StopAsyncIteration):
            await step(source, generation, 3)
        await source.close()
        assert num_running() == 0

    run_in_virtual_time(main())


def test_a_late_group_continues_with_the_rollouts_that_have_ended_where_asked():
    async def main() -> None:
        generation = engine(lambda place, index: 1e6 if (place, index) == (0, 2) else 1.0)
        kwargs: dict[str, Any] = {"batch": 2, "group": 3, "age": 1, "num_prompts": 6}
        source = async_source(generation, stale_groups="trim", min_group_size=2, **kwargs)
        assert names(await step(source, generation, 0)) == ["p1", "p2"]
        collected = await step(source, generation, 1)
        assert names(collected) == ["p0", "p3"]
        *ended, given_up = collected.groups[0].trajectories
        assert [one.failure for one in ended] == [None, None]
        assert given_up.failure is not None
        assert given_up.failure.failure_class is FailureClass.CANCELLED
        assert not given_up.rewards
        assert collected.metrics["replay_buffer/given_up_rollouts"] == collected.metrics["failures/cancelled"] == 1
        assert collected.metrics["replay_buffer/dropped_groups"] == 0
        assert names(await step(source, generation, 2)) == ["p4", "p5"]
        await source.close()
        assert num_running() == 0

    run_in_virtual_time(main())


def test_a_late_group_with_too_few_ended_rollouts_is_dropped():
    async def main() -> None:
        generation = engine(lambda place, index: 1e6 if place == 0 and index > 0 else 1.0)
        kwargs: dict[str, Any] = {"batch": 2, "group": 3, "age": 1, "num_prompts": 7}
        source = async_source(generation, stale_groups="trim", min_group_size=2, **kwargs)
        assert names(await step(source, generation, 0)) == ["p1", "p2"]
        collected = await step(source, generation, 1)
        assert names(collected) == ["p3", "p4"]
        assert collected.metrics["replay_buffer/dropped_groups"] == 1
        assert collected.metrics["replay_buffer/given_up_rollouts"] == 0
        await source.close()

    run_in_virtual_time(main())


def test_a_group_of_older_weights_than_the_bound_allows_is_never_handed_out():
    """An engine that has missed updates tells so."""

    async def spent() -> AsyncSource:
        source = async_source(engine(), batch=2, age=1, num_prompts=6)
        with pytest.raises(StopAsyncIteration):
            await source.next_groups(5)
        return source

    dropped = run_in_virtual_time(spent()).state_dict()["replay_buffer"].dropped
    assert sorted(one.group_id for one in dropped) == [f"0:p{i}:{i}" for i in range(6)]
    assert dropped[0].reason == "5 steps old, above grpo.async_grpo.max_trajectory_age_steps = 1"


def test_metrics_tell_ages_the_buffer_and_what_the_trainer_waited_for():
    async def main() -> None:
        generation = engine(slow(1, 3.0))
        source = async_source(generation, batch=2, age=2, num_prompts=20)
        source._meter._clock = asyncio.get_running_loop().time
        source._meter.take()
        first = (await step(source, generation, 0)).metrics
        assert first["efficiency/exposed_wait_s/too_few_groups"] == 1.0
        assert first["efficiency/exposed_wait_s/late_group"] == 0.0
        assert first["efficiency/generation_busy_pct"] == 100
        assert (first["replay_buffer/size"], first["replay_buffer/in_flight"]) == (3, 1)
        assert (first["avg_trajectory_age"], first["max_trajectory_age"]) == (0, 0)
        await step(source, generation, 1)
        late = (await step(source, generation, 2)).metrics
        assert late["efficiency/exposed_wait_s/too_few_groups"] == 1.0
        assert late["efficiency/exposed_wait_s/late_group"] == 1.0
        assert late["max_trajectory_age"] == 2
        await source.close()

    run_in_virtual_time(main())


def test_rollouts_are_written_with_the_step_that_trains_on_them(tmp_path):
    async def main() -> None:
        with RolloutWriter(tmp_path / "train.jsonl") as writer:
            generation = engine()
            source = async_source(generation, writer=writer)
            for version in range(2):
                await step(source, generation, version)
            await source.close()

    run_in_virtual_time(main())
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [(row["step"], row["prompt_id"]) for row in rows[::2]] == [(1, "p0"), (1, "p1"), (2, "p2"), (2, "p3")]


# ---- holds


def test_no_group_starts_inside_a_hold_and_those_that_run_may_be_awaited():
    async def main() -> None:
        generation = engine(lambda prompt_index, index: 1.0 + prompt_index)
        source = async_source(generation, batch=2, age=1)
        async with source.hold(until_idle=True):
            assert num_running() == 0
        assert names(await step(source, generation, 0)) == ["p0", "p1"]
        clock = asyncio.get_running_loop().time
        async with source.hold():
            assert clock() == 2.0
            assert num_running() > 0
            asked = places_asked(generation)
            await asyncio.sleep(100)
            assert places_asked(generation) == asked == [0, 1, 2, 3]
        await step(source, generation, 1)
        async with source.hold(until_idle=True):
            assert num_running() == 0
            assert clock() == 108.0  # p4 and p5 were asked for at 102, and p5 takes 6 s
        await source.close()

    run_in_virtual_time(main())


def test_a_hold_over_rollouts_that_never_end_is_an_error():
    async def main() -> None:
        generation = engine(slow(2, 1e9))
        source = async_source(generation, batch=2, age=1)
        await step(source, generation, 0)
        try:
            with pytest.raises(RolloutError, match=r"no rollout has progressed for 1000 s .* generation"):
                async with source.hold(until_idle=True):
                    raise AssertionError("entered")
            assert asyncio.get_running_loop().time() <= STALL_S + 2
        finally:
            await source.close()
        assert num_running() == 0

    run_in_virtual_time(main())


def test_groups_that_queue_behind_others_in_the_engine_do_not_stall():
    """Each takes 0.6 of the stall timeout, one after the other."""

    async def main() -> None:
        generation = engine(lambda *_: 0.6 * STALL_S, slots=1)
        source = async_source(generation, batch=2, group=1, age=2, num_prompts=6)
        for version in range(3):
            await step(source, generation, version)
        await source.close()

    run_in_virtual_time(main())


# ---- failures


def failing_prompts(*numbers: int) -> FakeEnvironment:
    def answer(conversation, state):
        number = state["number"]
        return Failure(FailureClass.ENVIRONMENT, f"broken {number}") if number in numbers else EnvStep()

    return FakeEnvironment(answer)


def test_too_many_failed_rollouts_of_a_step_stop_it_with_the_first_cause_and_are_written(tmp_path: Path):
    async def main(writer: RolloutWriter) -> None:
        generation, failures = engine(), RolloutConfig(max_failed_share=0.5)
        source = async_source(generation, failing_prompts(0, 1), batch=2, failures=failures, writer=writer)
        try:
            with pytest.raises(RolloutError, match=r"3 of 4 rollouts failed.* first cause: environment: broken 0"):
                await step(source, generation, 0)
            assert set(source.state_dict()["replay_buffer"].prompt_indices) >= {0, 1}
        finally:
            await source.close()

    with RolloutWriter(tmp_path / "train.jsonl") as writer:
        run_in_virtual_time(main(writer))
    rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert [(row["step"], row["failure"]["cause"]) for row in rows] == [(1, f"broken {i}") for i in (0, 0, 1, 1)]


def test_groups_that_fail_whole_one_after_another_stop_the_run_and_are_written(tmp_path: Path):
    async def main(max_generation_failures: int, writer: RolloutWriter | None = None) -> None:
        generation = engine(lambda prompt_index, index: 1.0 + 0.01 * prompt_index)
        source = async_source(
            generation,
            environment=failing_prompts(2, 3, 5),
            max_generation_failures=max_generation_failures,
            failures=RolloutConfig(max_failed_share=1.0),
            writer=writer,
        )
        try:
            for version in range(6):
                await step(source, generation, version)
        finally:
            await source.close()

    run_in_virtual_time(main(2))
    said = (
        r"all rollouts of 2 groups in a row failed, more than grpo\.async_grpo\.max_generation_failures = 1 allows; "
        "first cause: environment: broken 2"
    )
    with RolloutWriter(tmp_path / "train.jsonl") as writer, pytest.raises(RolloutError, match=said):
        run_in_virtual_time(main(1, writer))
    rows = [json.loads(line) for line in writer.path.read_text().splitlines()]
    assert {row["failure"]["cause"] for row in rows if row["failure"]} == {"broken 2", "broken 3"}


def test_what_a_background_task_raises_is_raised_by_the_next_step():
    async def main() -> None:
        generation = engine()
        source = async_source(generation, batch=2, age=1)
        source._options = replace(source._options, progress=lambda t: 1 / 0 if t.prompt.prompt_id == "p2" else None)
        try:
            await step(source, generation, 0)
            await asyncio.sleep(10)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    await step(source, generation, 1)
            assert 2 in source.state_dict()["replay_buffer"].in_flight
        finally:
            await source.close()

    with pytest.raises(ZeroDivisionError):  # all end at the same time: the first step already sees it
        run_in_virtual_time(main())


class UnreadableFrom(Sequence):
    """Prompts of a file that was changed after the first few had been read."""

    def __init__(self, first_unreadable: int) -> None:
        self.first_unreadable = 10**6  # all can be read at the start
        self._first_unreadable = first_unreadable

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index):
        if index >= self.first_unreadable:
            raise DataError(f"rows.jsonl: was changed while it is in use: row {index}")
        return prompt(range(12)[index])

    def change(self) -> None:
        self.first_unreadable = self._first_unreadable


def test_a_prompt_that_cannot_be_read_any_more_ends_the_wait_with_its_cause():
    """It is read in the background, when a batch of an engine that is not async has ended."""

    async def main() -> None:
        generation = engine(is_async=False)
        prompts = UnreadableFrom(8)
        source = AsyncSource(
            PromptLoader(prompts, shuffle=False, seed=0, max_epochs=1),
            dependencies(generation, {"game": FakeEnvironment()}, limits=LIMITS),
            OPTIONS,
            num_prompts_per_step=2,
            num_generations_per_prompt=2,
            max_age_steps=2,
            stale_groups="wait",
            max_generation_failures=10,
            failures=RolloutConfig(),
        )
        prompts.change()
        for version in range(3):
            await step(source, generation, version)
        assert source._tasks  # 6 and 7, behind which there is room for 8
        with pytest.raises(DataError, match="row 8"):
            await step(source, generation, 3)
        await source.close()
        assert num_running() == 0

    run_in_virtual_time(main())


def test_rollouts_that_are_cancelled_from_within_are_an_error():
    async def main() -> None:
        generation = engine(slow(1, 50.0))
        source = async_source(generation)
        waiting = asyncio.ensure_future(step(source, generation, 0))
        await asyncio.sleep(0.5)
        next(task for task, prompt_indices in source._tasks.items() if prompt_indices == (1,)).cancel()
        with pytest.raises(RolloutError, match="cancelled from within"):
            await waiting
        await source.close()

    run_in_virtual_time(main())


# ---- interruption and state


def test_a_step_that_is_cancelled_loses_nothing():
    async def main() -> None:
        generation = engine()
        source = async_source(generation)
        for _ in range(3):
            waiting = asyncio.ensure_future(step(source, generation, 0))
            await asyncio.sleep(0.3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        assert source.state_dict()["replay_buffer"].in_flight == (0, 1, 2, 3)
        assert source.state_dict()["consumed_prompts"] == 0
        trained = [name for version in range(6) for name in names(await step(source, generation, version))]
        assert sorted(trained) == sorted(f"p{i}" for i in range(12))
        assert len(generation.requests) == 24
        await source.close()

    run_in_virtual_time(main())


def test_a_resumed_source_hands_out_what_was_complete_and_issues_the_rest_again():
    async def main() -> None:
        generation = engine(slow(3, 50.0))
        first = async_source(generation, batch=2, age=2)
        await step(first, generation, 0)
        state = first.state_dict()
        assert (state["consumed_prompts"], state["epoch"]) == (2, 0)
        await step(first, generation, 1)  # what comes later is not in the state
        await first.close()

        generation = engine()
        resumed = async_source(generation, batch=2, age=2)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["consumed_prompts"] == 2
        assert names(await step(resumed, generation, 1)) == ["p2", "p4"]
        assert 2 not in places_asked(generation)
        assert places_asked(generation)[0] == 3
        assert [g.group_id for g in (await step(resumed, generation, 2)).groups] == ["0:p3:3", "0:p5:5"]
        await resumed.close()

    run_in_virtual_time(main())


def test_groups_too_old_for_a_smaller_bound_are_collected_again_on_resuming():
    async def main() -> None:
        generation = engine()
        first = async_source(generation, batch=2, age=3)
        await step(first, generation, 0)
        state = first.state_dict()
        assert len(state["replay_buffer"].complete) == 6
        await first.close()
        generation = engine()
        resumed = async_source(generation, batch=2, age=1)
        resumed.load_state_dict(state)
        collected = await step(resumed, generation, 1)
        assert names(collected) == ["p2", "p3"]
        assert names(await step(resumed, generation, 2)) == ["p4", "p5"]
        assert places_asked(generation)[:4] == [4, 5, 6, 7]
        assert resumed.state_dict()["replay_buffer"].dropped == ()
        await resumed.close()

    run_in_virtual_time(main())


def test_groups_of_another_size_are_collected_again_on_resuming():
    async def main() -> None:
        generation = engine()
        source = async_source(generation, group=2, age=2)
        await step(source, generation, 0)
        await asyncio.sleep(10)
        state = source.state_dict()
        await source.close()
        assert len(state["replay_buffer"].complete) == 4

        resumed = async_source(generation, group=3, age=2)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["consumed_prompts"] == 2
        collected = await step(resumed, generation, 1)
        assert names(collected) == ["p2", "p3"]
        assert [len(group.trajectories) for group in collected.groups] == [3, 3]
        await resumed.close()

    run_in_virtual_time(main())


def test_a_synchronous_run_that_goes_on_from_an_asynchronous_one_collects_its_buffer_afresh():
    async def main() -> None:
        generation = engine()
        first = async_source(generation, batch=2, age=1, num_prompts=6)
        await step(first, generation, 0)
        state = first.state_dict()
        await first.close()
        sync = SyncSource(
            PromptLoader([prompt(i) for i in range(6)], shuffle=False, seed=0, max_epochs=1),
            dependencies(generation, {"game": FakeEnvironment()}),
            OPTIONS,
            num_prompts_per_step=3,
            num_generations_per_prompt=2,
            failures=RolloutConfig(),
        )
        sync.load_state_dict(state)
        assert names(await step(sync, generation, 1)) == ["p2", "p3", "p4"]
        assert names(await step(sync, generation, 2)) == ["p5"]

    run_in_virtual_time(main())


# ---- screened prompts


def screen(overlong: Literal["mask", "drop"], *too_long: str) -> PromptScreen:
    """Take these prompts for over-long."""
    return PromptScreen(NamedLimit(FakeEncoder(), 1, frozenset(too_long)), overlong)


@dataclass(frozen=True, slots=True)
class NamedLimit(LengthLimit):
    too_long: frozenset[str]

    def fits(self, prompt: Prompt) -> bool:
        return prompt.prompt_id not in self.too_long


async def collect_all(source: AsyncSource, generation: FakeGeneration, first_version: int = 0) -> list[CollectedGroups]:
    found: list[CollectedGroups] = []
    while True:
        try:
            found.append(await step(source, generation, first_version + len(found)))
        except StopAsyncIteration:
            await source.close()
            return found


@pytest.mark.parametrize(
    ("overlong", "age", "expected"),
    [
        ("mask", 0, [["p0"], ["p3"], ["p4", "p5"]]),
        ("mask", 1, [["p0", "p3"], ["p4", "p5"]]),  # p1 and p2 are complete first: a step of theirs alone is skipped
        ("drop", 0, [["p0", "p3"], ["p4", "p5"]]),
        ("drop", 1, [["p0", "p3"], ["p4", "p5"]]),
    ],
)
def test_over_long_prompts_keep_their_place_in_a_step_or_leave_it(
    overlong: Literal["mask", "drop"], age: int, expected: list[list[str]]
) -> None:
    async def main() -> None:
        generation = engine()
        source = async_source(generation, num_prompts=8, age=age, screen=screen(overlong, "p1", "p2", "p6", "p7"))
        collected = await collect_all(source, generation)
        assert [names(one) for one in collected] == expected
        assert all(len(group.trajectories) == 2 for one in collected for group in one.groups)
        assert source.state_dict()["consumed_prompts"] == 8
        assert places_asked(generation) == [0, 3, 4, 5]
        assert num_running() == 0

    run_in_virtual_time(main())


@pytest.mark.parametrize("overlong", ["mask", "drop"])
def test_a_data_set_that_ends_with_over_long_prompts_ends(overlong: Literal["mask", "drop"]) -> None:
    async def main() -> None:
        generation = engine()
        source = async_source(generation, num_prompts=5, age=2, screen=screen(overlong, "p2", "p3", "p4"))
        assert names(await step(source, generation, 0)) == ["p0", "p1"]
        with pytest.raises(StopAsyncIteration):
            await step(source, generation, 1)
        await source.close()

    run_in_virtual_time(main())


@pytest.mark.parametrize("overlong", ["mask", "drop"])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_resumed_run_continues_exactly_beside_over_long_prompts(
    overlong: Literal["mask", "drop"], num_steps: int
) -> None:
    def make() -> AsyncSource:
        return async_source(num_prompts=9, epochs=2, screen=screen(overlong, "p1", "p3", "p8"))

    async def main() -> None:
        first, generation = make(), engine()
        for version in range(num_steps):
            await step(first, generation, version)
        await asyncio.sleep(10)
        state = first.state_dict()
        consumed = state["consumed_prompts"]
        resumed = make()
        resumed.load_state_dict(state)
        assert resumed.state_dict()["consumed_prompts"] == consumed
        continued = [names(one) for one in await collect_all(resumed, engine(), num_steps)]
        assert continued == [names(one) for one in await collect_all(first, generation, num_steps)]

    run_in_virtual_time(main())


# ---- dynamic sampling


def test_what_dynamic_sampling_does_not_need_goes_back_into_the_buffer():
    def kept(group: TrajectoryGroup) -> bool:
        return group.prompt.prompt_id != "p0"

    async def main() -> None:
        generation = engine()
        inner = async_source(generation, batch=3, age=1, num_prompts=9)
        source = FilteredSource(
            inner,
            return_groups=inner.return_groups,
            is_informative=kept,
            num_prompts_per_step=1,
            max_gen_batches=2,
            min_group_size=1,
        )
        first = await step(source, generation, 0)
        assert names(first) == ["p1"]
        assert first.metrics["dynamic_sampling_num_discarded_valid_samples"] == 0
        assert first.metrics["replay_buffer/dropped_groups"] == 0
        assert [one.prompt_index for one in inner.state_dict()["replay_buffer"].complete] == [2, 3, 4, 5]
        assert names(await step(source, generation, 1)) == ["p2"]
        # p3 to p5 were sampled at version 0 and cannot be trained on at version 2
        assert [one.prompt_index for one in inner.state_dict()["replay_buffer"].complete] == [5]
        await inner.close()

    run_in_virtual_time(main())
