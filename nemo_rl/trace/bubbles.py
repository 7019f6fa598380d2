"""The bubble table of a run: how the time of a step is divided between work and waits, by cause."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nemo_rl.metric_names import COLLECTION_PHASES, POLICY_PHASES
from nemo_rl.trace import intervals
from nemo_rl.trace.intervals import Interval
from nemo_rl.trace.timeline import Segment, Step, Timeline
from nemo_rl.tracing import GENERATION

TAIL = "generation: few rollouts left"
TAIL_SHARE = 0.25  # an engine is nearly empty below this share of the most that ran at once in a wait
NUM_WARM_UP_STEPS = 1  # dropped if others follow: the first step compiles and fills caches


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Seconds per step, in the mean over `num_steps` steps."""

    num_steps: int
    step_s: float
    trainer_busy_s: float
    engine_busy_s: float  # time in which at least one rollout waits for it
    waits_s: Mapping[str, float]  # waits of the trainer by cause, longest first
    unaccounted_s: float  # time in no phase
    longest: Sequence[Segment]  # the longest single links of critical paths

    @property
    def trainer_busy_share(self) -> float:
        return self.trainer_busy_s / self.step_s

    @property
    def engine_busy_share(self) -> float:
        return self.engine_busy_s / self.step_s


def count_bubbles(timeline: Timeline, *, num_longest: int = 5) -> Bubbles | None:
    """Return the table; None for a trace without a whole step."""
    steps = timeline.steps[NUM_WARM_UP_STEPS:] or timeline.steps
    if not steps:
        return None
    engine = intervals.union(timeline.generation)
    busy_ns, engine_ns, waits, links = 0, 0, Counter[str](), list[Segment]()
    for step in steps:
        training = intervals.union(each for name in POLICY_PHASES for each in step.phases.get(name, ()))
        busy_ns += intervals.total(training)
        engine_ns += intervals.total(intervals.clip(engine, step.start_ns, step.end_ns))
        for segment in _waits(timeline, step):
            waits[segment.cause] += segment.end_ns - segment.start_ns
            links.append(segment)
    step_ns = sum(step.end_ns - step.start_ns for step in steps)
    scale = 1 / (1e9 * len(steps))
    return Bubbles(
        len(steps),
        step_ns * scale,
        busy_ns * scale,
        engine_ns * scale,
        {cause: ns * scale for cause, ns in waits.most_common()},
        (step_ns - busy_ns - waits.total()) * scale,
        sorted(links, key=lambda segment: segment.seconds, reverse=True)[:num_longest],
    )


def _waits(timeline: Timeline, step: Step) -> list[Segment]:
    """Return the trainer's waits in a step while it did not compute, without overlaps."""
    taken = intervals.union(each for name in POLICY_PHASES for each in step.phases.get(name, ()))
    segments: list[Segment] = []
    for name, phase in step.phases.items():
        if name in POLICY_PHASES:
            continue
        free = [gap for start, end in intervals.union(phase) for gap in intervals.gaps(taken, start, end)]
        for start, end in free:
            segments += _by_cause(timeline, start, end) if name in COLLECTION_PHASES else [Segment(name, start, end)]
        taken = intervals.union([*taken, *free])
    return segments


def _by_cause(timeline: Timeline, start_ns: int, end_ns: int) -> list[Segment]:
    """Return the critical path of a wait for rollouts; generation is divided if few rollouts are left."""
    tail_from = find_tail(timeline.generation_within(start_ns, end_ns))
    return [
        part
        for segment in timeline.critical_path(start_ns, end_ns)
        for part in (_divide(segment, tail_from) if segment.cause == GENERATION else [segment])
    ]


def _divide(segment: Segment, tail_from: int) -> list[Segment]:
    middle = min(max(tail_from, segment.start_ns), segment.end_ns)
    parts = (Segment(GENERATION, segment.start_ns, middle), Segment(TAIL, middle, segment.end_ns))
    return [part for part in parts if part.end_ns > part.start_ns]


def find_tail(spans: Sequence[Interval]) -> int:
    """Return the time from which at most `TAIL_SHARE` of the most that were open at once are still open.

    Example: of 8 that begin at 0 and end at 1, 2, ..., 8, two are left from 6 on.
    """
    counts = intervals.open_counts(spans)
    limit = max((count for _, count in counts), default=0) * TAIL_SHARE
    return max((at for (_, before), (at, _) in pairwise([(0, 0), *counts]) if before > limit), default=0)
