"""The source that collects the rollouts of a step before it trains."""

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.failure_limits import FailureBudget
from nemo_rl.experience.oversampling import FirstComplete, collect_first, num_begun
from nemo_rl.experience.replay_buffer_state import extract_buffer_state
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import (
    flatten_groups,
    flatten_with_failed_baselines,
    group_trajectories,
    make_rollout_jobs,
    run_training_rollouts,
)
from nemo_rl.experience.rollout_metrics import age_metrics, rollout_metrics
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.types import CollectedGroups, Trajectory, TrajectoryGroup


class ReturnGroups(Protocol):
    """A source that can take groups back for a later step (AsyncSource.return_groups)."""

    def __call__(self, groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
        """Take the groups back; return those that are too old to be trained on at `next_version`."""
        ...


def drop_all_groups(groups: Sequence[TrajectoryGroup], *, next_version: int) -> Sequence[TrajectoryGroup]:
    """Return all groups, as a synchronous run must: at the next version all would be too old."""
    return groups


class SyncSource:
    """Rollouts of the next `num_prompts_per_step` prompts, made when they are requested.

    With `rollout.oversample` above 1 more prompts are begun, and a step is the first complete groups of
    `min_group_size` survivors; the prompts of the others are put back. With a `writer`, all rollouts of complete groups
    are written down, whatever becomes of them. With `greedy_baseline` each group has a greedy rollout in addition,
    which is neither in metrics nor written down unless it fails.
    """

    def __init__(
        self,
        loader: PromptLoader,
        dependencies: RolloutDependencies,
        options: RolloutOptions,
        *,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        failures: RolloutConfig,
        min_group_size: int = 1,
        greedy_baseline: bool = False,
        writer: RolloutWriter | None = None,
    ) -> None:
        self._loader = loader
        self._dependencies = dependencies
        self._options = options
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._failures = failures
        self._min_group_size = min_group_size
        self._greedy_baseline = greedy_baseline
        self._num_begun = num_begun(num_prompts_per_step, failures.oversample)
        self._writer = writer

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return one group per prompt, in their order; fewer at the end of the dataset, and for masked prompts.

        Groups hold their failed rollouts too. Raises RolloutError with the first cause when too many fail, and when
        nothing progresses.
        """
        num_deferred = self._loader.num_put_back if self._num_begun > self._num_prompts else 0
        loaded = self._loader.take_step(self._num_begun)
        if not loaded:
            raise StopAsyncIteration
        if len(loaded) > self._num_prompts:
            return await self._take_first_complete(loaded, num_deferred, weight_version)
        jobs = [job for at, one in enumerate(loaded) for job in self._jobs(one, is_deferred=at < num_deferred)]
        async with self._written_if_given_up(len(jobs), weight_version) as options:
            groups = self._group(await run_training_rollouts(jobs, self._dependencies, options))
        trajectories = flatten_with_failed_baselines(groups)
        if self._writer is not None:
            await self._writer.write(weight_version + 1, trajectories)  # the step that trains on them
        return CollectedGroups(groups, self._metrics(trajectories, weight_version))

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict() | {"consumed_prompts": self._loader.consumed, "epoch": self._loader.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state; prompts in an asynchronous run's buffer are collected again first."""
        self._loader.load_state_dict(state)
        self._loader.put_back(extract_buffer_state(state, self._loader).prompt_indices)

    def hold(self, *, until_idle: bool = False) -> AbstractAsyncContextManager[None]:
        """Return a context that does nothing: nothing runs between two calls."""
        return nullcontext()

    async def close(self) -> None:
        """Do nothing: nothing runs between two calls."""

    async def _take_first_complete(
        self, loaded: Sequence[LoadedPrompt], num_deferred: int, weight_version: int
    ) -> CollectedGroups:
        deferred = {one.prompt_index for one in loaded[:num_deferred]}
        num_rollouts = len(loaded) * (self._num_generations + self._greedy_baseline)

        async with self._written_if_given_up(num_rollouts, weight_version) as options:

            async def collect(one: LoadedPrompt) -> TrajectoryGroup:
                jobs = self._jobs(one, is_deferred=one.prompt_index in deferred)
                return self._group(await run_training_rollouts(jobs, self._dependencies, options))[0]

            first = await collect_first(
                loaded,
                collect,
                count=self._num_prompts,
                num_required=min(num_deferred, self._num_prompts),
                min_group_size=self._min_group_size,
            )
        self._loader.put_back(one.prompt_index for one in first.deferred)
        trajectories = flatten_with_failed_baselines((*first.taken, *first.failed))
        if self._writer is not None:
            await self._writer.write(weight_version + 1, trajectories)  # the step that trains on those taken
        metrics = self._metrics(trajectories, weight_version)
        return CollectedGroups(first.taken, metrics | self._oversampling_metrics(len(loaded), first))

    def _jobs(self, one: LoadedPrompt, *, is_deferred: bool) -> list[RolloutJob]:
        """Return the jobs of a group; a deferred one has other seeds, as the same ones would be as slow again."""
        return make_rollout_jobs(
            [one], self._num_generations, attempt=int(is_deferred), greedy_baseline=self._greedy_baseline
        )

    def _group(self, trajectories: Sequence[Trajectory]) -> tuple[TrajectoryGroup, ...]:
        return group_trajectories(trajectories, self._num_generations, greedy_baseline=self._greedy_baseline)

    def _metrics(self, trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
        rollouts = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version)
        return rollouts | self._loader.take_metrics()

    def _oversampling_metrics(self, num_groups: int, first: FirstComplete) -> dict[str, float]:
        num_cancelled = len(first.deferred) - len(first.discarded)
        return {
            "oversampling/begun_groups": float(num_groups),
            "oversampling/deferred_groups": float(len(first.deferred)),
            "oversampling/discarded_rollouts": float(len(flatten_groups(first.discarded))),
            "oversampling/cancelled_groups": float(num_cancelled),
        }

    @asynccontextmanager
    async def _written_if_given_up(self, num_rollouts: int, weight_version: int) -> AsyncIterator[RolloutOptions]:
        """Yield options that end a step of `num_rollouts` when too many fail; what has ended is then written."""
        budget = FailureBudget(num_rollouts=num_rollouts, max_failed_share=self._failures.max_failed_share)
        report = self._options.progress
        ended: list[Trajectory] = []

        def count(trajectory: Trajectory) -> None:
            ended.append(trajectory)
            budget.record(trajectory)
            if report is not None:
                report(trajectory)

        try:
            yield replace(self._options, progress=count)
        except RolloutError:
            if self._writer is not None:
                await self._writer.write(weight_version + 1, ended)
            raise


def prompts_per_batch(num_prompts_per_step: int, batch_multiplier: float) -> int:
    """Return how many prompts dynamic sampling draws at once: `grpo.batch_multiplier` times a step's, rounded up."""
    return math.ceil(num_prompts_per_step * batch_multiplier)
