"""An event loop whose clock jumps: sleeps take no time, and the order of events is that of their times."""

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nemo_rl.trace.timeline import Timeline
from nemo_rl.tracing import SpanRecord, Tracer, TraceRecord, TraceSink

ResultT = TypeVar("ResultT")


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting it moves the clock on; if nothing could ever happen it says so."""

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


def trace_in_virtual_time(
    work: Coroutine[Any, Any, ResultT], sinks: Sequence[TraceSink] = ()
) -> tuple[ResultT, Timeline]:
    """As `run_in_virtual_time`; return also the timeline of its spans, which are written to `sinks` too."""
    records: list[TraceRecord] = []
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        clock = partial(Tracer, clock_ns=lambda: round(loop.time() * 1e9), thread_cpu_ns=lambda: 0)
        with clock([_Kept(records), *sinks]):
            result = runner.run(work)
    return result, Timeline.of_spans(each for each in records if isinstance(each, SpanRecord))


@dataclass(frozen=True, slots=True)
class _Kept:
    """A sink that keeps what it is given."""

    records: list[TraceRecord]

    def write(self, records: Sequence[TraceRecord]) -> None:
        self.records.extend(records)

    def close(self) -> None:
        """Do nothing: nothing is held."""


def run_in_virtual_time(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """As asyncio.run."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
