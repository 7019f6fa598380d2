"""Groups collected in the background, while the policy trains, never older than a bound (AReaL, arXiv 2505.24298)."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Literal

from nemo_rl.config.shared_sections import RolloutConfig
from nemo_rl.data.prompt_loader import LoadedPrompt, PromptLoader
from nemo_rl.errors import RolloutError
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.experience.failure_limits import ConsecutiveFailureLimit, FailureBudget
from nemo_rl.experience.replay_buffer import BufferedGroup, DroppedGroup, ReplayBuffer, ReplayBufferState, WaitReason
from nemo_rl.experience.replay_buffer_state import REPLAY_BUFFER, extract_buffer_state
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollout_dispatch import (
    flatten_with_failed_baselines,
    group_trajectories,
    make_rollout_jobs,
    run_training_rollouts,
)
from nemo_rl.experience.rollout_metrics import age_metrics, rollout_metrics
from nemo_rl.experience.rollout_writer import RolloutWriter
from nemo_rl.tracing import record_counter, span
from nemo_rl.types import CollectedGroups, Failure, FailureClass, StopReason, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

STILL_RUNNING = "still running at the age bound"


class CollectionMeter:
    """Seconds and counts since the last `take`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_dropped = 0  # groups
        self.num_given_up = 0  # rollouts of groups that continue without them
        self._clock = clock
        self._window_started_at = clock()
        self._waited_s = dict.fromkeys(WaitReason, 0.0)
        self._busy_s = 0.0
        self._busy_since: float | None = None  # None: nothing runs

    @contextlib.contextmanager
    def waiting(self, cause: WaitReason) -> Iterator[None]:
        """Count the time inside the block as waiting of the trainer."""
        started = self._clock()
        try:
            with span(f"wait: {cause}"):
                yield
        finally:
            self._waited_s[cause] += self._clock() - started

    def set_num_running(self, num_tasks: int) -> None:
        """Record how many tasks run; called whenever that changes."""
        now = self._clock()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if num_tasks else None

    def take(self) -> dict[str, float]:
        """Return metrics by name, and reset them."""
        self.set_num_running(self._busy_since is not None)
        now = self._clock()
        metrics = {f"efficiency/exposed_wait_s/{cause}": seconds for cause, seconds in self._waited_s.items()}
        metrics["efficiency/generation_busy_pct"] = 100 * self._busy_s / max(now - self._window_started_at, 1e-9)
        metrics["replay_buffer/dropped_groups"] = float(self.num_dropped)
        metrics["replay_buffer/given_up_rollouts"] = float(self.num_given_up)
        self._window_started_at, self._busy_s, self.num_dropped, self.num_given_up = now, 0.0, 0, 0
        self._waited_s = dict.fromkeys(WaitReason, 0.0)
        return metrics


