"""Spans of other processes on the driver's timeline: each call's result brings those that have ended since the last."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from nemo_rl import tracing
from nemo_rl.tracing import DRIVER, SpanContext, SpanRecord, Tracer, TraceRecord, span, within

Identity: TypeAlias = tuple[int, int]  # trace id and span id of a call's span


@cache
def _tracer() -> Tracer:
    """Return this process's tracer, whose records wait for the next result."""
    tracer = Tracer([])
    tracer.open_without_writer()
    return tracer


@contextmanager
def span_of_call(name: str, caller: Identity) -> Iterator[None]:
    """Make a span of a call, which belongs to the caller's, the current one in the block."""
    _tracer()
    with within(SpanContext(*caller)), span(name):
        yield


@dataclass(frozen=True, slots=True)
class RemoteSpans:
    """A call's result and the spans of its process, in its own monotonic time."""

    result: Any
    records: list[TraceRecord]
    boot_id: str  # the machine's: its processes share a clock
    epoch_ns: int  # when that clock was 0

    @classmethod
    def take(cls, result: Any) -> "RemoteSpans":
        return cls(result, _tracer().take(), _boot_id(), _epoch_ns())

    def add_to_trace(self, process: str) -> Any:
        """Add the spans to this process's trace, on tracks of that process; return the result.

        Clocks of two machines are brought together by their wall clocks, hence as well as these agree.
        """
        shift_ns = 0 if self.boot_id == _boot_id() else self.epoch_ns - _epoch_ns()
        tracing.add_records(_moved(record, process, shift_ns) for record in self.records)
        return self.result


def _moved(record: TraceRecord, process: str, shift_ns: int) -> TraceRecord:
    if isinstance(record, SpanRecord):
        track = process if record.track == DRIVER else f"{process}: {record.track}"
        return record._replace(track=track, start_ns=record.start_ns + shift_ns, end_ns=record.end_ns + shift_ns)
    name = f"{process}/{record.name.rpartition('/')[2]}"
    return record._replace(name=name, at_ns=record.at_ns + shift_ns)


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _epoch_ns() -> int:
    return time.time_ns() - time.monotonic_ns()
