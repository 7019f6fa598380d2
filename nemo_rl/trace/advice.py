"""For each bottleneck of a bubble table, the key that moves it, in which direction, and the seconds it may save."""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from nemo_rl.trace.bubbles import TAIL, Bubbles
from nemo_rl.trace.intervals import open_counts
from nemo_rl.trace.run_config import DEFAULT_MAX_NUM_SEQS, Config, algorithm_key, background_key, lookup
from nemo_rl.trace.timeline import Timeline
from nemo_rl.tracing import GENERATION

MIN_SHARE = 0.05  # share of a step; less is not worth a key


@dataclass(frozen=True, slots=True)
class Advice:
    """A bottleneck and what to do about it."""

    cause: str
    seconds: float  # seconds that it takes per step
    change: str  # the key, and its new value or its direction
    gain_s: float  # seconds that the change saves per step, estimated from the trace
    reason: str
    values: Mapping[str, int | bool] = field(default_factory=dict)  # values of the change by key, if they are known
    is_planned: bool = False  # whether the gain is the planner's (planned_advice.py)


def advise(bubbles: Bubbles, timeline: Timeline, config: Config) -> list[Advice]:
    """Return advice on what takes at least a twentieth of a step, the largest gain first."""
    found = [*_on_waits(bubbles, timeline, config), *_on_micro_batches(bubbles, timeline, config)]
    return sorted((each for each in found if each.seconds >= MIN_SHARE * bubbles.step_s), key=lambda a: -a.gain_s)


def _on_waits(bubbles: Bubbles, timeline: Timeline, config: Config) -> Iterator[Advice]:
    for cause, seconds in bubbles.waits_s.items():
        for pattern, rule in RULES:
            if match := re.fullmatch(pattern, cause):
                yield rule(_Wait(cause, seconds, match, bubbles, timeline, config))
                break


@dataclass(frozen=True, slots=True)
class _Wait:
    cause: str
    seconds: float
    match: re.Match[str]
    bubbles: Bubbles
    timeline: Timeline
    config: Config

    def advice(
        self, change: str, gain_share: float, reason: str, values: Mapping[str, int | bool] | None = None
    ) -> Advice:
        return Advice(self.cause, self.seconds, change, self.seconds * gain_share, reason, values or {})

    def change(self, key: str, value: object, new: int, gain_share: float, reason: str) -> Advice:
        """Return the advice to change a number, which the planner can follow."""
        seconds = self.seconds * gain_share
        return Advice(self.cause, self.seconds, f"{key}: {value} -> {new}", seconds, reason, {key: new})

    @property
    def algorithm(self) -> str:
        return algorithm_key(self.config)


def _tail(wait: _Wait) -> Advice:
    background = background_key(wait.config)
    enabled, key = f"{background}.enabled", f"{background}.max_trajectory_age_steps"
    if lookup(wait.config, enabled):
        age = lookup(wait.config, key) or 0
        reason = "the step waits for its last rollouts while the engine has nothing else to do"
        return wait.change(key, age, age + 1, 0.8, reason)
    change = f"{enabled}: true, with max_trajectory_age_steps: 1"
    reason = "the last rollouts of a step keep the trainer waiting, and the engine nearly empty"
    return wait.advice(change, 0.8, reason, {enabled: True, key: 1})


def _generation(wait: _Wait) -> Advice:
    limit = lookup(wait.config, "policy.generation.vllm_cfg.max_num_seqs") or DEFAULT_MAX_NUM_SEQS
    most = most_at_once(wait.timeline)
    if most > 1.25 * limit:
        reason = f"up to {most} requests are open, and the engine computes {limit} of them at once"
        return wait.change("policy.generation.vllm_cfg.max_num_seqs", limit, most, 1 - limit / most, reason)
    enabled = f"{background_key(wait.config)}.enabled"
    if not lookup(wait.config, enabled):
        change = f"{enabled}: true, if the engine has devices of its own"
        gain = min(wait.seconds, wait.bubbles.trainer_busy_s) / wait.seconds
        return wait.advice(change, gain, "engine and trainer take turns; in the background they work at the same time")
    change = "policy.generation.num_replicas: more engines"
    return wait.advice(change, 0.5, "the engine is busy all the time and the trainer waits for it")


def _slot(wait: _Wait) -> Advice:
    env = wait.match[1]
    limit = lookup(wait.config, f"env.{env}.max_concurrency")
    change = f"env.{env}.max_concurrency: {limit or 'its limit'} -> {2 * limit if limit else 'twice as many'}"
    return wait.advice(change, 0.5, "rollouts wait for one of the environment's slots")


def _environment(wait: _Wait) -> Advice:
    env = wait.match[1]
    key = next(
        (name for name in ("batching.max_calls", "num_workers") if lookup(wait.config, f"env.{env}.{name}")),
        "num_workers",
    )
    value = lookup(wait.config, f"env.{env}.{key}")
    if isinstance(value, int):
        return wait.change(f"env.{env}.{key}", value, 2 * value, 0.5, "rollouts wait for this environment")
    return wait.advice(f"env.{env}.{key}: more", 0.5, "rollouts wait for this environment")


