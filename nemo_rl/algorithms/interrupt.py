"""Stopping a run on Ctrl-C, SIGTERM and SIGHUP.

The first signal requests a stop at the next consistent state of the run, the second stops it immediately.
"""

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from nemo_rl.errors import NemoRLError
from nemo_rl.experience.cancellation import cancel_tasks

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# SIGTERM and SIGHUP within this time after the first signal are the same request: `timeout` and schedulers signal a
# process and then its group.
REPEAT_S = 1.0

ResultT = TypeVar("ResultT")


class Interrupted(NemoRLError):
    """A stop was requested; the guarded work was cancelled."""


@contextlib.contextmanager
def cancel_on_termination() -> Iterator[None]:
    """Cancel the current task on SIGTERM and SIGHUP, as asyncio.run does on Ctrl-C; until `Interrupt.listen`."""
    task = asyncio.current_task()
    assert task is not None
    with _on_signals((signal.SIGTERM, signal.SIGHUP), task.cancel, task.cancel):
        yield


@contextlib.contextmanager
def _on_signals(
    numbers: Iterable[signal.Signals], on_first: Callable[[], object], on_later: Callable[[], object]
) -> Iterator[None]:
    """Call `on_first` for the first of the signals and `on_later` for each further one, on the event loop.

    Only the main thread receives signals: in any other this does nothing. SIGHUP stays ignored under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first_at: list[float] = []

    def on_signal(number: signal.Signals) -> None:
        if not first_at:
            first_at.append(loop.time())
            on_first()
        elif number == signal.SIGINT or loop.time() - first_at[0] > REPEAT_S:
            on_later()

    handled = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    for number in handled:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


class Interrupt:
    """A request to stop, checked by the loop between its stages; cancels guarded work.

    Consumes: SIGINT, SIGTERM, SIGHUP. Unblocks: `guard`. A second signal cancels the task that called `listen`, unless
    it is a SIGTERM or SIGHUP within REPEAT_S of the first.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self) -> None:
        """Request the stop, as a signal does."""
        self._event.set()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Handle the signals while the block runs; does nothing outside of the main thread."""
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            logger.warning("stopping after the current optimizer step; press Ctrl-C again to stop immediately")
            self.request()

        def stop_immediately() -> None:
            logger.warning("stopping immediately")
            task.cancel()

        with _on_signals(STOP_SIGNALS, stop_immediately if self.requested else stop, stop_immediately):
            yield

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`; cancel it and raise Interrupted if a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted("stopped by a signal")
        finally:
            stop.cancel()
            await cancel_tasks([task])
