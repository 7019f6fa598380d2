"""Supervision of concurrent rollouts: the stall watchdog, concurrency limits, and orderly cancellation."""

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable
from types import TracebackType
from typing import Any, TypeVar

from nemo_rl.errors import RolloutError

logger = logging.getLogger(__name__)

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
        self._loop = asyncio.get_running_loop()
        self._last_progress_at = self._loop.time()

    def waiting_for(self, what: str, count: int = 1) -> "_WaitScope":
        """Return a context manager that counts `count` waits for `what`."""
        return _WaitScope(self, what, count)

    def record_progress(self) -> None:
        """Restart the stall timeout."""
        self._last_progress_at = self._loop.time()

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`; raise RolloutError on a stall. `work` is cancelled then, and when this is."""
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
        remaining_s = self._stall_timeout_s
        while remaining_s > 0:
            await asyncio.sleep(remaining_s)
            remaining_s = self._last_progress_at + self._stall_timeout_s - self._loop.time()
        waiting = ", ".join(f"{what} ({count})" for what, count in sorted(self._waiting.items()) if count)
        raise RolloutError(
            f"no rollout has progressed for {self._stall_timeout_s:g} s (rollout.stall_timeout_s); "
            f"waiting for: {waiting or 'nothing outside this process'}"
        )


class Supervision:
    """The watchdog and the concurrency limits that concurrent rollouts share, in one call or in several."""

    def __init__(self, stall_timeout_s: float) -> None:
        self.watchdog = StallWatchdog(stall_timeout_s)
        self._semaphores: dict[str, asyncio.Semaphore] = {}

    def concurrency_limit(self, task_name: str, max_concurrency: int) -> asyncio.Semaphore:
        """Return the semaphore that each rollout of a task holds; the first call decides its size."""
        return self._semaphores.setdefault(task_name, asyncio.Semaphore(max_concurrency))


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