def _agent(wait: _Wait) -> Advice:
    env = wait.match[1]
    change = f"env.{env}.timeout_s: shorter, or a faster agent"
    return wait.advice(change, 0.25, "the agent itself takes this long, the engine's answers included")


def _scorer(wait: _Wait) -> Advice:
    scorer = f"scorers.{wait.match[1]}"
    replicas = lookup(wait.config, f"{scorer}.num_replicas")
    key = "limits.max_concurrency" if lookup(wait.config, f"{scorer}.limits") else "batching.max_calls"
    key = f"{scorer}.num_replicas" if isinstance(replicas, int) else f"{scorer}.{key}"
    calls, reason = lookup(wait.config, key), "rollouts that have ended wait for their scores"
    return wait.change(key, calls, 2 * calls, 0.5, reason) if calls else wait.advice(f"{key}: more", 0.5, reason)


def _weight_sync(wait: _Wait) -> Advice:
    prompts = lookup(wait.config, f"{wait.algorithm}.num_prompts_per_step")
    reason = "each step refits the engine; larger steps refit it less often per rollout"
    key = f"{wait.algorithm}.num_prompts_per_step"
    return wait.change(key, prompts, 2 * prompts, 0.5, reason) if prompts else wait.advice("fewer refits", 0.5, reason)


def _checkpointing(wait: _Wait) -> Advice:
    period = lookup(wait.config, "checkpointing.save_period")
    change = f"checkpointing.save_period: {period} -> {2 * period}" if period else "checkpointing.save_period: longer"
    return wait.advice(change, 0.5, "checkpoints are waited for")


def _validation(wait: _Wait) -> Advice:
    if not lookup(wait.config, f"{wait.algorithm}.val_overlap"):
        return wait.advice(f"{wait.algorithm}.val_overlap: true", 0.5, "training waits for validation")
    period = lookup(wait.config, f"{wait.algorithm}.val_period") or 1
    change = f"{wait.algorithm}.val_period: {period} -> {2 * period}"
    return wait.advice(change, 0.5, "training waits for validation")


RULES: tuple[tuple[str, Callable[[_Wait], Advice]], ...] = (
    (re.escape(TAIL), _tail),
    (GENERATION, _generation),
    (r"a slot of (.+) \(max_concurrency\)", _slot),
    (r"environment (.+)", _environment),
    (r"agent (.+)", _agent),
    (r"scorer (.+)", _scorer),
    ("weight_sync", _weight_sync),
    ("checkpointing", _checkpointing),
    ("total_validation_time", _validation),
)


def _on_micro_batches(bubbles: Bubbles, timeline: Timeline, config: Config) -> Iterator[Advice]:
    """Yield the advice of larger micro-batches: they save the fixed time of each, by least squares."""
    fixed_s, largest = fixed_cost(timeline)
    parts = timeline.micro_batches
    if not parts or not timeline.steps:
        return
    num_per_step = len(parts) / len(timeline.steps)
    saved_s = fixed_s * num_per_step * 0.75  # saved by micro-batches of four times the size
    size = lookup(config, "policy.train_micro_batch_size")
    packed = lookup(config, "policy.sequence_packing.enabled")
    change = (
        "policy.sequence_packing.train_mb_tokens: 4 times as many"
        if packed
        else f"policy.train_micro_batch_size: {size} -> {4 * size if isinstance(size, int) else 'more'}"
    )
    reason = f"each of {num_per_step:.0f} micro-batches of at most {largest} tokens takes {fixed_s * 1e3:.1f} ms more"
    values = {"policy.train_micro_batch_size": 4 * size} if isinstance(size, int) and not packed else {}
    seconds = fixed_s * num_per_step
    yield Advice("policy_training", seconds, change, saved_s, reason + " than its tokens need", values)


def fixed_cost(timeline: Timeline) -> tuple[float, int]:
    """Return the seconds that a micro-batch takes whatever its tokens, and the tokens of the largest.

    Fitted as seconds = a + b * tokens; without two sizes a is unknown, and 0.
    """
    points = [(int(s.attributes["num_tokens"]), (s.end_ns - s.start_ns) / 1e9) for s in timeline.micro_batches]
    if len({tokens for tokens, _ in points}) < 2:
        return 0.0, max((tokens for tokens, _ in points), default=0)
    tokens, seconds = zip(*points, strict=True)
    line = statistics.linear_regression(tokens, seconds)
    fixed_s = line.intercept if line.slope > 0 else statistics.fmean(seconds)
    return max(fixed_s, 0.0), max(tokens)


def most_at_once(timeline: Timeline) -> int:
    """Return the most rollouts that waited for the engine at once."""
    return max((count for _, count in open_counts(timeline.generation)), default=0)
