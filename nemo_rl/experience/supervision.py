"""What keeps a run from waiting for ever or training on nothing: the stall watchdog and the failure budget."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

from nemo_rl.errors import RolloutError
from nemo_rl.types import Failure, Trajectory, TrajectoryGroup

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

CANCEL_GRACE_S = 5.0  # for cancelled tasks to clean up; one that swallows its cancellation is left behind


class StallWatchdog:
    """Ends the work it guards when nothing has progressed for `stall_timeout_s`, naming what is waited for.

    Whatever awaits a boundary says so: `with watchdog.waiting_for("environment math"): ...`. Leaving the block is
    progress, and so is `progressed()`.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._waiting: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._progressed_at = self._loop.time()

    def waiting_for(self, what: str, count: int = 1) -> "_Waiting":
        return _Waiting(self, what, count)

    def progressed(self) -> None:
        self._progressed_at = self._loop.time()

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work`. Raises RolloutError on a stall; `work` is cancelled then, and when this is."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await watch  # raises
            return await task
        finally:
            await cancel_all((task, watch))

    async def _watch(self) -> None:
        left_s = self._stall_timeout_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._progressed_at + self._stall_timeout_s - self._loop.time()
        waiting = ", ".join(f"{what} ({count})" for what, count in sorted(self._waiting.items()) if count)
        raise RolloutError(
            f"no rollout has progressed for {self._stall_timeout_s:g} s (rollout.stall_timeout_s); "
            f"waiting for: {waiting or 'nothing outside this process'}"
        )


class _Waiting:
    """The block of `StallWatchdog.waiting_for`."""

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
        self._watchdog.progressed()


class Supervision:
    """What rollouts have in common that run at once, in one call or in several: a watchdog, and room by task."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.watchdog = StallWatchdog(stall_timeout_s)
        self._room: dict[str, asyncio.Semaphore] = {}

    def room(self, task_name: str, max_concurrency: int) -> asyncio.Semaphore:
        """Held by each rollout of a task while it runs; of the size that was asked for first."""
        return self._room.setdefault(task_name, asyncio.Semaphore(max_concurrency))


async def in_parallel(work: Iterable[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """All results, in order. The first error ends the others and is raised as it is."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel what is still running and wait until it has cleaned up; errors on the way out are not raised."""
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
        logger.warning("%d cancelled rollouts have not ended after %g s", len(left), CANCEL_GRACE_S)


class FailureBudget:
    """Stops a step as soon as more than `max_failed_share` of its rollouts have failed."""

    def __init__(self, *, num_rollouts: int, max_failed_share: float) -> None:
        self._num_rollouts = num_rollouts
        self._max_failed_share = max_failed_share
        self._first: Failure | None = None
        self._by_class: Counter[str] = Counter()

    def record(self, trajectory: Trajectory) -> None:
        """Count a rollout that has ended. Raises RolloutError with the first cause above the limit."""
        if trajectory.failure is None:
            return
        self._first = self._first or trajectory.failure
        self._by_class[trajectory.failure.failure_class] += 1
        if self._by_class.total() > self._max_failed_share * self._num_rollouts:
            raise RolloutError(
                f"{self.summary()}, more than rollout.max_failed_share = {self._max_failed_share:g} allows"
            )

    def summary(self) -> str:
        """Example: "3 of 4 rollouts failed (environment 2, infra 1); first cause: environment: ValueError: ..."."""
        by_class = ", ".join(f"{name} {count}" for name, count in sorted(self._by_class.items()))
        first = f"; first cause: {self._first.failure_class}: {self._first.cause}" if self._first else ""
        counts = f" ({by_class})" if by_class else ""
        return f"{self._by_class.total()} of {self._num_rollouts} rollouts failed{counts}{first}"


class WholeFailures:
    """Stops background collection when more than `max_in_a_row` groups, one after the other, have no survivor."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._num_in_a_row = 0
        self._first: Failure | None = None

    def record(self, group: TrajectoryGroup) -> None:
        """Count a group that has ended. Raises RolloutError with the first cause above the limit."""
        if group.survivors:
            self._num_in_a_row, self._first = 0, None
            return
        self._num_in_a_row += 1
        self._first = self._first or group.trajectories[0].failure
        if self._num_in_a_row > self._max_in_a_row and self._first is not None:
            raise RolloutError(
                f"{self._num_in_a_row} groups in a row failed whole, more than "
                f"grpo.async_grpo.max_generation_failures = {self._max_in_a_row} allows; "
                f"first cause: {self._first.failure_class}: {self._first.cause}"
            )
