"""Spans: what a run did, when, and within what. Off unless a `Tracer` is open; then a span costs a few microseconds.

`span(name)` is a context manager. A span belongs to the span that is current in its context, so tasks begin within the
span of their creator, and waits of a rollout are part of its span. On a timeline a span has a track, and in it a lane:
that of its parent if nothing else is open there, else a free one, so that spans of a lane nest. Texts of prompts and
responses do not belong into attributes.

Times are of the monotonic clock, which processes of one machine share. Identifiers and `traceparent` are those of W3C
Trace Context (https://www.w3.org/TR/trace-context/).
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from random import getrandbits
from types import TracebackType
from typing import NamedTuple, Protocol, TypeAlias

AttributeValue: TypeAlias = str | int | float | bool

DRIVER = "driver"  # the track of spans without a parent that name none
ROLLOUT = "rollout"  # span of a rollout
GENERATION = "generation"  # span of its wait for the engine
MICRO_BATCH = "micro_batch"  # span of what the policy does with one
DRIVER_CPU_NS = "driver_cpu_ns"  # attribute of a step's phases: CPU time of the driver's thread within them
FLUSH_S = 0.5  # between two writes of a trace
MAX_PENDING = 200_000  # records not yet written; later ones are dropped and counted


class SpanRecord(NamedTuple):
    """A span that has ended."""

    name: str
    track: str
    lane: int  # index in its track, from 0
    start_ns: int  # monotonic clock
    end_ns: int
    trace_id: int
    span_id: int  # 0: a part of its parent that was timed elsewhere, without attributes
    parent_id: int  # 0: none
    attributes: Mapping[str, AttributeValue]


class CounterRecord(NamedTuple):
    """The value of a counter from a moment on."""

    name: str
    at_ns: int
    value: float


TraceRecord: TypeAlias = SpanRecord | CounterRecord


class TraceSink(Protocol):
    """A place where a trace is written."""

    def write(self, records: Sequence[TraceRecord]) -> None:
        """Write records, in the order in which they ended; called by one thread."""
        ...

    def close(self) -> None: ...


class SpanContext:
    """The identity of a span."""

    __slots__ = ("span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int) -> None:
        self.trace_id = trace_id
        self.span_id = span_id

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


class Span(SpanContext):
    """An open span; entered, it is the current one of its context, and ends with the block."""

    __slots__ = ("_stack", "_token", "_tracer", "attributes", "lane", "name", "parent", "parts", "start_ns", "track")

    def __init__(
        self,
        tracer: "Tracer",
        name: str,
        parent: SpanContext | None,
        track: str | None,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self.trace_id = getrandbits(128) if parent is None else parent.trace_id
        self.span_id = getrandbits(64) or 1  # 0 is that of parts
        self.name = name
        self.parent = parent
        self.track = track or (parent.track if isinstance(parent, Span) else DRIVER)
        self.attributes = attributes
        self.parts: list[tuple[str, int, int]] = []  # names, starts and ends
        self._tracer = tracer
        self._token: Token[SpanContext | None] | None = None
        self.lane, self._stack = tracer.take_lane(self)
        self.start_ns = tracer.clock_ns()

    def __enter__(self) -> "Span":
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._token is not None
        _current.reset(self._token)
        if kind is not None:
            self.attributes["error.type"] = kind.__name__
        self.end()

    def end(self, **attributes: AttributeValue) -> None:
        """End the span, with `attributes` beside its own; does nothing if it has ended."""
        self._tracer.end(self, self._stack, attributes)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the current span inside the block, which does not end it."""
        with within(self):
            yield


class _NoSpan:
    """Stand-in for a span without a tracer."""

    __slots__ = ()

    def __enter__(self) -> "_NoSpan":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def end(self, **attributes: AttributeValue) -> None:
        """Do nothing."""

    def current(self) -> "_NoSpan":
        return self


NO_SPAN = _NoSpan()
AnySpan: TypeAlias = Span | _NoSpan

_current: ContextVar[SpanContext | None] = ContextVar("current_span", default=None)
_tracer: "Tracer | None" = None  # the open one


def span(name: str, track: str | None = None, **attributes: AttributeValue) -> AnySpan:
    """Begin a span within the current one; `track`: another than that one's."""
    return NO_SPAN if _tracer is None else Span(_tracer, name, _current.get(), track, attributes)


def record_part(name: str, start_ns: int, end_ns: int) -> None:
    """Record a part of the current span that was timed elsewhere; it is clipped to the time since that span began."""
    if _tracer is not None and isinstance(parent := _current.get(), Span):
        start_ns = max(start_ns, parent.start_ns)
        parent.parts.append((name, start_ns, max(start_ns, end_ns)))


def annotate(**attributes: AttributeValue) -> None:
    """Add attributes to the current span."""
    if _tracer is not None and isinstance(current := _current.get(), Span):
        current.attributes.update(attributes)


def now_ns() -> int:
    """Return the time on the clock of spans; 0 without a tracer."""
    return 0 if _tracer is None else _tracer.clock_ns()


def thread_cpu_ns() -> int:
    """Return the CPU time that this thread has used; 0 without a tracer."""
    return 0 if _tracer is None else _tracer.thread_cpu_ns()