class AsyncSource:
    """Runs one asyncio task per group, starting with the first `next_groups()`; without an async engine, one per batch.

    Consumes: prompts of the loader. Produces: complete groups in a ReplayBuffer. Waits for: room in it, and the end of
    a hold. Unblocked by: a group that ends, a step that is handed out, a hold that ends.

    A masked prompt's group is complete at once, without rollouts, and has its place in a step.

    A group counts as sampled under the version last passed to `next_groups`, until its rollouts report one. No group
    older than `max_age_steps` is handed out. With `max_age_steps` 0 nothing runs between two steps, and the groups are
    those of a SyncSource.
    """

    def __init__(
        self,
        loader: PromptLoader,
        dependencies: RolloutDependencies,
        options: RolloutOptions,
        *,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        max_age_steps: int,
        stale_groups: Literal["wait", "drop", "trim"],
        max_generation_failures: int,
        failures: RolloutConfig,
        min_group_size: int = 1,
        greedy_baseline: bool = False,
        writer: RolloutWriter | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Limit the groups issued to those of `num_steps`, the steps of the whole training, if it is known."""
        self._loader = loader
        self._dependencies = dependencies
        self._options = options
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._max_age = max_age_steps
        self._stale_groups = stale_groups
        self._min_group_size = min_group_size
        self._greedy_baseline = greedy_baseline
        self._ended: dict[int, dict[int, Trajectory]] = {}  # rollouts of running groups, by prompt and generation index
        self._failures = failures
        self._writer = writer
        self._num_steps = num_steps
        self._buffer = ReplayBuffer(num_groups_per_step=num_prompts_per_step, max_age_steps=max_age_steps)
        self._delivered: dict[str, BufferedGroup] = {}  # groups delivered at this version, by group id
        self._dropped: tuple[DroppedGroup, ...] = ()
        self._failure_limit = ConsecutiveFailureLimit(max_generation_failures)
        self._tasks: dict[asyncio.Task[None], tuple[int, ...]] = {}  # the places that each collects
        self._weight_version: int | None = None  # None: not started
        self._is_trainer_waiting = False
        self._num_holds = 0
        self._is_closed = False
        self._error: Exception | None = None  # error of a task
        self._changed = asyncio.Event()
        self._meter = CollectionMeter()

    # ---- the trainer's side

    async def next_groups(self, weight_version: int) -> CollectedGroups:
        """Return one step's complete groups, chosen oldest first, ordered by prompt; fewer at the end of the dataset.

        `weight_version` is the trainer's; the engine holds it, too. Raises RolloutError with the first cause when too
        many rollouts fail and when nothing progresses, and whatever a background task has raised. Cancelled, it leaves
        all groups if they are.
        """
        self._update_weight_version(weight_version)
        self._is_trainer_waiting = True
        try:
            self._start_rollouts()
            chosen = await self._dependencies.supervision.watchdog.guard(self._wait_for_groups(weight_version))
            while chosen and not any(one.group.trajectories for one in chosen):  # all masked: nothing to train on
                self._buffer.remove(one.prompt_index for one in chosen)
                chosen = await self._dependencies.supervision.watchdog.guard(self._wait_for_groups(weight_version))
        except RolloutError:  # the run ends: what there is is written down
            await self._write(weight_version, flatten_with_failed_baselines(one.group for one in self._buffer.complete))
            raise
        finally:
            self._is_trainer_waiting = False
        if not chosen:
            raise StopAsyncIteration
        trajectories = flatten_with_failed_baselines(one.group for one in chosen)
        await self._write(weight_version, trajectories)
        num_rollouts = sum(len(one.group.trajectories) + (one.group.baseline is not None) for one in chosen)
        budget = FailureBudget(num_rollouts=num_rollouts, max_failed_share=self._failures.max_failed_share)
        for trajectory in trajectories:
            if trajectory.failure is None or trajectory.failure.failure_class is not FailureClass.CANCELLED:
                budget.record(trajectory)
        self._buffer.remove(one.prompt_index for one in chosen)
        self._delivered |= {one.group.group_id: one for one in chosen}
        self._start_rollouts()
        metrics = rollout_metrics(trajectories) | age_metrics(trajectories, weight_version) | self._metrics()
        return CollectedGroups(tuple(one.group for one in chosen if one.group.trajectories), metrics)

    async def _write(self, weight_version: int, trajectories: Sequence[Trajectory]) -> None:
        if self._writer is not None:
            await self._writer.write(weight_version + 1, trajectories)  # the step that trains on them

    def return_groups(self, groups: Iterable[TrajectoryGroup], *, next_version: int) -> list[TrajectoryGroup]:
        """Take back groups that this step does not need; returns those dropped, too old for `next_version`."""
        lost = []
        for one in [self._delivered.pop(group.group_id) for group in groups]:
            if one.weight_version + self._max_age >= next_version:
                self._buffer.restore([one])
            else:
                self._record_drop(one.group.group_id, f"not needed by a step, and too old for version {next_version}")
                lost.append(one.group)
        return lost

    @asynccontextmanager
    async def hold(self, *, until_idle: bool = False) -> AsyncIterator[None]:
        """Start no rollout inside; with `until_idle` it is entered once none runs.

        Raises RolloutError when, while it waits, nothing progresses for `rollout.stall_timeout_s`.
        """
        self._num_holds += 1
        try:
            if until_idle and self._tasks:
                await self._dependencies.supervision.watchdog.guard(self._until_idle())
            yield
        finally:
            self._num_holds -= 1
            self._start_rollouts()

    async def close(self) -> None:
        """Cancel all rollouts; when it returns, none runs."""
        self._is_closed = True
        await cancel_all(list(self._tasks))

    # ---- its state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, cheap enough for every step: it refers to groups; `buffer_state` makes plain values of it.

        The prompts of a step that was handed out are consumed; those in the buffer and in flight are not.
        """
        num_consumed = self._loader.consumed - len(self._buffer)
        return self._loader.state_dict() | {
            "consumed_prompts": num_consumed,
            "epoch": self._loader.epoch_after(num_consumed),
            REPLAY_BUFFER: ReplayBufferState(self._buffer.complete, self._buffer.running, self._dropped),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load before the first step. Prompts in flight, or with groups of another size, are issued again unchanged."""
        self._loader.load_state_dict(state)
        buffered = extract_buffer_state(state, self._loader)
        self._loader.put_back(buffered.in_flight)
        self._buffer.restore(buffered.complete)
        self._dropped = buffered.dropped
        others = [one for one in buffered.complete if not self._has_own_shape(one.group)]
        count = f"grpo.num_generations_per_prompt = {self._num_generations} rollouts"
        self._requeue(others, f"do not have {count}{' and a greedy one' if self._greedy_baseline else ''}")

    # ---- choosing

    def _update_weight_version(self, weight_version: int) -> None:
        """Take note of the version that the trainer has reached."""
        if self._weight_version is None:
            self._requeue(tuple(self._buffer.unschedulable(weight_version)), "are too old by now")
        if weight_version != self._weight_version:
            self._delivered.clear()
        self._weight_version = weight_version

    def _has_own_shape(self, group: TrajectoryGroup) -> bool:
        """Return whether the group is one that this source could have collected."""
        is_masked = not group.trajectories
        has_baseline = group.baseline is not None
        is_whole = len(group.trajectories) == self._num_generations and has_baseline == self._greedy_baseline
        return is_masked or is_whole

    def _requeue(self, groups: Sequence[BufferedGroup], reason: str) -> None:
        prompt_indices = [one.prompt_index for one in groups]
        if prompt_indices:
            logger.info("%d groups of the checkpoint %s; their prompts are issued again", len(prompt_indices), reason)
        self._buffer.remove(prompt_indices)
        self._loader.put_back(prompt_indices)

    async def _wait_for_groups(self, weight_version: int) -> tuple[BufferedGroup, ...]:
        """Return one step's groups as soon as they are available; none if the dataset is exhausted."""
        while True:
            choice = self._try_choose(weight_version)
            if not isinstance(choice, WaitReason):
                return choice
            with self._meter.waiting(choice):
                self._changed.clear()
                await self._changed.wait()

    def _try_choose(self, weight_version: int) -> tuple[BufferedGroup, ...] | WaitReason:
        if self._error is not None:
            raise self._error
        for one in self._buffer.expired(weight_version):
            age = weight_version - one.weight_version
            self._drop(
                one.prompt_index, f"{age} steps old, above grpo.async_grpo.max_trajectory_age_steps = {self._max_age}"
            )
        choice = self._buffer.choose(weight_version, self._num_required())
        if choice is WaitReason.LATE and self._stale_groups != "wait":
            for prompt_index in self._buffer.running_at_age_limit(weight_version):
                if not (self._stale_groups == "trim" and self._trim(prompt_index, weight_version)):
                    self._drop(prompt_index, f"{STILL_RUNNING}, version {weight_version}")
            choice = self._buffer.choose(weight_version, self._num_required())
        self._start_rollouts()  # fills the room of dropped groups
        return choice

    def _num_required(self) -> int:
        return min(self._num_prompts, len(self._buffer)) if self._loader.data_exhausted else self._num_prompts

    def _trim(self, prompt_index: int, weight_version: int) -> bool:
        """Complete a running group with the rollouts that have ended; the others fail as cancelled.

        Return False, and change nothing, if fewer than `min_group_size` have survived, one of them is older than the
        bound, or there is no baseline yet.
        """
        loaded, ended = self._loader.at(prompt_index), dict(self._ended.get(prompt_index, {}))
        baseline = ended.pop(self._num_generations, None)
        survivors = [trajectory for trajectory in ended.values() if trajectory.failure is None]
        is_young = all(t.weight_versions[0] + self._max_age >= weight_version for t in survivors)
        lacks_baseline = self._greedy_baseline and (baseline is None or baseline.failure is not None)
        if len(survivors) < max(self._min_group_size, 1) or not is_young or lacks_baseline:
            return False
        given_up = Failure(FailureClass.CANCELLED, f"{STILL_RUNNING}, version {weight_version}")
        trajectories = tuple(
            ended.get(index)
            or Trajectory(loaded.prompt, loaded.group_id, index, (), StopReason.FAILED, failure=given_up)
            for index in range(self._num_generations)
        )
        self._buffer.finish(prompt_index, TrajectoryGroup(loaded.group_id, loaded.prompt, trajectories, baseline))
        self._meter.num_given_up += self._num_generations - len(ended)
        logger.warning("group %s continues with %d of %d rollouts", loaded.group_id, len(ended), self._num_generations)
        self._cancel_alone(prompt_index)
        return True

    def _drop(self, prompt_index: int, reason: str) -> None:
        """Give a group up, and cancel its rollouts if they run alone."""
        group_id = self._loader.at(prompt_index).group_id
        logger.warning("group %s is dropped: %s", group_id, reason)
        self._record_drop(group_id, reason)
        self._buffer.remove([prompt_index])
        self._cancel_alone(prompt_index)

    def _cancel_alone(self, prompt_index: int) -> None:
        for task, prompt_indices in self._tasks.items():
            if prompt_indices == (prompt_index,):
                task.cancel()

    def _record_drop(self, group_id: str, reason: str) -> None:
        self._dropped = (*self._dropped, DroppedGroup(group_id, reason))
        self._meter.num_dropped += 1

    def _metrics(self) -> dict[str, float]:
        """Return the metrics of the time since the last step's groups."""
        return (
            self._meter.take()
            | self._loader.take_metrics()
            | {
                "replay_buffer/size": float(self._buffer.num_complete),
                "replay_buffer/in_flight": float(len(self._buffer.running)),
            }
        )

    # ---- collecting

    def _start_rollouts(self) -> None:
        """Start the groups that there is room for."""
        if self._weight_version is None or self._num_holds or self._is_closed or self._error is not None:
            return
        is_async = self._dependencies.generation.is_async
        if self._tasks and not is_async:
            return
        num_remaining_steps = None if self._num_steps is None else max(self._num_steps - 1 - self._weight_version, 0)
        room = self._buffer.capacity(
            is_trainer_waiting=self._is_trainer_waiting, num_remaining_steps=num_remaining_steps
        )
        was_exhausted = self._loader.data_exhausted
        taken = self._loader.take(room)
        prompts = [one for one in taken if not one.is_masked]
        for one in taken:
            self._buffer.issue(one.prompt_index, self._weight_version)
            if one.is_masked:
                self._buffer.finish(one.prompt_index, TrajectoryGroup(one.group_id, one.prompt, ()))
        if len(prompts) < len(taken) or self._loader.data_exhausted != was_exhausted:
            asyncio.get_running_loop().call_soon(self._changed.set)  # who waits may have enough groups
        for batch in [(one,) for one in prompts] if is_async else [prompts] if prompts else []:
            task = asyncio.get_running_loop().create_task(self._collect(batch))
            self._tasks[task] = tuple(one.prompt_index for one in batch)
            self._record_num_running()
            self._dependencies.supervision.watchdog.record_progress()

    async def _collect(self, prompts: Sequence[LoadedPrompt]) -> None:
        """Run the rollouts of a background task. Its error is raised by the next `next_groups`."""
        task = asyncio.current_task()
        assert task is not None
        try:
            self._finish(prompts, await self._collect_groups(prompts))
        except asyncio.CancelledError:
            if not self._is_closed and any(self._buffer.is_running(one.prompt_index) for one in prompts):
                self._error = self._error or RolloutError("rollouts in the background were cancelled from within")
            raise
        except Exception as error:  # kept for the trainer, which stops on it  # noqa: BLE001
            self._error = self._error or error
        finally:
            del self._tasks[task]
            for one in prompts:
                self._ended.pop(one.prompt_index, None)
            self._record_num_running()
            self._start_rollouts_or_record_error()
            self._changed.set()

    def _start_rollouts_or_record_error(self) -> None:
        """Call `_start_rollouts` from a background task; keep its error for the next `next_groups`."""
        try:
            self._start_rollouts()
        except Exception as error:  # a prompt that cannot be read any more; the trainer would wait for ever  # noqa: BLE001
            self._error = self._error or error

    async def _collect_groups(self, prompts: Sequence[LoadedPrompt]) -> tuple[TrajectoryGroup, ...]:
        options = RolloutOptions(
            self._options.sampling,
            self._options.seed,
            progress=partial(self._record_end, {one.group_id: one.prompt_index for one in prompts}),
        )
        jobs = make_rollout_jobs(prompts, self._num_generations, greedy_baseline=self._greedy_baseline)
        trajectories = await run_training_rollouts(jobs, self._dependencies, options)
        return group_trajectories(trajectories, self._num_generations, greedy_baseline=self._greedy_baseline)

    def _record_end(self, prompt_indices: Mapping[str, int], trajectory: Trajectory) -> None:
        """Keep an ended rollout for `_trim`, and report it."""
        ended = self._ended.setdefault(prompt_indices[trajectory.group_id], {})
        ended[trajectory.generation_index] = trajectory
        if self._options.progress is not None:
            self._options.progress(trajectory)

    def _finish(self, prompts: Sequence[LoadedPrompt], groups: Sequence[TrajectoryGroup]) -> None:
        for one, group in zip(prompts, groups, strict=True):
            if self._buffer.is_running(one.prompt_index):  # else it was dropped meanwhile
                self._buffer.finish(one.prompt_index, group)
                self._failure_limit.record(group)

    def _record_num_running(self) -> None:
        self._meter.set_num_running(len(self._tasks))
        record_counter("replay_buffer/size", self._buffer.num_complete)
        record_counter("replay_buffer/in_flight", len(self._buffer.running))

    async def _until_idle(self) -> None:
        while self._tasks:
            self._changed.clear()
            await self._changed.wait()
