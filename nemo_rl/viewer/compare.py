"""Two or more runs, or collections, against the first: configuration, curves, and paired differences with intervals."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import yaml

from nemo_rl.collect import profile as profiles
from nemo_rl.collect import profile_comparison
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.viewer import charts
from nemo_rl.viewer.charts import ChartLine
from nemo_rl.viewer.conversation import show
from nemo_rl.viewer.page import Page
from nemo_rl.viewer.viewer_sources import ViewerSource

CONFIDENCE_Z = 1.959964  # bounds the middle 95% of a normal distribution
SMALL_QUANTILES = (12.7062, 4.30265, 3.18245, 2.77645)  # 97.5% of Student's t with 1 to 4 degrees of freedom
MAX_CONFIG_DIFFERENCES = 500
METRICS = (
    *("train/reward", "validation/reward", "validation/greedy_reward", "validation/accuracy"),
    *("validation/greedy_accuracy", "train/mean_gen_tokens_per_sample", "train/truncation_rate"),
    *("train/approx_entropy", "train/token_mult_prob_error", "train/loss"),
    *("train/grad_norm", "timing/train/total_step_time", "performance/tokens_per_sec"),
)


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """One quantity of the first and of another source, and the mean of their paired differences."""

    other: str
    quantity: str
    first: float | None
    second: float | None
    difference: float | None  # second - first
    low: float | None  # lower end of the 95% interval of the difference
    high: float | None
    num_pairs: int  # steps, prompts or tasks that both have

    @property
    def is_significant(self) -> bool:
        """Return whether the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The comparison of some sources with the first of them."""

    names: tuple[str, ...]
    config: tuple[tuple[str, tuple[str, ...]], ...]  # key, its value in each source
    differences: tuple[PairedDifference, ...]


def compare(sources: Sequence[ViewerSource]) -> RunComparison:
    """Compare each source with the first. Raises ConfigError for fewer than two, or runs with collections."""
    if len(sources) < 2:
        raise ConfigError("RUN", [source.id for source in sources], "needs two or more to compare")
    if len({source.kind for source in sources}) > 1:
        kinds = ", ".join(f"{source.id} is a {source.kind}" for source in sources)
        raise ConfigError("RUN", kinds, "runs are compared with runs, collections with collections")
    first, *others = sources
    compared = _compare_collections if first.kind == "collection" else _compare_runs
    differences = [difference for other in others for difference in compared(first, other)]
    return RunComparison(tuple(s.id for s in sources), tuple(_config_differences(sources)), tuple(differences))


def paired_interval(differences: Any) -> tuple[float | None, float | None, float | None]:
    """Return the mean of paired differences and the ends of its 95% interval (Student's t); None if unknown.

    Example: 1, 2, 3 have mean 2 and standard error 0.577; t of 2 degrees of freedom is 4.303: -0.484 to 4.484.
    """
    score = profiles.compute_score(np.asarray(differences, np.float64))
    if score.mean is None or score.standard_error is None:
        return score.mean, None, None
    half = student_quantile(score.num_tasks - 1) * score.standard_error
    return score.mean, score.mean - half, score.mean + half


def student_quantile(degrees: int) -> float:
    """Return the 97.5% quantile of Student's t.

    Up to 4 degrees from the table; above by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5), which
    is off by less than 0.02%.
    """
    if degrees <= len(SMALL_QUANTILES):
        return SMALL_QUANTILES[max(degrees, 1) - 1]
    z, n = CONFIDENCE_Z, degrees
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n**power for power, term in enumerate(terms, start=1))


def _compare_runs(first: ViewerSource, second: ViewerSource) -> Iterator[PairedDifference]:
    for name in METRICS:
        a, b = first.metrics.series(name), second.metrics.series(name)
        steps = [s for s in a if s in b and math.isfinite(a[s]) and math.isfinite(b[s])]
        if steps:
            yield _paired(second.id, name, [a[s] for s in steps], [b[s] for s in steps])
    for split in ("validation", "train"):
        yield from _compare_prompts(first, second, split)


def _compare_prompts(first: ViewerSource, second: ViewerSource, split: str) -> Iterator[PairedDifference]:
    """Yield the differences of prompts that both have, at the last common validation, or over all of training."""
    tables = [_prompt_rewards(source, split) for source in (first, second)]
    common = sorted(set(tables[0]) & set(tables[1]))
    label = "all steps"
    if split == "validation":
        last = max((step for step, _, _ in common), default=None)
        common = [key for key in common if key[0] == last]
        label = f"step {last}"
    envs = sorted({env for _, env, _ in common})
    for env in ["", *(envs if len(envs) > 1 else [])]:
        keys = [key for key in common if not env or key[1] == env]
        if keys:
            name = f"{split} prompts, {label}" + (f", env/{show(env)[:60]}" if env else "")
            yield _paired(second.id, name, [tables[0][k] for k in keys], [tables[1][k] for k in keys])


def _prompt_rewards(source: ViewerSource, split: str) -> dict[tuple[int, str, int], float]:
    """Return the mean reward by step (0 for all of training), environment and prompt."""
    sums: dict[tuple[int, str, int], list[float]] = {}
    for index in source.split(split).indexes:
        columns = index.columns
        known = np.isfinite(columns["reward"])
        steps = columns["step"] if split == "validation" else np.zeros(len(columns), np.int32)
        names = {number: index.name_of("env", number) for number in np.unique(columns["env"]).tolist()}
        for step, env, prompt, reward in zip(
            *(values[known].tolist() for values in (steps, columns["env"], columns["prompt"], columns["reward"])),
            strict=True,
        ):
            total = sums.setdefault((step, names[env], prompt), [0.0, 0.0])
            total[0] += reward
            total[1] += 1
    return {key: total / count for key, (total, count) in sums.items()}


def _paired(other: str, quantity: str, first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    mean, low, high = paired_interval(b - a)
    return PairedDifference(other, quantity, float(a.mean()), float(b.mean()), mean, low, high, len(a))


def _compare_collections(first: ViewerSource, second: ViewerSource) -> Iterator[PairedDifference]:
    measured = [profiles.profile(source.path) for source in (first, second)]
    result = profile_comparison.compare(*measured)
    for each in result.differences:
        count = _num_tasks(measured, each.dataset, each.quantity, result.are_paired)
        error, low, high = each.standard_error, None, None
        if each.difference is not None and error is not None:
            half = student_quantile(max(1, count - 1)) * error
            low, high = each.difference - half, each.difference + half
        name = each.quantity if each.dataset == profiles.ALL_DATASETS else f"{each.quantity}, {show(each.dataset)[:60]}"
        yield PairedDifference(second.id, name, each.first, each.second, each.difference, low, high, count)


def _num_tasks(measured: Sequence[profiles.Profile], dataset: str, quantity: str, are_paired: bool) -> int:
    values = [profile.quantities[quantity][profile.task_indices(dataset)] for profile in measured]
    known = [~np.isnan(each) for each in values]
    return int((known[0] & known[1]).sum()) if are_paired else int(min(each.sum() for each in known))


def _config_differences(sources: Sequence[ViewerSource]) -> list[tuple[str, tuple[str, ...]]]:
    flat = [dict(_flatten(_load_config(source))) for source in sources]
    keys = sorted({key for values in flat for key in values})
    rows = [(key, tuple(show(values.get(key, "–"))[:300] for values in flat)) for key in keys]
    return [row for row in rows if len(set(row[1])) > 1][:MAX_CONFIG_DIFFERENCES]


def _load_config(source: ViewerSource) -> object:
    try:
        return yaml.safe_load(source.config_text)
    except (yaml.YAMLError, RecursionError) as error:
        raise DataError(f"{source.path}: its configuration cannot be read: {str(error).splitlines()[0]}") from error


def _flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def compare_page(sources: Sequence[ViewerSource]) -> Page:
    """Return the page of a comparison, with the curves over each other."""
    result = compare(sources)
    pictures = [
        charts.line_chart(name, [ChartLine(source.id, source.metrics.series(name)) for source in sources])
        for name in METRICS
        if sum(bool(source.metrics.series(name)) for source in sources) > 1
    ]
    context = {"result": result, "sources": sources, "charts": [picture for picture in pictures if picture]}
    return Page("compare.html", " and ".join(result.names), context)


def to_dict(result: RunComparison) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    return {
        "names": list(result.names),
        "config": {key: list(values) for key, values in result.config},
        "differences": [asdict(d) | {"is_significant": d.is_significant} for d in result.differences],
    }