def record_counter(name: str, value: float) -> None:
    """Record that a counter has this value from now on."""
    if _tracer is not None:
        _tracer.add(CounterRecord(name, _tracer.clock_ns(), value))


def add_records(records: Iterable[TraceRecord]) -> None:
    """Add records of another process to the trace."""
    if _tracer is not None:
        _tracer.add(*records)


def current_context() -> SpanContext | None:
    """Return the identity of the current span, for work that continues in another context; None without a tracer."""
    return None if _tracer is None else _current.get()


def trace_headers() -> dict[str, str]:
    """Return the HTTP header that names the current span, or none: spans of the server then belong to it."""
    context = current_context()
    return {} if context is None else {"traceparent": context.traceparent}


def trace_environment() -> dict[str, str]:
    """Return the variable by which a program learns of the current span, or none."""
    return {name.upper(): value for name, value in trace_headers().items()}


def collector_address() -> str | None:
    """Return the OTLP address that spans of this run are sent to, for processes with spans of their own, or None."""
    return None if _tracer is None else _tracer.collector


@contextmanager
def within(context: SpanContext | None) -> Iterator[None]:
    """Let spans in the block belong to the span of this identity; None: to the current one."""
    token = None if context is None else _current.set(context)
    try:
        yield
    finally:
        if token is not None:
            _current.reset(token)


@dataclass(slots=True)
class _Track:
    """The lanes of a track."""

    num_lanes: int = 0
    free: list[int] = field(default_factory=list)  # a heap


class Tracer:
    """Collects the spans of this process until it is closed, and writes them to `sinks` on a thread of its own.

    A sink that raises is no longer called. At most one tracer is open in a process. `thread_cpu_ns` is the clock of the
    calling thread's CPU time; `collector` is the address that one of the sinks sends spans to.
    """

    def __init__(
        self,
        sinks: Sequence[TraceSink],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        thread_cpu_ns: Callable[[], int] = time.thread_time_ns,
        collector: str | None = None,
    ) -> None:
        self.clock_ns = clock_ns
        self.thread_cpu_ns = thread_cpu_ns
        self.collector = collector
        self.num_dropped = 0  # records that came faster than they could be written
        self.errors: list[tuple[TraceSink, Exception]] = []
        self._sinks = list(sinks)
        self._tracks: dict[str, _Track] = {}
        self._lock = threading.Lock()
        self._pending: list[TraceRecord] = []
        self._is_closing = threading.Event()
        self._writer = threading.Thread(target=self._write_until_closed, name="trace-writer", daemon=True)

    def __enter__(self) -> "Tracer":
        self.open_without_writer()
        self._writer.start()
        return self

    def open_without_writer(self) -> None:
        """Collect the spans of this process until it ends, for a caller that takes them with `take`."""
        global _tracer
        if _tracer is not None:
            raise RuntimeError("a tracer is open in this process already")
        _tracer = self

    def take(self) -> list[TraceRecord]:
        """Return the records since the last call."""
        records, self._pending = self._pending, []
        return records

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _tracer
        _tracer = None
        self._is_closing.set()
        self._writer.join()
        for sink in self._sinks:
            self._guard(sink, sink.close)

    def take_lane(self, span: Span) -> tuple[int, list[Span]]:
        """Return the span's lane and the open spans of that lane, which include it now."""
        with self._lock:
            parent = span.parent
            if isinstance(parent, Span) and parent.track == span.track and parent._stack[-1:] == [parent]:
                parent._stack.append(span)
                return parent.lane, parent._stack
            track = self._tracks.setdefault(span.track, _Track())
            if track.free:
                return heapq.heappop(track.free), [span]
            track.num_lanes += 1
            return track.num_lanes - 1, [span]

    def end(self, span: Span, stack: list[Span], attributes: Mapping[str, AttributeValue]) -> None:
        """Record a span and its parts, right after it, and give its lane back."""
        end_ns = self.clock_ns()
        with self._lock:
            if span not in stack:  # it has ended
                return
            stack.remove(span)
            if not stack:
                heapq.heappush(self._tracks[span.track].free, span.lane)
        if attributes:
            span.attributes.update(attributes)
        place, trace_id, span_id = (span.track, span.lane), span.trace_id, span.span_id
        parent_id = 0 if span.parent is None else span.parent.span_id
        whole = SpanRecord(span.name, *place, span.start_ns, end_ns, trace_id, span_id, parent_id, span.attributes)
        parts = [SpanRecord(name, *place, start, end, trace_id, 0, span_id, {}) for name, start, end in span.parts]
        self.add(whole, *parts)

    def add(self, *records: TraceRecord) -> None:
        """Have the records written, one after another; dropped if too many wait."""
        if len(self._pending) < MAX_PENDING:
            self._pending.extend(records)
        else:
            self.num_dropped += len(records)

    def _write_until_closed(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closing.wait(FLUSH_S)
            records = self.take()
            for sink in list(self._sinks):
                if records:
                    self._guard(sink, lambda sink=sink, records=records: sink.write(records))

    def _guard(self, sink: TraceSink, call: Callable[[], None]) -> None:
        """Call a sink; after an exception it is no longer called."""
        try:
            call()
        except Exception as error:  # a full disk or a lost network is no reason to lose the training  # noqa: BLE001
            self.errors.append((sink, error))
            if sink in self._sinks:
                self._sinks.remove(sink)
