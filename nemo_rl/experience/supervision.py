"""Supervision of rollouts: failures are logged and counted, stalls and too many failures end the run, what is left is
cancelled in an orderly way."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from nemo_rl.errors import RolloutError
from nemo_rl.types import Failure, FailureClass, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30.0  # for the cancelled tasks of a whole event loop to end


class FailureLog:
    """Logs failed rollouts: the first of each task and origin as a warning with its traceback, the others at DEBUG."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, FailureClass, str]] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Log the failure of a finished rollout, if it failed."""
        failure, prompt = trajectory.failure, trajectory.prompt
        if failure is None:
            return
        site = prompt.task_name, failure.failure_class, failure.origin
        self._counts[site] += 1
        if self._counts[site] == 1:
            logger.warning(
                "rollout of prompt %s failed (task %s, %s): %s; further failures of this kind are logged at DEBUG%s",
                prompt.prompt_id,
                prompt.task_name,
                failure.failure_class,
                failure.cause,
                f"\n{failure.traceback.rstrip()}" if failure.traceback else "",
            )
        else:
            logger.debug(
                "rollout of prompt %s failed (task %s, %s; number %d of its kind): %s",
                prompt.prompt_id,
                prompt.task_name,
                failure.failure_class,
                self._counts[site],
                failure.cause,
            )


