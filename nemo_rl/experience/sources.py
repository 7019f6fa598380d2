"""Where the training loop gets its groups: rollouts of one step, or of as many batches as dynamic sampling needs."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_rl.config.run import Rollout
from nemo_rl.data.loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.collection import run_rollouts
from nemo_rl.experience.metrics import age_metrics, rollout_metrics
from nemo_rl.experience.rollouts import (
    RolloutContext,
    RolloutJob,
    run_async_multi_turn_rollout,
    run_multi_turn_rollout,
)
from nemo_rl.experience.supervision import FailureBudget
from nemo_rl.experience.writer import RolloutWriter
from nemo_rl.interfaces import CollectedGroups, GroupSource
from nemo_rl.types import Trajectory, TrajectoryGroup


class SyncSource:
    """Rollouts of the next `num_prompts_per_step` prompts, made when they are asked for.

    With a `writer`, all of them are written down, whatever becomes of their groups.
    """

    def __init__(
        self,
        loader: PromptLoader,
        context: RolloutContext,
        *,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        failures: Rollout,
        writer: RolloutWriter | None = None,
    ) -> None:
        self._loader = loader
        self._context = context
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._failures = failures
        self._writer = writer

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """One group a prompt, in their order; fewer at the end of the data set.

        Groups hold their failed rollouts too. Raises RolloutError with the first cause when too many fail, and when
        nothing progresses.
        """
        num_drawn = self._loader.consumed
        loaded = self._loader.take(self._num_prompts)
        if not loaded:
            raise StopAsyncIteration
        trajectories = await self._run(self._jobs(loaded, num_drawn))
        if self._writer is not None:
            self._writer.write(weight_version + 1, trajectories)  # the step that trains on them
        metrics = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version)
        return CollectedGroups(_grouped(trajectories, self._num_generations), metrics)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() | {"consumed_prompts": self._loader.consumed, "epoch": self._loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Nothing runs between two calls."""
        return nullcontext()

    async def close(self) -> None:
        """Nothing runs between two calls."""

    def _jobs(self, loaded: Sequence[LoadedPrompt], num_drawn: int) -> list[RolloutJob]:
        """A group's id holds the prompt's place among all drawn, since data sets may share prompt ids."""
        return [
            RolloutJob(one.prompt, f"{one.epoch}:{one.prompt.prompt_id}:{num_drawn + offset}", index, one.epoch)
            for offset, one in enumerate(loaded)
            for index in range(self._num_generations)
        ]

    async def _run(self, jobs: Sequence[RolloutJob]) -> tuple[Trajectory, ...]:
        budget = FailureBudget(num_rollouts=len(jobs), max_failed_share=self._failures.max_failed_share)
        report = self._context.progress

        def count(trajectory: Trajectory) -> None:
            budget.record(trajectory)
            if report is not None:
                report(trajectory)

        run = run_async_multi_turn_rollout if self._context.generation.is_async else run_multi_turn_rollout
        return await run_rollouts(jobs, replace(self._context, progress=count), run)


@dataclass(slots=True)
class _Filling:
    """What dynamic sampling has gathered for one step."""

    kept: list[TrajectoryGroup] = field(default_factory=list)
    seen: list[TrajectoryGroup] = field(default_factory=list)
    num_batches: int = 0


class FilteredSource:
    """Dynamic sampling (DAPO, arXiv 2503.14476): only groups that teach something, whatever it takes to find them.

    Batches of `inner` are drawn until `num_prompts_per_step` groups have `min_group_size` survivors and are
    informative: their raw rewards differ. After `max_gen_batches` batches it gives up. What is left over in the last
    batch is dropped and counted. `inner` may draw more prompts at once than a step has: `prompts_per_batch`.
    """

    def __init__(
        self,
        inner: GroupSource,
        *,
        is_informative: Callable[[TrajectoryGroup], bool],
        num_prompts_per_step: int,
        max_gen_batches: int,
        min_group_size: int,
    ) -> None:
        self._inner = inner
        self._is_informative = is_informative
        self._num_prompts = num_prompts_per_step
        self._max_gen_batches = max_gen_batches
        self._min_group_size = min_group_size

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """A full step, or what the end of the data set leaves. Raises RolloutError after `max_gen_batches` batches."""
        filling = _Filling()
        while len(filling.kept) < self._num_prompts:
            if filling.num_batches == self._max_gen_batches:
                raise RolloutError(self._too_few(filling))
            try:
                collected = await self._inner.next_groups(weight_version)
            except StopAsyncIteration:
                if not filling.kept:
                    raise
                break
            filling.num_batches += 1
            filling.seen += collected.groups
            filling.kept += (group for group in collected.groups if self._is_kept(group))
        kept = filling.kept[: self._num_prompts]
        return CollectedGroups(tuple(kept), self._metrics(filling) | age_metrics(_trajectories(kept), weight_version))

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        return self._inner.hold(until_idle=until_idle)

    async def close(self) -> None:
        await self._inner.close()

    def _is_kept(self, group: TrajectoryGroup) -> bool:
        return len(group.survivors) >= self._min_group_size and self._is_informative(group)

    def _metrics(self, filling: _Filling) -> dict[str, float]:
        """Those of all rollouts, and how the filter fared: `reward` is before it, `filtered_reward` after it."""
        kept, surplus = filling.kept[: self._num_prompts], filling.kept[self._num_prompts :]
        return rollout_metrics(_trajectories(filling.seen)) | {
            "dynamic_sampling_num_gen_batches": float(filling.num_batches),
            "dynamic_sampling_num_discarded_valid_samples": float(len(_trajectories(surplus))),
            "reward": _mean_reward(filling.seen),
            "filtered_reward": _mean_reward(kept),
        }

    def _too_few(self, filling: _Filling) -> str:
        return (
            f"{len(filling.kept)} of a step's {self._num_prompts} groups have rewards that differ, after "
            f"{filling.num_batches} batches (grpo.dynamic_sampling_max_gen_batches) of {len(filling.seen)} prompts: "
            "the task is too easy or too hard for the policy, or grpo.num_generations_per_prompt is too small"
        )


def prompts_per_batch(num_prompts_per_step: int, batch_multiplier: float) -> int:
    """How many prompts dynamic sampling draws at once: `grpo.batch_multiplier` times a step's, rounded up."""
    return math.ceil(num_prompts_per_step * batch_multiplier)


def _grouped(trajectories: Sequence[Trajectory], num_generations: int) -> tuple[TrajectoryGroup, ...]:
    groups = []
    for start in range(0, len(trajectories), num_generations):
        members = tuple(trajectories[start : start + num_generations])
        groups.append(TrajectoryGroup(members[0].group_id, members[0].prompt, members))
    return tuple(groups)


def _trajectories(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _mean_reward(groups: Sequence[TrajectoryGroup]) -> float:
    """Over the survivors; a step has some."""
    rewards = [trajectory.reward for group in groups for trajectory in group.survivors]
    return sum(rewards) / len(rewards)
