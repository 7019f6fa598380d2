"""Workload of a traced run: its rollouts, and how long its engine, its trainer and everything else take.

Fitted to the spans of a trace by least squares, so that the planner can run other schedules of the same work.
"""

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from nemo_rl.metric_names import COLLECTION_PHASES, POLICY_PHASES
from nemo_rl.trace import intervals
from nemo_rl.trace.bubbles import NUM_WARM_UP_STEPS
from nemo_rl.trace.intervals import Interval
from nemo_rl.trace.timeline import Step, Timeline
from nemo_rl.tracing import GENERATION, SpanRecord

ENVIRONMENT, SCORER = "environment ", "scorer "  # prefixes of the names of those waits
AGENTS = ("agent ", "NeMo Gym's ")


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """A response and what follows it."""

    num_tokens: int
    environment_s: float


@dataclass(frozen=True, slots=True)
class PlannedRollout:
    """The size of a rollout: that of its responses, and the seconds of its environment and scorers."""

    env: str
    turns: tuple[PlannedTurn, ...]
    scores_s: Mapping[str, float]  # by scorer


@dataclass(frozen=True, slots=True)
class EngineCurve:
    """Seconds of one engine: of a token while `n` sequences are sampled at once, `token_s + n * sequence_s`."""

    token_s: float
    sequence_s: float
    request_s: float = 0.0  # per request beside its tokens: prefill, HTTP
    beside_training_s: float = 0.0  # additional time per token while the policy computes

    def seconds(self, num_running: int, *, is_training: bool) -> float:
        """Return the seconds of a token."""
        return self.token_s + num_running * self.sequence_s + (self.beside_training_s if is_training else 0.0)


@dataclass(frozen=True, slots=True)
class TrainerCurve:
    """Seconds of the policy's passes over a step."""

    step_s: float  # whatever the step's size
    micro_batch_s: float  # per micro-batch
    token_s: float  # per sampled token
    micro_batches_per_rollout: float
    beside_generation: float = 1.0  # factor while the engine samples

    def seconds(self, num_rollouts: int, num_tokens: int) -> float:
        """Return the seconds of a step while the engine does nothing."""
        num_micro_batches = self.micro_batches_per_rollout * num_rollouts
        return self.step_s + self.micro_batch_s * num_micro_batches + self.token_s * num_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """A run's work."""

    groups: Sequence[Sequence[PlannedRollout]]  # in the order in which they began
    engine: EngineCurve
    trainer: TrainerCurve
    phases_s: Mapping[str, float]  # other phases of a step than training and collection, by name


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of concurrency of the traced run."""

    num_sequences: int  # per engine
    num_engines: int
    # concurrent calls of an environment or scorer, by the name of its wait; absent: any number
    calls: Mapping[str, int]


def fit_workload(timeline: Timeline, limits: Limits) -> Workload:
    """Return the work of a trace; raises ValueError if it has no whole step or no rollout that ended well."""
    steps = timeline.steps[NUM_WARM_UP_STEPS:] or timeline.steps
    window = (steps[0].start_ns, steps[-1].end_ns) if steps else (0, 0)
    rollouts = [
        each
        for each in timeline.rollouts
        if window[0] < each.end_ns <= window[1] and "failure" not in each.attributes and _tokens(each)
    ]
    if not rollouts:
        raise ValueError("its trace has no training step with rollouts")
    training = [phase for step in steps for name in POLICY_PHASES for phase in step.phases.get(name, ())]
    service = _service_shares(timeline, rollouts, limits)
    return Workload(
        list(_groups(timeline, rollouts, service)),
        _fit_engine(timeline, rollouts, intervals.union(training), limits),
        _fit_trainer(timeline, steps, rollouts),
        _other_phases(steps),
    )


def _tokens(rollout: SpanRecord) -> int:
    return int(rollout.attributes.get("num_sampled_tokens", 0))


def _generation(timeline: Timeline, rollout: SpanRecord) -> list[SpanRecord]:
    return [wait for wait in timeline.waits.get(rollout.span_id, ()) if wait.name == GENERATION]


def _waits(timeline: Timeline, rollout: SpanRecord, prefix: str | tuple[str, ...]) -> list[SpanRecord]:
    return [wait for wait in timeline.waits.get(rollout.span_id, ()) if wait.name.startswith(prefix)]


def _seconds(spans: Iterable[SpanRecord]) -> float:
    return sum(span.end_ns - span.start_ns for span in spans) / 1e9


def _service_shares(timeline: Timeline, rollouts: Sequence[SpanRecord], limits: Limits) -> dict[str, float]:
    """Return, by the name of a wait with a limit of calls, the share of it that is service and not a queue.

    Calls that keep all of `n` places busy for a time T had n * T seconds of service together.
    """
    spans: defaultdict[str, list[Interval]] = defaultdict(list)
    for rollout in rollouts:
        for wait in timeline.waits.get(rollout.span_id, ()):
            if wait.name in limits.calls:
                spans[wait.name].append((wait.start_ns, wait.end_ns))
    shares = {}
    for name, each in spans.items():
        places = limits.calls[name]
        counts = [*intervals.open_counts(each)]
        served = sum((until - at) * min(count, places) for (at, count), (until, _) in pairwise(counts))
        shares[name] = served / max(intervals.total(each), 1)
    return shares


def _groups(
    timeline: Timeline, rollouts: Sequence[SpanRecord], service: Mapping[str, float]
) -> Iterator[list[PlannedRollout]]:
    by_group: dict[str, list[PlannedRollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: (rollout.start_ns, rollout.lane)):
        by_group.setdefault(str(rollout.attributes.get("group")), []).append(_plan(timeline, rollout, service))
    yield from by_group.values()


def _plan(timeline: Timeline, rollout: SpanRecord, service: Mapping[str, float]) -> PlannedRollout:
    """Return a rollout's size; tokens that no call tells are divided among its turns by their time."""
    generation = _generation(timeline, rollout)
    seconds = [_seconds([wait]) for wait in generation] or [0.0]
    environment = [_seconds([wait]) * service.get(wait.name, 1.0) for wait in _waits(timeline, rollout, ENVIRONMENT)]
    if agents := _waits(timeline, rollout, AGENTS):
        *before, last = _agent_seconds(agents[0].start_ns, agents[-1].end_ns, generation)
        environment = [*before, last + sum(environment)]
    environment += [0.0] * (len(seconds) - len(environment))
    if generation and all("num_sampled_tokens" in wait.attributes for wait in generation):
        sampled = [int(wait.attributes["num_sampled_tokens"]) for wait in generation]
    else:
        total = sum(seconds)
        sampled = [round(_tokens(rollout) * (each / total if total else 1 / len(seconds))) for each in seconds]
    tokens = [max(count, 1) for count in sampled]
    scores = {
        wait.name.removeprefix(SCORER): _seconds([wait]) * service.get(wait.name, 1.0)
        for wait in _waits(timeline, rollout, SCORER)
    }
    turns = tuple(PlannedTurn(*each) for each in zip(tokens, environment, strict=False))
    return PlannedRollout(str(rollout.attributes.get("env")), turns, scores)


