"""Verdicts on a run: the pathologies that its files show, each with evidence and links to rollouts.

A rule reads the run's metrics and a sample of its rollouts, and returns a finding or None. Rules compare the first with
the last quarter of the steps; a difference counts only if it exceeds twice its standard error.
"""

import math
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from nemo_rl.observability.run_record import read_run_record
from nemo_rl.types import FailureClass
from nemo_rl.viewer.conversation import chains_of, message_text, show
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import ALARM_MULT_PROB_ERROR, Page, address
from nemo_rl.viewer.rollout_set import Key, try_read
from nemo_rl.viewer.viewer_sources import ViewerSource

MIN_STEPS = 12  # fewest steps with a trend
SAMPLE_ROLLOUTS = 256  # rollouts of the last steps whose texts are read
SOLVED = 0.85  # share of the highest reward above which equal rewards and low entropy are no problem
MANY_FAILED = 0.05  # share of all rollouts
REPETITION_RATIO = 6.0  # ratio by which zlib compresses a text; prose: 2 to 3
REPETITION_CHARS = 300
_GARBLED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One verdict. An alarm makes `nemo-rl check` fail."""

    name: str
    severity: Literal["alarm", "warning"]
    evidence: str
    links: tuple[tuple[str, str], ...] = ()  # text, address


@dataclass(frozen=True, slots=True)
class Trend:
    """A metric in the first and in the last quarter of the steps."""

    first: float
    last: float
    error: float  # standard error of the difference, from the scatter of the steps

    @property
    def change(self) -> float:
        return self.last - self.first

    def rises(self, by: float = 0.0) -> bool:
        """Return whether it rose by more than `by` and by more than chance explains."""
        return self.change > max(by, 2 * self.error)


@dataclass
class Evidence:
    """The files of one run, as the rules read them."""

    source: ViewerSource
    _trends: dict[str, Trend | None] = field(default_factory=dict)

    def finite(self, name: str) -> list[float]:
        """Return the finite values of a metric in the order of the steps."""
        return [value for value in self.source.metrics.series(name).values() if math.isfinite(value)]

    def trend(self, name: str) -> Trend | None:
        """Return the trend of a metric; None with fewer than MIN_STEPS values."""
        if name not in self._trends:
            self._trends[name] = _trend(self.finite(name))
        return self._trends[name]

    def last(self, name: str) -> float:
        """Return the median of the last quarter of a metric, of at least three values; NaN without any."""
        values = self.finite(name)
        return statistics.median(values[-max(3, len(values) // 4) :]) if values else math.nan

    @cached_property
    def highest_reward(self) -> float:
        rewards = np.asarray(self.source.split("train").column("reward"), np.float64)
        known = rewards[np.isfinite(rewards)]
        return float(known.max()) if len(known) else max(self.finite("train/reward"), default=math.nan)

    @cached_property
    def is_solved(self) -> bool:
        """Return whether the last rewards are close to the highest one of any rollout."""
        return self.highest_reward > 0 and self.last("train/reward") >= SOLVED * self.highest_reward

    def rollouts_link(self, text: str, **filters: object) -> tuple[str, str]:
        return text, address(f"/s/{self.source.id}/rollouts/train", **filters)

    def rollout_links(self, keys: Sequence[Key], count: int = 3) -> tuple[tuple[str, str], ...]:
        return tuple(
            (f"rollout {file}.{row}", f"/s/{self.source.id}/rollout/train/{file}.{row}") for file, row in keys[:count]
        )

    def sample(self) -> "AnswerSample":
        """Return rollouts of the last steps that did not fail."""
        rollouts = self.source.split("train")
        chosen = rollouts.select(Query(failure="none"))
        keys = [(file, row) for file, rows in chosen for row in rows[-SAMPLE_ROLLOUTS:].tolist()][-SAMPLE_ROLLOUTS:]
        read = [(key, row) for key in keys if (row := try_read(rollouts, key)) is not None]
        return AnswerSample(tuple(key for key, _ in read), tuple(row for _, row in read))


@dataclass(frozen=True)
class AnswerSample:
    """Some rollouts, with the model's answer in each."""

    keys: tuple[Key, ...]
    rows: tuple[Mapping[str, Any], ...]

    @cached_property
    def answers(self) -> list[str]:
        return [
            "\n".join(message_text(m) for m in chains_of(row)[0] if m.get("role") == "assistant") for row in self.rows
        ]

    def keys_with(self, claim: Callable[[str], bool]) -> list[Key]:
        """Return the rollouts whose answer satisfies a claim."""
        return [key for key, answer in zip(self.keys, self.answers, strict=True) if claim(answer)]


