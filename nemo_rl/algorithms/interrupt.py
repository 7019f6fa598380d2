"""Ctrl-C and SIGTERM: the first requests a stop where the run's state is consistent, the second stops immediately."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from nemo_rl.errors import NemoRLError

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class Interrupted(NemoRLError):
    """A stop was requested; the guarded work was cancelled."""


@contextlib.contextmanager
def cancel_on_sigterm() -> Iterator[None]:
    """Cancel the current task on SIGTERM, as asyncio.run does on Ctrl-C; for the time before `Interrupt.listen`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Interrupt:
    """A request to stop, checked by the loop between its stages; cancels guarded work.

    Consumes: SIGINT and SIGTERM. Unblocks: `guard`. A second signal cancels the task that called `listen`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Return whether a stop was requested."""
        return self._event.is_set()

    def request(self) -> None:
        """Request the stop, as a signal does."""
        self._event.set()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Handle both signals while the block runs."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def on_signal() -> None:
            if self.requested and task is not None:
                logger.warning("stopping immediately")
                task.cancel()
            else:
                logger.warning("stopping after the current optimizer step; press Ctrl-C again to stop immediately")
                self.request()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of `work`; cancel it and raise Interrupted where a stop is requested first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait((task, stop), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise Interrupted("stopped by a signal")
        finally:
            for future in (task, stop):
                future.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
