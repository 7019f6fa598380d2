"""Workload of a traced run: its rollouts, and how long its engine, its trainer and everything else take.

Fitted to the spans of a trace by least squares, so that the planner can run other schedules of the same work.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import ArrayLike

from nemo_rl.metric_names import COLLECTION_PHASES, POLICY_PHASES
from nemo_rl.trace import intervals
from nemo_rl.trace.bubbles import NUM_WARM_UP_STEPS
from nemo_rl.trace.intervals import Interval
from nemo_rl.trace.timeline import Step, Timeline
from nemo_rl.tracing import GENERATION, SpanRecord

ENVIRONMENT, SCORER = "environment ", "scorer "  # prefixes of the names of those waits
AGENTS = ("agent ", "NeMo Gym's ")
BACKGROUND_COLLECTION = "exposed_generation"  # phase of runs whose rollouts are collected in the background
MAX_SLOWDOWN = 4.0  # of engine and trainer by each other
SLOWDOWN_SPREAD = 0.5  # standard deviation of what is expected without a trace that tells
MAX_FITTED = 20_000  # rows; of more every n-th is taken


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
    request_s: float = 0.0  # per request beside its tokens and prefill, beside others: HTTP
    prefill_s: float = 0.0  # per request, meanwhile no other one advances
    beside_training: float = 1.0  # factor while the policy computes

    def seconds(self, num_running: int) -> float:
        """Return the seconds of a token while the policy does not compute."""
        return self.token_s + num_running * self.sequence_s


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
    driver_s: float = 0.0  # time of the driver's event loop per request


@dataclass(frozen=True, slots=True)
class Limits:
    """Values of the traced run that its spans do not tell."""

    num_rollouts: int  # trained per step
    num_sequences: int  # per engine
    num_engines: int
    # concurrent calls of an environment or scorer, by the name of its wait; absent: any number
    calls: Mapping[str, int]
    shares_devices: bool = False  # whether engine and trainer compute on the same devices


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
    service = _service_shares(timeline, rollouts, limits)
    served = _serve(timeline, limits.num_sequences * limits.num_engines)
    return Workload(
        list(_groups(timeline, rollouts, service)),
        _fit_engine(served, steps, limits),
        _fit_trainer(timeline, steps, rollouts, served, limits),
        _other_phases(steps),
        _driver_seconds(timeline, steps, rollouts),
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
    """Return a rollout's size."""
    generation = _generation(timeline, rollout)
    environment = [_seconds([wait]) * service.get(wait.name, 1.0) for wait in _waits(timeline, rollout, ENVIRONMENT)]
    if agents := _waits(timeline, rollout, AGENTS):
        *before, last = _agent_seconds(agents[0].start_ns, agents[-1].end_ns, generation)
        environment = [*before, last + sum(environment)]
    environment += [0.0] * (len(generation) - len(environment))
    tokens = _tokens_of_calls(rollout, generation) or [max(_tokens(rollout), 1)]
    scores = {
        wait.name.removeprefix(SCORER): _seconds([wait]) * service.get(wait.name, 1.0)
        for wait in _waits(timeline, rollout, SCORER)
    }
    turns = tuple(PlannedTurn(*each) for each in zip(tokens, environment, strict=False))
    return PlannedRollout(str(rollout.attributes.get("env")), turns, scores)


def _tokens_of_calls(rollout: SpanRecord, calls: Sequence[SpanRecord]) -> list[int]:
    """Return the tokens of each call of the model, at least 1; by the calls' times if they do not tell."""
    if all("num_sampled_tokens" in call.attributes for call in calls):
        return [max(int(call.attributes["num_sampled_tokens"]), 1) for call in calls]
    total = _seconds(calls)
    return [max(round(_tokens(rollout) * (_seconds([call]) / total if total else 1 / len(calls))), 1) for call in calls]


