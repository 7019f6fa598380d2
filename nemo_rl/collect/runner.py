"""Runs the rollouts that stores lack: prompts are read as needed, and each result is stored when it ends.

Consumes: missing keys of `stores`, prompts. Produces: rows and failures in the stores. Waits for rollouts; unblocked by
each that ends. Memory: `concurrency` rollouts, and the stores' tables.
"""

import asyncio
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from nemo_rl.collect.shards import RolloutKey
from nemo_rl.collect.store import RolloutStore
from nemo_rl.errors import RolloutError
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import run_training_rollouts
from nemo_rl.experience.rollout_rows import rollout_row
from nemo_rl.experience.turns import RolloutJob, make_overlong_trajectory
from nemo_rl.types import Prompt, SamplingParams, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectionLimits:
    """Concurrency, and when to give up."""

    concurrency: int = 64  # rollouts
    max_failures_in_a_row: int = 100
    write_token_ids: bool = False
    write_token_columns: bool = False


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """Rollouts of one call: repeats of one task, or of several if the engine wants batches."""

    store: RolloutStore
    keys: tuple[RolloutKey, ...]


async def collect_rollouts(
    stores: Sequence[RolloutStore],
    prompts: Sequence[Prompt],
    dependencies: RolloutDependencies,
    sampling: SamplingParams,
    *,
    limits: CollectionLimits,
    on_rollout: Callable[[Trajectory], None] = lambda trajectory: None,
    masked_tasks: Container[int] = (),
) -> None:
    """Run until no store has a missing rollout; each store is marked as done when its last one has ended.

    `prompts` is the whole input: task i is prompt i. Each store is sampled with its own seed. A rollout that
    fails is tried again after all others, up to the store's `max_attempts`. Rollouts of `masked_tasks` are stored as
    wrong answers without being run. When cancelled, what has ended is stored.
    Raises RolloutError on a stall and after `max_failures_in_a_row`.
    """
    runner = _Runner(prompts, dependencies, sampling, limits, on_rollout, masked_tasks)
    for store in stores:
        _finish_if_complete(store)
    while any(store.num_missing for store in stores):
        await runner.run(_batches(stores, limits.concurrency, whole=not dependencies.generation.is_async))


class _Runner:
    """Repeated passes over the missing rollouts."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        dependencies: RolloutDependencies,
        sampling: SamplingParams,
        limits: CollectionLimits,
        on_rollout: Callable[[Trajectory], None],
        masked_tasks: Container[int],
    ) -> None:
        self._prompts = prompts
        self._masked_tasks = masked_tasks
        self._limits = limits
        self._on_rollout = on_rollout
        self._dependencies = dependencies
        self._sampling = sampling
        self._free_slots = asyncio.Semaphore(limits.concurrency)
        self._failures_in_a_row = 0
        self._is_stopping = False  # an error ends the pass: rollouts that still end well are stored, failures are not

    async def run(self, batches: Iterator[RolloutBatch]) -> None:
        """Run one pass. The first error ends all rollouts and is raised."""
        try:
            async with asyncio.TaskGroup() as rollouts:
                for batch in batches:
                    for _ in batch.keys:
                        await self._free_slots.acquire()
                    rollouts.create_task(self._run(batch))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _run(self, batch: RolloutBatch) -> None:
        seed = batch.store.seed
        pending_keys: dict[tuple[str, int], RolloutKey] = {}
        jobs, masked = [], []
        for task_index, task_keys in groupby(batch.keys, key=lambda key: key.task_index):
            prompt = self._prompts[task_index]
            group_id = f"rs{seed}:{task_index}"  # requests of several seeds run at once
            for key in task_keys:
                pending_keys[group_id, key.rollout_index] = key
                job = RolloutJob(prompt, group_id, key.rollout_index)
                (masked if task_index in self._masked_tasks else jobs).append(job)

        def ended(trajectory: Trajectory) -> None:
            key = pending_keys.pop((trajectory.group_id, trajectory.generation_index))
            self._free_slots.release()
            if self._is_stopping and trajectory.failure is not None:
                return
            try:
                self._store(batch.store, key, trajectory)
            except BaseException:
                self._is_stopping = True
                raise

        for job in masked:
            reward = self._dependencies.truncated_rewards.get(job.prompt.task_name, 0.0)
            ended(make_overlong_trajectory(job, reward))
        if jobs:
            options = RolloutOptions(self._sampling, seed, progress=ended, trains=False)
            await run_training_rollouts(jobs, self._dependencies, options)

    def _store(self, store: RolloutStore, key: RolloutKey, trajectory: Trajectory) -> None:
        if trajectory.failure is None:
            store.append(key, make_collection_row(trajectory, self._limits))
            self._failures_in_a_row = 0
        else:
            attempt = store.append_failure(key, trajectory.failure)
            self._failures_in_a_row += 1
            logger.debug("%s: attempt %d: %s", key, attempt, trajectory.failure.cause)
        self._on_rollout(trajectory)
        _finish_if_complete(store)
        if trajectory.failure is not None and self._failures_in_a_row >= self._limits.max_failures_in_a_row:
            raise RolloutError(
                f"{self._failures_in_a_row} rollouts in a row failed (collect.max_failures_in_a_row); the last one: "
                f"{trajectory.failure.failure_class}: {trajectory.failure.cause}"
            )


def make_collection_row(trajectory: Trajectory, limits: CollectionLimits) -> Mapping[str, Any]:
    """Return `rollout_row` without the fields that mean nothing for a successful rollout outside of a group."""
    row = rollout_row(
        trajectory, write_token_ids=limits.write_token_ids, write_token_columns=limits.write_token_columns
    )
    for name in ("group_id", "generation_index", "failure", "weight_versions"):
        del row[name]
    return row


def _batches(stores: Sequence[RolloutStore], concurrency: int, *, whole: bool) -> Iterator[RolloutBatch]:
    """Yield the missing keys of one pass in batches: those of a task together, at most `concurrency` in each.

    `whole`: batches of `concurrency` over several tasks, for engines that serve one batch at a time.
    """
    for store in stores:
        batch: list[RolloutKey] = []
        for key in store.missing():
            if batch and (len(batch) == concurrency or (not whole and key.task_index != batch[0].task_index)):
                yield RolloutBatch(store, tuple(batch))
                batch = []
            batch.append(key)
        if batch:
            yield RolloutBatch(store, tuple(batch))


def _finish_if_complete(store: RolloutStore) -> None:
    if not store.num_missing and not store.is_done:
        store.finish()
