"""Random schedules of a loop over an AsyncSource, killed and resumed at random times, in virtual time.

Whatever happens, no group older than the bound is trained, and in the lineage of the checkpoints each prompt of each
epoch is trained exactly once or reported dropped with its reason.
"""

import asyncio
import contextlib
import io
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.experience.filtered_source import FilteredSource
from nemo_rl.experience.replay_buffer_state import REPLAY_BUFFER, buffer_state_to_dict
from nemo_rl.trace.virtual_time import run_in_virtual_time
from nemo_rl.types import EnvStep, Failure, FailureClass, TrajectoryGroup
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.unit.experience.async_setup import async_source, engine


@dataclass(frozen=True)
class Schedule:
    """What a lineage of runs is like."""

    seed: int
    age: int
    batch: int
    num_prompts: int
    epochs: int
    stale_groups: Literal["wait", "drop"]
    is_async: bool
    in_flight: bool
    places: int  # of the engine
    mean_s: float  # of a rollout; a training step takes 1
    tail: float  # sigma of its log-normal
    failing_share: float
    kills_s: tuple[float, ...]  # how long each run lives; the one after the last goes on to the end
    save_period: int
    is_filtered: bool


SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 10**6),
    age=st.integers(0, 4),
    batch=st.integers(1, 4),
    num_prompts=st.integers(1, 25),
    epochs=st.integers(1, 2),
    stale_groups=st.sampled_from(("wait", "drop")),
    is_async=st.sampled_from((True, True, True, False)),
    in_flight=st.booleans(),
    places=st.integers(1, 12),
    mean_s=st.sampled_from((0.05, 0.3, 1.0)),
    tail=st.sampled_from((0.0, 1.0, 2.0)),
    failing_share=st.sampled_from((0.0, 0.0, 0.3, 1.0)),
    kills_s=st.lists(st.floats(0.0, 15.0), max_size=3).map(tuple),
    save_period=st.integers(1, 3),
    is_filtered=st.booleans(),
)


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what its lineage has trained by then."""

    step: int = 0
    source: Mapping[str, Any] | None = None
    trained: tuple[str, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()


class Lineage:
    """One run of a schedule, from the checkpoint that the last one left."""

    def __init__(self, schedule: Schedule, saved: Saved) -> None:
        self.schedule = schedule
        self.saved = saved
        self.draws = random.Random(f"{schedule.seed}/{saved.step}")
        self.generation = self._engine()
        self.source = self._source()

    def _engine(self) -> FakeGeneration:
        schedule = self.schedule

        def seconds(place: int, index: int) -> float:
            draws = random.Random(f"{schedule.seed}/{place}/{index}")
            return schedule.mean_s * draws.lognormvariate(0.0, schedule.tail)

        generation = engine(seconds, is_async=schedule.is_async, slots=schedule.places)
        generation.weight_version = self.saved.step
        return generation

    def _source(self):
        schedule = self.schedule

        def answer(conversation, state):
            draws = random.Random(f"{schedule.seed}/{state['number']}/{conversation[-1].content}")
            if draws.random() < schedule.failing_share:
                return Failure(FailureClass.ENVIRONMENT, "made to fail")
            return EnvStep(rewards={"r": 1.0})

        inner = async_source(
            self.generation,
            FakeEnvironment(answer),
            num_prompts=schedule.num_prompts,
            epochs=schedule.epochs,
            batch=schedule.batch + schedule.is_filtered,
            group=2,
            age=schedule.age,
            stale_groups=schedule.stale_groups,
            max_generation_failures=10**6,
            failures=RolloutConfig(max_failed_share=1.0),
        )
        if not schedule.is_filtered:
            return inner
        return FilteredSource(
            inner,
            return_groups=inner.return_groups,
            is_informative=lambda group: int(group.group_id.split(":")[2]) % 4 != 3,
            num_prompts_per_step=schedule.batch,
            max_gen_batches=10**6,
            min_group_size=1,
        )

    async def run(self) -> None:
        """The loop: collect, train, refit, now and then validate and save."""
        if self.saved.source is not None:
            self.source.load_state_dict(self.saved.source)
        step, trained = self.saved.step, list(self.saved.trained)
        while True:
            try:
                collected = await self._collected(step)
            except StopAsyncIteration:
                self._save(step, trained)
                return
            self._check_ages(collected.groups, step)
            trained += [group.group_id for group in collected.groups]
            await asyncio.sleep(self.draws.choice((0.0, 1.0)))  # training
            step += 1
            state = self.source.state_dict()  # as Position holds it
            await self._publish(step)
            if self.draws.random() < 0.2:
                async with self.source.hold():
                    await asyncio.sleep(1.0)
            if step % self.schedule.save_period == 0:
                self._save(step, trained, state)

    async def _collected(self, step: int):
        """Now and then cancelled, and asked again."""
        while self.draws.random() < 0.2:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self.source.next_groups(step), self.draws.random())
        return await self.source.next_groups(step)

    async def _publish(self, step: int) -> None:
        async with self.source.hold(until_idle=not self.schedule.in_flight):
            asked = len(self.generation.requests)
            await asyncio.sleep(0.1)
            if not self.schedule.in_flight:
                assert len(self.generation.requests) == asked
            self.generation.weight_version = step

    def _check_ages(self, groups: Sequence[TrajectoryGroup], step: int) -> None:
        assert 0 < len(groups) <= self.schedule.batch + self.schedule.is_filtered
        for group in groups:
            for trajectory in group.survivors:
                assert 0 <= step - trajectory.weight_versions[0] <= self.schedule.age

    def _save(self, step: int, trained: Sequence[str], state: Mapping[str, Any] | None = None) -> None:
        """Through the values of a file, as a checkpoint."""
        state = state or self.source.state_dict()
        dropped = tuple((one.group_id, one.reason) for one in state[REPLAY_BUFFER].dropped)
        plain = through_a_file({**state, REPLAY_BUFFER: buffer_state_to_dict(state[REPLAY_BUFFER])})
        self.saved = Saved(step, plain, tuple(trained), dropped)


def through_a_file(state: Mapping[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(dict(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


async def lineage(schedule: Schedule) -> Saved:
    saved = Saved()
    for lives_s in (*schedule.kills_s, None):
        run = Lineage(schedule, saved)
        task = asyncio.ensure_future(run.run())
        await asyncio.wait((task,), timeout=lives_s)
        if task.done():
            task.result()
        saved = run.saved  # of a killed run nothing else is left
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await run.source.close()
        assert len(asyncio.all_tasks()) == 1
        if lives_s is None:
            break
    return saved


@settings(max_examples=100, deadline=None)
@given(SCHEDULES)
def test_each_prompt_is_trained_once_within_the_age_bound_or_reported_dropped(schedule: Schedule) -> None:
    saved = run_in_virtual_time(lineage(replace(schedule, is_filtered=False)))
    dropped = [group_id for group_id, _ in saved.dropped]
    assert Counter([*saved.trained, *dropped]) == Counter(group_ids(schedule))
    if schedule.stale_groups == "wait":
        assert dropped == []
    assert all(reason.startswith("still running at the age bound") for _, reason in saved.dropped)


@settings(max_examples=30, deadline=None)
@given(SCHEDULES)
def test_dynamic_sampling_loses_no_prompt_either(schedule: Schedule) -> None:
    """Each is trained once, found uninformative, or dropped with its reason; surplus groups may grow too old."""
    saved = run_in_virtual_time(lineage(replace(schedule, is_filtered=True, failing_share=0.0)))
    trained = Counter(saved.trained)
    dropped = {group_id for group_id, _ in saved.dropped}
    assert set(trained.values()) <= {1}
    assert not trained.keys() & dropped
    assert trained.keys() | dropped | set(group_ids(schedule)[3::4]) == set(group_ids(schedule))


def group_ids(schedule: Schedule) -> list[str]:
    """Of all prompts of all epochs."""
    places = range(schedule.num_prompts * schedule.epochs)
    return [f"{place // schedule.num_prompts}:p{place % schedule.num_prompts}:{place}" for place in places]