def _agent_seconds(start_ns: int, end_ns: int, calls: Sequence[SpanRecord]) -> list[float]:
    """Return an agent's own time after each of its calls of the model; its time before the first counts last."""
    own, until = [], start_ns
    for call in calls:
        own.append(max(call.start_ns - until, 0) / 1e9)
        until = max(until, call.end_ns)
    first, *after = [*own, max(end_ns - until, 0) / 1e9]
    return [*after[:-1], after[-1] + first] if after else [first]


@dataclass(frozen=True, slots=True)
class _Served:
    """The time in which an engine computed a request."""

    start_ns: int
    prefilled_ns: int  # the end of its prefill; its start if the engine has told no phases
    end_ns: int
    num_tokens: int

    @property
    def has_phases(self) -> bool:
        return self.prefilled_ns > self.start_ns

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """Return the starts, the ends and the tokens of prefill, which samples the first one, and decode."""
        if not self.has_phases:
            return ((self.start_ns, self.end_ns, self.num_tokens),)
        return (self.start_ns, self.prefilled_ns, 1), (self.prefilled_ns, self.end_ns, self.num_tokens - 1)


def _serve(timeline: Timeline, num_places: int) -> list[_Served]:
    """Return when each request was computed: from its prefill on, if the engine has told its phases.

    Else the engine begins with the one that has waited longest.
    """
    calls = [(rollout, _generation(timeline, rollout)) for rollout in timeline.rollouts]
    waits = [pair for rollout, own in calls for pair in zip(own, _tokens_of_calls(rollout, own), strict=True)]
    ends: list[int] = []  # ends of the requests that are being computed
    served = []
    for wait, tokens in sorted(waits, key=lambda each: (each[0].start_ns, each[0].lane)):
        phases = {each.name: each for each in timeline.waits.get(wait.span_id, ())}
        if "prefill" in phases:
            start_ns, end_ns = phases["prefill"].start_ns, phases["prefill"].end_ns
            served.append(_Served(start_ns, end_ns, phases["decode"].end_ns if "decode" in phases else end_ns, tokens))
            continue
        start_ns = wait.start_ns
        if len(ends) == num_places:
            start_ns = max(start_ns, heapq.heappop(ends))
        heapq.heappush(ends, wait.end_ns)
        start_ns = min(start_ns, wait.end_ns)
        served.append(_Served(start_ns, start_ns, wait.end_ns, tokens))
    return served


def _training(steps: Sequence[Step]) -> list[Interval]:
    return intervals.union(phase for step in steps for name in POLICY_PHASES for phase in step.phases.get(name, ()))


def _fit_engine(served: Sequence[_Served], steps: Sequence[Step], limits: Limits) -> EngineCurve:
    """Fit the time of requests without their queue: by tokens, by sequences beside them, and by prefills meanwhile.

    If the engine has told no phases, what a request takes beside its tokens delays no other one.
    """
    running = _Area(intervals.open_counts((each.start_ns, each.end_ns) for each in served))
    policy = _Area(intervals.open_counts(_training(steps)))
    prefills = sorted(each.prefilled_ns for each in served if each.has_phases)
    rows, seconds, shares = [], [], []
    for request in served:
        if not steps[0].start_ns < request.end_ns <= steps[-1].end_ns:
            continue
        for start_ns, end_ns, tokens in request.parts:
            duration_ns = max(end_ns - start_ns, 1)
            num_prefills = (bisect_right(prefills, end_ns) - bisect_right(prefills, start_ns)) / limits.num_engines
            beside = running.over(start_ns, end_ns) / duration_ns / limits.num_engines
            rows.append([tokens, tokens * beside, 0.0 if request.has_phases else 1.0, num_prefills])
            seconds.append(duration_ns / 1e9)
            shares.append(policy.over(start_ns, end_ns) / duration_ns)
    if not rows:
        return EngineCurve(0.0, 0.0)
    (token_s, sequence_s, request_s, prefill_s), slowdown = _fit_with_slowdown(
        rows, seconds, shares, len(steps), limits
    )
    return EngineCurve(token_s, sequence_s, request_s, prefill_s, slowdown)