class FailureBudget:
    """Stops a step as soon as more than `max_failed_share` of its rollouts have failed."""

    def __init__(self, *, num_rollouts: int, max_failed_share: float) -> None:
        self._num_rollouts = num_rollouts
        self._max_failed_share = max_failed_share
        self._first_failure: Failure | None = None
        self._by_class: Counter[str] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Count a finished rollout. Raises RolloutError with the first cause above the limit."""
        if trajectory.failure is None:
            return
        self._first_failure = self._first_failure or trajectory.failure
        self._by_class[trajectory.failure.failure_class] += 1
        if self._by_class.total() > self._max_failed_share * self._num_rollouts:
            raise RolloutError(
                f"{self.summary()}, more than rollout.max_failed_share = {self._max_failed_share:g} allows"
            )

    def summary(self) -> str:
        """Describe the failures so far.

        Example: "3 of 4 rollouts failed (environment 2, infra 1); first cause: environment: ValueError: ...".
        """
        by_class = ", ".join(f"{name} {count}" for name, count in sorted(self._by_class.items()))
        counts = f" ({by_class})" if by_class else ""
        first = self._first_failure
        cause = f"; first cause: {first.failure_class}: {first.cause}" if first else ""
        return f"{self._by_class.total()} of {self._num_rollouts} rollouts failed{counts}{cause}"


class ConsecutiveFailureLimit:
    """Stops background collection when more than `max_consecutive` groups in a row have no survivor."""

    def __init__(self, max_consecutive: int) -> None:
        self._max_consecutive = max_consecutive
        self._num_consecutive = 0
        self._first_failure: Failure | None = None

    def record(self, group: TrajectoryGroup) -> None:
        """Count a finished group. Raises RolloutError with the first cause above the limit."""
        if group.survivors:
            self._num_consecutive, self._first_failure = 0, None
            return
        self._num_consecutive += 1
        self._first_failure = self._first_failure or group.trajectories[0].failure
        if self._num_consecutive > self._max_consecutive and self._first_failure is not None:
            raise RolloutError(
                f"all rollouts of {self._num_consecutive} groups in a row failed, more than "
                f"grpo.async_grpo.max_generation_failures = {self._max_consecutive} allows; "
                f"first cause: {self._first_failure.failure_class}: {self._first_failure.cause}"
            )


ResultT = TypeVar("ResultT")

CANCEL_GRACE_S = 5.0  # for cancelled tasks to clean up; one that swallows its cancellation is left running


class StallWatchdog:
    """Ends the work that it guards when nothing has progressed for `stall_timeout_s`, naming what is waited for.

    Whatever waits for an engine, environment, agent or scorer says so: `with watchdog.waiting_for("environment math"):
    ...`. Leaving the block is progress, and so is `record_progress()`.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._waiting: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None  # of the guarded work
        self._last_progress_at = 0.0
        self._guarded: set[asyncio.Future[None]] = set()  # one for each call of `guard`
        self._timer: asyncio.TimerHandle | None = None

    def waiting_for(self, what: str, count: int = 1) -> "_WaitScope":
        """Return a context manager that counts `count` waits for `what`."""
        return _WaitScope(self, what, count)

    def record_progress(self) -> None:
        """Restart the stall timeout."""
        if self._loop is not None:
            self._last_progress_at = self._loop.time()

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`; raise RolloutError on a stall. `work` is cancelled then, and when this is."""
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        ended: asyncio.Future[None] = loop.create_future()
        task.add_done_callback(lambda _: ended.done() or ended.set_result(None))
        if not self._guarded:  # the first of them: what happened while nothing was guarded is no stall
            self._loop = loop
            self.record_progress()
        self._guarded.add(ended)
        if self._timer is None:
            self._timer = loop.call_later(self._stall_timeout_s, self._check)
        try:
            await ended  # raises on a stall
            return await task
        finally:
            self._guarded.discard(ended)
            if not self._guarded and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            await cancel_all((task,))

    def _check(self) -> None:
        """End all guarded work on a stall; else check again when there may be one."""
        assert self._loop is not None  # guard() has started the timer
        self._timer = None
        remaining_s = self._last_progress_at + self._stall_timeout_s - self._loop.time()
        if remaining_s > 0:
            self._timer = self._loop.call_later(remaining_s, self._check)
            return
        waiting = ", ".join(f"{what} ({count})" for what, count in sorted(self._waiting.items()) if count)
        for ended in self._guarded:
            if not ended.done():
                ended.set_exception(
                    RolloutError(
                        f"no rollout has progressed for {self._stall_timeout_s:g} s (rollout.stall_timeout_s); "
                        f"waiting for: {waiting or 'nothing outside this process'}"
                    )
                )


class Supervision:
    """The watchdog and the concurrency limits that all rollouts of a run share, those of validation too.

    So any progress counts: rollouts that queue in a busy engine or for their task's limit do not stall.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self.watchdog = StallWatchdog(stall_timeout_s)
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def slot(self, task_name: str, max_concurrency: int) -> AsyncIterator[None]:
        """Hold one of a task's slots, once one is free; the first call decides their number."""
        slots = self._semaphores.setdefault(task_name, asyncio.Semaphore(max_concurrency))
        with self.watchdog.waiting_for(f"a slot of {task_name} (max_concurrency)"):
            await slots.acquire()
        try:
            yield
        finally:
            slots.release()


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """Return all results, in order. The first error cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel what is still running and wait until it has cleaned up; errors raised meanwhile are only logged."""
    running = [task for task in tasks if not task.done()]
    if not running:
        return
    for task in running:
        task.cancel()
    ended, left = await asyncio.wait(running, timeout=CANCEL_GRACE_S)
    for task in ended:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a cancelled rollout raised %r", error)
    if left:
        logger.warning("%d cancelled rollouts are still running after %g s", len(left), CANCEL_GRACE_S)


class _WaitScope:
    """The context manager of `StallWatchdog.waiting_for`."""

    __slots__ = ("_count", "_watchdog", "_what")

    def __init__(self, watchdog: StallWatchdog, what: str, count: int) -> None:
        self._watchdog = watchdog
        self._what = what
        self._count = count

    def __enter__(self) -> None:
        self._watchdog._waiting[self._what] += self._count

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._watchdog._waiting[self._what] -= self._count
        self._watchdog.record_progress()


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Return the result of `work` as `asyncio.run` does, but never wait for tasks that ignore their cancellation."""
    runner = asyncio.Runner()
    try:
        return runner.run(work)
    finally:
        loop = runner.get_loop()
        if loop.run_until_complete(cancel_tasks(asyncio.all_tasks(loop))):
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()  # the runner's own way of closing would wait for them
        else:
            runner.close()


async def cancel_tasks(tasks: Collection[asyncio.Task[Any]], timeout_s: float = SHUTDOWN_S) -> int:
    """Cancel tasks and wait for their end; return how many still run after `timeout_s`, which the log names."""
    for task in tasks:
        task.cancel()
    ended, pending = await asyncio.wait(tasks, timeout=timeout_s) if tasks else (set(), set())
    for task in ended:
        _ = task.cancelled() or task.exception()  # retrieved, else asyncio would log it
    for task in pending:
        frames = task.get_stack(limit=1)
        where = f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else "unknown"
        name = getattr(task.get_coro(), "__qualname__", task.get_name())
        logger.error("abandoned task %s at %s: it ignored its cancellation for %g s", name, where, timeout_s)
    return len(pending)
