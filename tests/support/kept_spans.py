"""A tracer that keeps its records, for tests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_rl.tracing import CounterRecord, SpanRecord, Tracer, TraceRecord


@dataclass
class KeptSpans:
    """What was recorded; complete once the tracer is closed."""

    records: list[TraceRecord] = field(default_factory=list)

    def write(self, records: Sequence[TraceRecord]) -> None:
        self.records.extend(records)

    def close(self) -> None:
        """Do nothing."""

    @property
    def spans(self) -> list[SpanRecord]:
        return [record for record in self.records if isinstance(record, SpanRecord)]

    @property
    def counters(self) -> list[CounterRecord]:
        return [record for record in self.records if isinstance(record, CounterRecord)]

    def named(self, name: str) -> list[SpanRecord]:
        return [span for span in self.spans if span.name == name]


@contextmanager
def kept_spans() -> Iterator[KeptSpans]:
    """Trace the block."""
    kept = KeptSpans()
    with Tracer([kept]):
        yield kept
