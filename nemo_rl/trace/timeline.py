"""The spans of a run by step, and the path through them that decided how long each wait was."""

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from nemo_rl.errors import ConfigError
from nemo_rl.observability.trace_file import TRACE_FILE, read_trace
from nemo_rl.trace import intervals
from nemo_rl.trace.intervals import Interval
from nemo_rl.tracing import DRIVER_CPU_NS, GENERATION, MICRO_BATCH, ROLLOUT, SpanRecord, TraceRecord

STEP = "total_step_time"
OTHER_RANK = re.compile(r" rank [1-9]\d*$")  # track of a rank other than 0
OTHER = "other"  # time of a rollout in which it waits for nothing that has a name


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a critical path: what was waited for, and when."""

    cause: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Step:
    """A training step: from the end of the one before it to its own."""

    number: int
    start_ns: int
    end_ns: int
    phases: Mapping[str, Sequence[Interval]]  # phases of the trainer by name
    driver_cpu_s: Mapping[str, float] = field(default_factory=dict)  # CPU time of the driver's thread by phase

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def covered_share(self) -> float:
        """Return the share of its time that some phase accounts for."""
        spans = intervals.union(each for phase in self.phases.values() for each in phase)
        return intervals.total(intervals.clip(spans, self.start_ns, self.end_ns)) / (self.end_ns - self.start_ns)


@dataclass(slots=True)
class Timeline:
    """The spans of a run."""

    steps: list[Step]
    rollouts: list[SpanRecord]  # in the order of their ends
    waits: Mapping[int, Sequence[SpanRecord]]  # waits of each rollout by its span id, in order
    generation: list[Interval]  # generation of single rollouts, in the order of their starts
    micro_batches: list[SpanRecord] = field(default_factory=list)
    _ends: list[int] = field(init=False)  # ends of the rollouts
    _longest_ns: int = field(init=False)  # the longest interval of `generation`

    def __post_init__(self) -> None:
        self._ends = [rollout.end_ns for rollout in self.rollouts]
        self._longest_ns = max((end - start for start, end in self.generation), default=0)

    @classmethod
    def read(cls, run_dir: Path) -> "Timeline":
        """Read the last start of a run that has a whole step, else its last; raises ConfigError without a trace."""
        return cls.of_spans(each for each in read_last_start(run_dir) if isinstance(each, SpanRecord))

    @classmethod
    def of_spans(cls, spans: Iterable[SpanRecord]) -> "Timeline":
        phases: defaultdict[int, defaultdict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
        driver_cpu_s: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        rollouts, waits, micro_batches = [], defaultdict(list), []
        for span in spans:
            if "step" in span.attributes:
                step = int(span.attributes["step"])
                phases[step][span.name].append((span.start_ns, span.end_ns))
                driver_cpu_s[step][span.name] += int(span.attributes.get(DRIVER_CPU_NS, 0)) / 1e9
            elif span.name == ROLLOUT:
                rollouts.append(span)
            elif span.name == MICRO_BATCH:
                if not OTHER_RANK.search(span.track):  # the ranks compute at the same time
                    micro_batches.append(span)
            else:
                waits[span.parent_id].append(span)
        rollouts.sort(key=lambda span: span.end_ns)
        for children in waits.values():
            children.sort(key=lambda span: span.start_ns)
        generation = sorted(
            (wait.start_ns, wait.end_ns)
            for rollout in rollouts
            for wait in waits.get(rollout.span_id, ())
            if wait.name == GENERATION
        )
        return cls(list(_make_steps(phases, driver_cpu_s)), rollouts, waits, generation, micro_batches)

    def generation_within(self, start_ns: int, end_ns: int) -> list[Interval]:
        """Return the waits of single rollouts for the engine that overlap a window."""
        first = bisect_right(self.generation, start_ns - self._longest_ns, key=itemgetter(0))
        last = bisect_left(self.generation, end_ns, key=itemgetter(0))
        return [each for each in self.generation[first:last] if each[1] > start_ns]

    def critical_path(self, start_ns: int, end_ns: int) -> list[Segment]:
        """Return the parts of a wait for rollouts from `start_ns` to `end_ns`, latest first.

        It ends with the rollout that ended last in it, which is followed back to its start; before that counts the
        rollout that had ended last then, as it made room.
        """
        path: list[Segment] = []
        until = end_ns
        while until > start_ns:
            at = bisect_right(self._ends, until) - 1
            if at < 0 or self._ends[at] <= start_ns:
                path.append(Segment(OTHER, start_ns, until))
                break
            rollout = self.rollouts[at]
            if rollout.end_ns < until:
                path.append(Segment(OTHER, rollout.end_ns, until))
            begin = max(rollout.start_ns, start_ns)
            path += self._segments(rollout, begin, rollout.end_ns)
            until = min(begin, until - 1)
        return path

    def _segments(self, rollout: SpanRecord, start_ns: int, end_ns: int) -> Iterator[Segment]:
        """Yield the waits of a rollout in a window, latest first; of overlapping waits the one that began last."""
        waits = self.waits.get(rollout.span_id, ())
        edges = {edge for wait in waits for edge in (wait.start_ns, wait.end_ns) if start_ns < edge < end_ns}
        until, cause = end_ns, None
        for begin, end in pairwise(sorted({start_ns, end_ns, *edges}, reverse=True)):
            names = [wait.name for wait in waits if wait.start_ns <= end and wait.end_ns >= begin]
            name = names[-1] if names else OTHER
            if cause not in (None, name):
                yield Segment(cause, begin, until)
                until = begin
            cause = name
        if cause is not None:
            yield Segment(cause, start_ns, until)


def read_last_start(run_dir: Path) -> list[TraceRecord]:
    """Return the records of the last start that has a whole step, else of the last; raises ConfigError without any."""
    path = run_dir / TRACE_FILE
    if not path.is_file():
        raise ConfigError("RUN", str(run_dir), f"has no {TRACE_FILE}; start it with logger.trace.enabled=true")
    found: list[TraceRecord] = []
    try:
        for records in read_trace(path):
            if _has_step(records) or not _has_step(found):
                found = records
    except (ValueError, OSError) as error:
        raise ConfigError("RUN", str(run_dir), str(error)) from error
    return found


def _has_step(records: Iterable[TraceRecord]) -> bool:
    return any(each.name == STEP for each in records)


def _make_steps(
    phases: Mapping[int, Mapping[str, Sequence[Interval]]], driver_cpu_s: Mapping[int, Mapping[str, float]]
) -> Iterator[Step]:
    """Yield the steps that have ended, in order."""
    previous_end: int | None = None
    for number in sorted(phases):
        own = dict(phases[number])
        if STEP not in own:
            continue
        start, _ = own.pop(STEP)[0]
        end = max(each[1] for phase in phases[number].values() for each in phase)
        yield Step(number, start if previous_end is None else previous_end, end, own, driver_cpu_s[number])
        previous_end = end