def _agent_seconds(start_ns: int, end_ns: int, calls: Sequence[SpanRecord]) -> list[float]:
    """Return an agent's own time after each of its calls of the model; its time before the first counts last."""
    own, until = [], start_ns
    for call in calls:
        own.append(max(call.start_ns - until, 0) / 1e9)
        until = max(until, call.end_ns)
    first, *after = [*own, max(end_ns - until, 0) / 1e9]
    return [*after[:-1], after[-1] + first] if after else [first]


def _served(timeline: Timeline, num_places: int) -> dict[int, Interval]:
    """Return, by span id, when each request was sampled: from its prefill on, if the engine has told its phases.

    Else the engine begins with the one that has waited longest.
    """
    waits = [wait for rollout in timeline.rollouts for wait in _generation(timeline, rollout)]
    ends: list[int] = []  # ends of the rollouts that are being sampled
    served = {}
    for wait in sorted(waits, key=lambda wait: (wait.start_ns, wait.lane)):
        prefill = next((each for each in timeline.waits.get(wait.span_id, ()) if each.name == "prefill"), None)
        if prefill is not None:
            served[wait.span_id] = prefill.start_ns, wait.end_ns
            continue
        start_ns = wait.start_ns
        if len(ends) == num_places:
            start_ns = max(start_ns, heapq.heappop(ends))
        heapq.heappush(ends, wait.end_ns)
        served[wait.span_id] = min(start_ns, wait.end_ns), wait.end_ns
    return served