def _fit_trainer(
    timeline: Timeline,
    steps: Sequence[Step],
    rollouts: Sequence[SpanRecord],
    served: Sequence[_Served],
    limits: Limits,
) -> TrainerCurve:
    """Fit the policy's time: from its micro-batches if they are traced, else by sampled tokens alone."""
    tokens_per_step = sum(map(_tokens, rollouts)) / len(rollouts) * limits.num_rollouts
    policy_s = sum(intervals.total(step.phases.get(name, ())) for step in steps for name in POLICY_PHASES) / 1e9
    window = steps[0].start_ns, steps[-1].end_ns
    parts = [each for each in timeline.micro_batches if window[0] <= each.start_ns < window[1]]
    if not parts:
        return TrainerCurve(0.0, 0.0, policy_s / len(steps) / tokens_per_step, 0.0)
    engine = _Area(intervals.open_counts(intervals.union((each.start_ns, each.end_ns) for each in served)))
    seconds = [max(each.end_ns - each.start_ns, 1) / 1e9 for each in parts]
    tokens = [int(each.attributes["num_tokens"]) for each in parts]
    shares = [engine.over(each.start_ns, each.end_ns) / 1e9 / s for each, s in zip(parts, seconds, strict=True)]
    (fixed, per_token), slowdown = _fit_with_slowdown([[1.0, n] for n in tokens], seconds, shares, len(parts), limits)
    training = _training(steps)
    beside = sum(engine.over(*each) for each in training) / max(intervals.total(training), 1)
    return TrainerCurve(
        max(policy_s - sum(seconds), 0.0) / len(steps) / (1 + (slowdown - 1) * beside),
        fixed,
        per_token * sum(tokens) / len(steps) / tokens_per_step,
        len(parts) / len(steps) / limits.num_rollouts,
        slowdown,
    )


def _fit_with_slowdown(
    rows: Sequence[Sequence[float]],
    seconds: Sequence[float],
    shares: Sequence[float],
    num_observations: int,
    limits: Limits,
) -> tuple[list[float], float]:
    """Return the coefficients of rows and the factor f of: seconds = (1 + (f - 1) * share) * rows * coefficients.

    `share` is how much of its time the other one of engine and trainer computed, too. If shares do not tell the factor,
    it is 2 on devices that both share, which do no more work for two than for one, and 1 on others. The rows count as
    `num_observations` independent ones: requests of a batch are slow together.
    """
    expected = 2.0 if limits.shares_devices else 1.0
    share, target = np.array(shares), np.array(seconds)
    every = -(-len(target) // MAX_FITTED)
    matrix, share, target = np.array(rows, dtype=np.float64)[::every], share[::every], target[::every]
    found, errors, factors = [], [], np.linspace(1.0, MAX_SLOWDOWN, 61)
    for factor in factors:
        slowed = matrix * (1 + (factor - 1) * share)[:, None]
        found.append(_non_negative_least_squares(slowed, target))
        errors.append(np.square(slowed @ found[-1] - target).mean())
    noise = max(min(errors), 1e-9 * np.square(target).mean())
    costs = np.array(errors) * num_observations / noise + np.square((factors - expected) / SLOWDOWN_SPREAD)
    best = int(costs.argmin())
    return found[best], float(factors[best])


def _driver_seconds(timeline: Timeline, steps: Sequence[Step], rollouts: Sequence[SpanRecord]) -> float:
    """Return the driver's own time per request: the CPU time of its thread while it waits.

    It waits for rollouts and, if they are collected in the background, for the policy.
    """
    in_background = any(BACKGROUND_COLLECTION in step.phases for step in steps)
    phases = (*COLLECTION_PHASES, *(POLICY_PHASES if in_background else ()))
    seconds = sum(step.driver_cpu_s.get(name, 0.0) for step in steps for name in phases)
    return seconds / max(sum(len(_generation(timeline, rollout)) for rollout in rollouts), 1)


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


def _non_negative_least_squares(rows: ArrayLike, values: ArrayLike) -> list[float]:
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