def _trend(values: Sequence[float]) -> Trend | None:
    if len(values) < MIN_STEPS:
        return None
    quarter = max(3, len(values) // 4)
    first, last = values[:quarter], values[-quarter:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    return Trend(statistics.fmean(first), statistics.fmean(last), error)


def check(source: ViewerSource) -> list[RunFinding]:
    """Return the findings of a run, alarms first."""
    rules: tuple[Callable[[Evidence], RunFinding | None], ...] = (
        *(
            _ending,
            _no_reward,
            _reward_flat,
            _reward_collapse,
            _groups_without_signal,
            _logprob_error,
            _staleness,
            _truncation,
        ),
        *(
            _turn_limit,
            _length_hacking,
            _entropy_collapse,
            _validation_apart,
            _nonfinite,
            _gradient_explosion,
            _kl_blowup,
        ),
        *(_no_updates, _off_policy, _masked_sequences, _slowing, _dropped_groups),
    )
    evidence = Evidence(source)
    findings = [finding for rule in rules if (finding := rule(evidence)) is not None]
    findings += _failures(evidence) + _texts(evidence)
    return sorted(findings, key=lambda finding: finding.severity)


def check_page(source: ViewerSource) -> Page:
    """Return the page of the findings. Raises DataError for a collection."""
    source.split("train")
    return Page("check.html", f"check · {source.id}", {"source": source, "findings": check(source)})


def _number(value: float) -> str:
    return f"{value:.4g}"


def _ending(evidence: Evidence) -> RunFinding | None:
    """Return a finding if the last start of the run ended by an error, or without a word."""
    record = read_run_record(evidence.source.path)
    last = None if record is None else record.last
    if last is None or last.state not in ("failed", "died"):
        return None
    step = max(evidence.source.metrics.steps, default=0)
    if last.state == "failed":
        return RunFinding("run_failed", "alarm", f"the run ended after step {step}: {last.cause}")
    cause = f"process {last.pid} on {last.host} was killed (by SIGKILL, for memory for example) or its machine stopped"
    return RunFinding("run_died", "alarm", f"the run ended after step {step} without a word: {cause}")


def _no_reward(evidence: Evidence) -> RunFinding | None:
    rewards = evidence.finite("train/reward")
    if len(rewards) < 5 or any(rewards):
        return None
    text = f"every rollout of {len(rewards)} steps has reward 0"
    return RunFinding("reward_zero", "alarm", text, (evidence.rollouts_link("rollouts", sort="-tokens"),))


def _reward_flat(evidence: Evidence) -> RunFinding | None:
    trend = evidence.trend("train/reward")
    if trend is None or evidence.is_solved or not any(evidence.finite("train/reward")):
        return None
    spread = evidence.highest_reward or 1.0
    validation = evidence.finite("validation/reward")
    if len(validation) > 1 and validation[-1] - validation[0] > 0.02:
        return None
    if abs(trend.change) > max(2 * trend.error, 0.01 * abs(spread)):
        return None
    text = f"mean reward {_number(trend.first)} in the first and {_number(trend.last)} in the last quarter of the steps"
    return RunFinding("reward_flat", "alarm", text)


def _reward_collapse(evidence: Evidence) -> RunFinding | None:
    values = evidence.finite("train/reward")
    if len(values) < MIN_STEPS:
        return None
    width = max(3, len(values) // 8)
    means = [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
    best, last = max(means), means[-1]
    lost = best - last
    if lost <= 0.4 * max(abs(best), 1e-9) or lost <= 3 * statistics.stdev(values[-width:]) / math.sqrt(width):
        return None
    at = list(evidence.source.metrics.series("train/reward"))[means.index(best)]
    text = f"mean reward fell from {_number(best)} (around step {at}) to {_number(last)}"
    return RunFinding("reward_collapse", "alarm", text, ((f"step {at}", f"/s/{evidence.source.id}/step/{at}"),))


def _groups_without_signal(evidence: Evidence) -> RunFinding | None:
    rollouts = evidence.source.split("train")
    step, group, reward = (rollouts.column(name) for name in ("step", "group", "reward"))
    known = np.isfinite(reward)
    steps = np.unique(step[known])
    if evidence.is_solved or len(steps) < 3:
        return None
    known &= step >= steps[-max(1, len(steps) // 4)]
    ids = (step[known].astype(np.int64) << 32) | group[known]
    _, row, counts = np.unique(ids, return_inverse=True, return_counts=True)
    low, high = np.full(len(counts), np.inf), np.full(len(counts), -np.inf)
    np.minimum.at(low, row, reward[known])
    np.maximum.at(high, row, reward[known])
    several = counts > 1
    share = float((low == high)[several].mean()) if several.sum() >= 8 else 0.0
    if share < 0.8:
        return None
    text = f"in {share:.0%} of the last {int(several.sum())} groups all rewards are equal: no gradient comes from them"
    return RunFinding("groups_without_signal", "alarm", text, (evidence.rollouts_link("last rollouts", sort="-step"),))


def _logprob_error(evidence: Evidence) -> RunFinding | None:
    last = evidence.last("train/token_mult_prob_error")
    if not last > ALARM_MULT_PROB_ERROR:
        return None
    text = f"train/token_mult_prob_error is {_number(last)}, above {ALARM_MULT_PROB_ERROR}: engine and policy disagree"
    return RunFinding("logprob_error", "alarm", text)


def _staleness(evidence: Evidence) -> RunFinding | None:
    trend = evidence.trend("train/avg_trajectory_age")
    if trend is None or not trend.rises(by=max(1.0, trend.first)):
        return None
    text = f"the mean age of the rollouts grew from {_number(trend.first)} to {_number(trend.last)} steps"
    return RunFinding("staleness_growing", "alarm", text)


def _truncation(evidence: Evidence) -> RunFinding | None:
    last = evidence.last("train/truncation_rate")
    if not last > 0.3:
        return None
    text = f"{last:.0%} of the last rollouts are cut by a token limit"
    return RunFinding(
        "truncation", "alarm", text, (evidence.rollouts_link("longest", stop="truncated", sort="-tokens"),)
    )


def _turn_limit(evidence: Evidence) -> RunFinding | None:
    last = evidence.last("train/max_turns_reached_rate")
    if not last > 0.5:
        return None
    text = f"{last:.0%} of the last rollouts use all their turns without an end (grpo.max_rollout_turns)"
    return RunFinding("turn_limit", "alarm", text, (evidence.rollouts_link("rollouts", stop="max_turns"),))


def _length_hacking(evidence: Evidence) -> RunFinding | None:
    length, reward = evidence.trend("train/mean_gen_tokens_per_sample"), evidence.trend("train/reward")
    if length is None or not (length.last > 2 * length.first and length.rises(by=20)):
        return None
    validation = evidence.finite("validation/reward")
    gained = validation[-1] - validation[0] > 0.02 if len(validation) > 1 else reward is not None and reward.rises()
    if gained:
        return None
    what = "the validation reward" if len(validation) > 1 else "the reward"
    text = f"answers grew from {_number(length.first)} to {_number(length.last)} tokens, and {what} did not improve"
    return RunFinding("length_hacking", "alarm", text, (evidence.rollouts_link("longest", sort="-tokens"),))


def _entropy_collapse(evidence: Evidence) -> RunFinding | None:
    trend = evidence.trend("train/approx_entropy")
    if trend is None or evidence.is_solved or not (trend.first > 0 and trend.last < 0.1 * trend.first):
        return None
    text = f"entropy fell from {_number(trend.first)} to {_number(trend.last)} before the task was solved"
    return RunFinding("entropy_collapse", "alarm", text)


def _validation_apart(evidence: Evidence) -> RunFinding | None:
    trend, validation = evidence.trend("train/reward"), evidence.finite("validation/reward")
    if trend is None or len(validation) < 3 or not trend.rises(by=0.02):
        return None
    best, last = max(validation), validation[-1]
    num_rollouts = len(evidence.source.split("validation")) / len(validation)
    noise = math.sqrt(0.5 / max(num_rollouts, 16))  # upper bound for a difference of two shares
    if best - last <= max(0.05, 2 * noise):
        return None
    fall = f"validation reward fell from {_number(best)} to {_number(last)}"
    text = f"training reward rose to {_number(trend.last)}, {fall}"
    return RunFinding("validation_apart", "alarm", text, (("validation", f"/s/{evidence.source.id}/validation"),))


def _nonfinite(evidence: Evidence) -> RunFinding | None:
    metrics = evidence.source.metrics
    bad = {
        step: name
        for name in ("train/loss", "train/grad_norm", "train/reward")
        for step, value in metrics.series(name).items()
        if not math.isfinite(value)
    }
    skipped = {
        step: name
        for name in ("train/skipped_steps/nonfinite_loss", "train/skipped_steps/nonfinite_gradient")
        for step, value in metrics.series(name).items()
        if value > 0
    }
    if not (found := bad | skipped):
        return None
    step = min(found)
    text = f"{len(found)} steps with a loss or gradient that is not finite, the first is step {step} ({found[step]})"
    return RunFinding("nonfinite", "alarm", text, ((f"step {step}", f"/s/{evidence.source.id}/step/{step}"),))


def _explodes(evidence: Evidence, metric: str, floor: float, name: str, what: str) -> RunFinding | None:
    """Compare the last steps with the first half: ten times as much, and above the floor."""
    values = evidence.finite(metric)
    if len(values) < MIN_STEPS:
        return None
    usual, last = statistics.median(values[: len(values) // 2]), statistics.median(values[-max(3, len(values) // 8) :])
    if last <= max(10 * usual, floor):
        return None
    return RunFinding(name, "alarm", f"{what} grew from {_number(usual)} to {_number(last)}")


def _gradient_explosion(evidence: Evidence) -> RunFinding | None:
    return _explodes(evidence, "train/grad_norm", 1e-6, "gradient_explosion", "the gradient norm")


def _kl_blowup(evidence: Evidence) -> RunFinding | None:
    return _explodes(evidence, "train/kl_penalty", 1.0, "kl_blowup", "the KL from the reference")


def _no_updates(evidence: Evidence) -> RunFinding | None:
    for name in ("train/lr", "train/grad_norm"):
        values = evidence.source.metrics.series(name)
        late = list(values.values())[len(values) // 2 :]
        is_done = name == "train/grad_norm" and evidence.is_solved  # equal rewards of solved groups give no gradient
        if len(values) >= 6 and not any(late) and not is_done:
            return RunFinding("no_updates", "alarm", f"{name} is 0 in the last {len(late)} steps: nothing is learnt")
    skipped, steps = evidence.finite("train/num_skipped_steps"), evidence.finite("train/num_optimizer_steps")
    if len(skipped) >= 6 and len(steps) == len(skipped) and sum(skipped) > 0.5 * (sum(steps) + sum(skipped)):
        return RunFinding(
            "no_updates", "alarm", f"{sum(skipped):.0f} optimizer steps were skipped, {sum(steps):.0f} taken"
        )
    return None


def _off_policy(evidence: Evidence) -> RunFinding | None:
    clamped = evidence.last("train/is_oob_ratio")
    if not clamped > 0.3:
        return None
    return RunFinding(
        "off_policy", "alarm", f"{clamped:.0%} of the importance weights are clamped (train/is_oob_ratio)"
    )


def _masked_sequences(evidence: Evidence) -> RunFinding | None:
    masked, valid = evidence.last("train/num_masked_seqs_by_logprob_error"), evidence.last("train/num_valid_samples")
    if not masked > 0.2 * (masked + valid):
        return None
    text = f"{_number(masked)} of {_number(masked + valid)} samples a step get no gradient: their log-probs disagree"
    return RunFinding("masked_sequences", "alarm", text)


def _slowing(evidence: Evidence) -> RunFinding | None:
    trend = evidence.trend("timing/train/total_step_time")
    if trend is None or not (trend.last > 3 * trend.first and trend.rises(by=1.0)):
        return None
    text = f"a step took {_number(trend.first)} s in the first and {_number(trend.last)} s in the last quarter"
    return RunFinding("slowing_down", "warning", text)


def _dropped_groups(evidence: Evidence) -> RunFinding | None:
    dropped = evidence.last("train/replay_buffer/dropped_groups")
    if not dropped >= 1:
        return None
    text = f"{_number(dropped)} groups a step are dropped as too old or late (train/replay_buffer/dropped_groups)"
    return RunFinding("dropped_groups", "warning", text)


def _failures(evidence: Evidence) -> list[RunFinding]:
    """Return a finding for each class of failures: an alarm above 5% of all rollouts."""
    rollouts = evidence.source.split("train")
    total, findings = len(rollouts), []
    for kind in FailureClass:
        if kind is FailureClass.CANCELLED:
            continue
        keys, count = rollouts.keys(Query(failure=kind), limit=1)
        if not count:
            continue
        row = try_read(rollouts, keys[0]) or {}
        cause = show(str((row.get("failure") or {}).get("cause", "")))[:300]
        severity = "alarm" if count > MANY_FAILED * total else "warning"
        text = f"{count} of {total} rollouts failed; the first: {cause}"
        links = (evidence.rollouts_link("all of them", failure=kind.value), *evidence.rollout_links(keys))
        findings.append(RunFinding(f"failures_{kind.value}", severity, text, links))
    return findings


def _texts(evidence: Evidence) -> list[RunFinding]:
    sample = evidence.sample()
    if len(sample.rows) < 16:
        return []
    rules = (
        ("repetition", 0.1, "repeat themselves", _repeats),
        ("empty_answers", 0.1, "are empty", lambda answer: not answer.strip()),
        ("garbled_answers", 0.1, "are full of control and replacement characters", _is_garbled),
    )
    findings = [
        RunFinding(
            name, "alarm", f"{len(keys)} of the last {len(sample.rows)} answers {what}", evidence.rollout_links(keys)
        )
        for name, share, what, claim in rules
        if len(keys := sample.keys_with(claim)) > share * len(sample.rows)
    ]
    return findings + _copies(evidence, sample) + _identical(evidence, sample)


def _copies(evidence: Evidence, sample: AnswerSample) -> list[RunFinding]:
    asked = [message_text(chains_of(row)[0][0]) if chains_of(row)[0] else "" for row in sample.rows]
    keys = [
        key
        for key, prompt, answer in zip(sample.keys, asked, sample.answers, strict=True)
        if len(prompt) >= 40 and prompt.strip() in answer
    ]
    if len(keys) <= 0.5 * len(sample.rows):
        return []
    text = f"{len(keys)} of the last {len(sample.rows)} answers repeat the whole prompt"
    return [RunFinding("prompt_copied", "alarm", text, evidence.rollout_links(keys))]


def _identical(evidence: Evidence, sample: AnswerSample) -> list[RunFinding]:
    """Return a finding if rollouts of different prompts give the same answer."""
    if evidence.is_solved:
        return []
    (answer, count), *_ = Counter(sample.answers).most_common(1)
    prompts = {
        str(row.get("prompt_id")) for row, said in zip(sample.rows, sample.answers, strict=True) if said == answer
    }
    if len(prompts) < 3 or count <= 0.5 * len(sample.rows) or not answer.strip():
        return []
    said = f"are the same: {show(answer)[:120]!r}"
    text = f"{count} of the last {len(sample.rows)} answers, to {len(prompts)} prompts, {said}"
    return [
        RunFinding(
            "identical_answers", "alarm", text, evidence.rollout_links(sample.keys_with(lambda said: said == answer))
        )
    ]


def _repeats(answer: str) -> bool:
    data = answer.encode(errors="replace")[:20_000]
    return len(data) >= REPETITION_CHARS and len(data) / len(zlib.compress(data, 6)) > REPETITION_RATIO


def _is_garbled(answer: str) -> bool:
    return len(answer) >= 10 and len(_GARBLED.findall(answer[:5000])) > 0.2 * min(len(answer), 5000)
