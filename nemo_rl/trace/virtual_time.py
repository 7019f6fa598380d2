"""An event loop whose clock jumps: sleeps take no time, and the order of events is that of their times."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting it moves the clock on; where nothing could ever happen it says so."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events and timeout is None:
            raise RuntimeError("all tasks wait, and nothing will ever wake one")
        if not events and timeout is not None:
            self.now += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Not for work in threads, whose end no clock foresees."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_in_virtual_time(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
