"""Supervision of rollouts in flight: a watchdog against stalls, and slots of agents."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar

from nemo_rl.errors import RolloutError
from nemo_rl.experience.cancellation import cancel_all
from nemo_rl.tracing import AnySpan, span

ResultT = TypeVar("ResultT")


class StallWatchdog:
    """Ends the work that it guards when nothing has progressed for `stall_timeout_s`, naming the pending waits.

    Whatever waits for an engine, environment, agent or scorer says so: `with watchdog.waiting_for("environment math"):
    ...`. Leaving the block is progress, and so is `record_progress()`.
    """

    def __init__(self, stall_timeout_s: float) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._waiting: Counter[str] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None  # loop of the guarded work
        self._last_progress_at = 0.0
        self._guarded: set[asyncio.Future[None]] = set()  # one for each call of `guard`
        self._timer: asyncio.TimerHandle | None = None

    def waiting_for(self, what: str, count: int = 1) -> "_WaitScope":
        """Return a context manager that counts `count` waits for `what`, the name of their span."""
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
        if not self._guarded:  # the first guarded call; earlier idle time is no stall
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


class _WaitScope:
    """The context manager of `StallWatchdog.waiting_for`."""

    __slots__ = ("_count", "_span", "_watchdog", "_what")

    def __init__(self, watchdog: StallWatchdog, what: str, count: int) -> None:
        self._watchdog = watchdog
        self._what = what
        self._count = count
        self._span: AnySpan

    def __enter__(self) -> None:
        self._watchdog._waiting[self._what] += self._count
        self._span = span(self._what, count=self._count)
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, traceback)
        self._watchdog._waiting[self._what] -= self._count
        self._watchdog.record_progress()