def _fit_engine(
    timeline: Timeline, rollouts: Sequence[SpanRecord], training: Sequence[Interval], limits: Limits
) -> EngineCurve:
    """Fit the time of requests without their queue: by tokens, by sequences beside them, and by requests."""
    served = _served(timeline, limits.num_sequences * limits.num_engines)
    running, policy = _Area(intervals.open_counts(served.values())), _Area(intervals.open_counts(training))
    rows, seconds = [], []
    for rollout in rollouts:
        requests = [served[wait.span_id] for wait in _generation(timeline, rollout)]
        duration_ns = max(intervals.total(requests), 1)
        beside = sum(running.over(*each) for each in requests) / duration_ns / limits.num_engines
        trained = sum(policy.over(*each) for each in requests) / duration_ns
        rows.append([_tokens(rollout), _tokens(rollout) * beside, len(requests), _tokens(rollout) * trained])
        seconds.append(duration_ns / 1e9)
    return EngineCurve(*_non_negative_least_squares(rows, seconds))


def _fit_trainer(timeline: Timeline, steps: Sequence[Step], rollouts: Sequence[SpanRecord]) -> TrainerCurve:
    """Fit the policy's time: from its micro-batches if they are traced, else by sampled tokens alone."""
    num_tokens = sum(map(_tokens, rollouts))
    policy_s = sum(intervals.total(step.phases.get(name, ())) for step in steps for name in POLICY_PHASES) / 1e9
    window = steps[0].start_ns, steps[-1].end_ns
    parts = [each for each in timeline.micro_batches if window[0] <= each.start_ns < window[1]]
    if not parts:
        return TrainerCurve(0.0, 0.0, policy_s / num_tokens, 0.0)
    engine = _Area(intervals.open_counts(intervals.union(timeline.generation)))
    seconds = [(each.end_ns - each.start_ns) / 1e9 for each in parts]
    tokens = [int(each.attributes["num_tokens"]) for each in parts]
    beside = [
        engine.over(each.start_ns, each.end_ns) / 1e9 / max(s, 1e-9) for each, s in zip(parts, seconds, strict=True)
    ]
    rows = [[1.0, n, n * share] for n, share in zip(tokens, beside, strict=True)]
    fixed, per_token, slower = _non_negative_least_squares(rows, seconds)
    return TrainerCurve(
        max(policy_s - sum(seconds), 0.0) / len(steps),
        fixed,
        per_token * sum(tokens) / num_tokens,
        len(parts) / len(rollouts),
        1.0 + (slower / per_token if per_token else 0.0),
    )


def _other_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Return the mean seconds of the other phases; each moment counts for the phase that began first."""
    total_s: defaultdict[str, float] = defaultdict(float)
    for step in steps:
        own = [*POLICY_PHASES, *COLLECTION_PHASES]
        taken = intervals.union(each for name in own for each in step.phases.get(name, ()))
        for name, phase in step.phases.items():
            if name in own:
                continue
            free = [gap for start, end in intervals.union(phase) for gap in intervals.gaps(taken, start, end)]
            total_s[name] += intervals.total(free) / 1e9
            taken = intervals.union([*taken, *free])
    return {name: seconds / len(steps) for name, seconds in total_s.items()}


class _Area:
    """The integral of a count over time."""

    def __init__(self, counts: Sequence[tuple[int, int]]) -> None:
        self._times = [at for at, _ in groupby(counts, key=itemgetter(0))]
        last = dict(counts)
        self._counts = [last[at] for at in self._times]
        widths = np.diff(np.array(self._times, dtype=np.float64)) if self._times else np.array([])
        self._sums = np.concatenate([[0.0], np.cumsum(widths * np.array(self._counts[:-1], dtype=np.float64))])

    def over(self, start_ns: int, end_ns: int) -> float:
        """Return the integral over an interval, in nanoseconds."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, time_ns: int) -> float:
        index = bisect_left(self._times, time_ns + 1) - 1
        if index < 0:
            return 0.0
        return float(self._sums[index]) + (time_ns - self._times[index]) * self._counts[index]


def _non_negative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients of columns, none below 0: the most negative is dropped until none is.

    Columns of one length: what proportional ones explain together is divided equally among them.
    """
    matrix, target = np.array(rows, dtype=np.float64), np.array(values, dtype=np.float64)
    lengths = np.linalg.norm(matrix, axis=0)
    lengths[lengths == 0] = 1.0
    matrix /= lengths
    kept = [column for column in range(matrix.shape[1]) if matrix[:, column].any()]
    found = np.zeros(matrix.shape[1])
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], target, rcond=1e-9)[0]
        if solution.min() >= 0:
            found[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return (found / lengths).tolist()
