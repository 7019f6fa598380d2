"""Ctrl-C and SIGTERM: the first asks the loop to stop where its state is whole, the second stops at once."""

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
    """The user asked the run to stop; what the guarded work had begun is abandoned."""


@contextlib.contextmanager
def cancel_on_sigterm() -> Iterator[None]:
    """SIGTERM cancels the current task, as Ctrl-C does under asyncio.run; for the time before `Interrupt.listen`."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


class Interrupt:
    """A request to stop, seen by the loop between its stages and by whatever it guards.

    Consumes: SIGINT and SIGTERM. Unblocks: `guard`. A second signal cancels the task that called `listen`.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self) -> None:
        """Ask for the stop, as a signal does."""
        self._event.set()

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Take over both signals for as long as the block runs."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()

        def on_signal() -> None:
            if self.requested and task is not None:
                logger.warning("stopping at once")
                task.cancel()
            else:
                logger.warning("stopping after what cannot be cut; once more to stop at once")
                self.request()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def guard(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The result of `work`; where a stop is asked for first, `work` is cancelled and Interrupted raised."""
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
