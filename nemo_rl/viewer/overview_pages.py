"""The pages of one run and of one collection."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from nemo_rl.collect.profile import compute_score
from nemo_rl.collect.table import count_failed_as_wrong
from nemo_rl.collect.task_metrics import default_ks, pass_at_k_of_tasks
from nemo_rl.viewer import charts
from nemo_rl.viewer.chart_pages import Drawing, Resolve, chart_address
from nemo_rl.viewer.charts import ChartLine, ChartView
from nemo_rl.viewer.check import check
from nemo_rl.viewer.distributions import distribution_charts
from nemo_rl.viewer.page import ALARM_MULT_PROB_ERROR, PAGE_ROWS, Page, histogram_buckets, whole_number
from nemo_rl.viewer.rollout_set import RolloutSet
from nemo_rl.viewer.run_summary import summarize
from nemo_rl.viewer.timeline_page import has_timeline
from nemo_rl.viewer.viewer_sources import ViewerSource

MAX_K = 64  # highest k of pass@k
CURVES: tuple[tuple[str, Mapping[str, str], float | None], ...] = (
    (
        "Reward",
        {"train": "train/reward", "validation": "validation/reward", "greedy": "validation/greedy_reward"},
        None,
    ),
    ("Accuracy", {"validation": "validation/accuracy", "greedy": "validation/greedy_accuracy"}, None),
    (
        "Response length (tokens)",
        {"mean": "train/mean_gen_tokens_per_sample", "longest": "train/max_gen_tokens_per_sample"},
        None,
    ),
    ("Truncated share", {"truncated": "train/truncation_rate", "turn limit": "train/max_turns_reached_rate"}, None),
    ("Log-prob error against the engine", {"mean of exp|Δ|": "train/token_mult_prob_error"}, ALARM_MULT_PROB_ERROR),
    ("Entropy", {"entropy": "train/approx_entropy"}, None),
    ("Loss", {"loss": "train/loss", "validation": "validation/loss"}, None),
    ("Gradient norm", {"norm": "train/grad_norm"}, None),
    ("Age of the rollouts (steps)", {"mean": "train/avg_trajectory_age", "highest": "train/max_trajectory_age"}, None),
    ("KL from the reference", {"KL": "train/kl_penalty"}, None),
)
STEP_COLUMNS = {
    "reward": "train/reward",
    "accuracy": "validation/accuracy",
    "tokens": "train/mean_gen_tokens_per_sample",
    "truncated": "train/truncation_rate",
    "loss": "train/loss",
    "seconds": "timing/train/total_step_time",
}
ENDINGS = ("run_failed", "run_died")  # findings that the head of the page tells
PHASE_PREFIX = "timing/train/"


def source_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    return _collection_page(source, values) if source.kind == "collection" else _run_page(source, values)


def _run_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    steps = source.metrics.steps or sorted({int(s) for s in source.split("train").column("step").tolist()})
    newest_first, start = steps[::-1], whole_number(values.get("start"))
    context = {
        "source": source,
        "run": summarize(source),
        "last_step": steps[-1] if steps else 0,
        "findings": [each for each in source.remember("findings", lambda: check(source)) if each.name not in ENDINGS],
        "charts": [*_curves(source), *_phases(source)],
        "distributions": source.remember("distributions", lambda: distribution_charts(source.split("train"))),
        "failures": source.failures("train"),
        "columns": STEP_COLUMNS,
        "steps": [
            (step, [source.metrics.by_name.get(name, {}).get(step) for name in STEP_COLUMNS.values()])
            for step in newest_first[start : start + PAGE_ROWS]
        ],
        "num_steps": len(steps),
        "start": start,
        "page_rows": PAGE_ROWS,
        "config": source.config_text,
        "has_timeline": has_timeline(source),
    }
    return Page("run.html", source.id, context, live=source.id)


def _curves(source: ViewerSource) -> list[Drawing]:
    """Return the usual charts, those that have data."""
    metrics = source.metrics

    def draw(resolve: Resolve, title: str, names: Mapping[str, str], alarm: float | None) -> Markup:
        lines = [ChartLine(label, metrics.series(name)) for label, name in names.items()]
        full_size = resolve(chart_address([source.id], list(names.values()), together=1 if len(names) > 1 else None))
        link = partial(_step_link, resolve, source.id)
        return charts.line_chart(title, lines, alarm=alarm, link=link, view=ChartView(full_size=full_size))

    return [
        partial(draw, title=title, names=names, alarm=alarm)
        for title, names, alarm in CURVES
        if any(metrics.series(name) for name in names.values())
    ]


def _step_link(resolve: Resolve, source_id: str, step: int) -> str | None:
    return resolve(f"/s/{source_id}/step/{step}")


def _phases(source: ViewerSource) -> list[Drawing]:
    """Return the chart of the seconds of a step by phase, if there are any."""
    phases = [
        ChartLine(name.removeprefix(PHASE_PREFIX).replace("_", " "), source.metrics.series(name))
        for name in sorted(source.metrics.by_name)
        if name.startswith(PHASE_PREFIX) and not name.endswith("total_step_time")
    ]

    def draw(resolve: Resolve) -> Markup:
        full_size = resolve(chart_address([source.id], [f"{PHASE_PREFIX}*"]))
        return charts.stacked_chart("Seconds per step, by phase", phases, view=ChartView(full_size=full_size))

    return [draw] if phases else []


def _collection_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    tasks, rewards, is_failed = task_rewards(source.split("rollouts"), source.failed)
    counted = count_failed_as_wrong(rewards, is_failed)
    order, means = values.get("sort", ""), mean_rewards(counted)
    ranks = np.argsort(means if order == "reward" else -means if order == "-reward" else tasks, kind="stable")
    start = whole_number(values.get("start"))
    context = {
        "source": source,
        "summary": score_rows(rewards, counted),
        "num_failed": int(is_failed.sum()),
        "histogram": charts.histogram("Tasks by mean reward", histogram_buckets(means)),
        "tasks": [
            {
                "task": int(tasks[i]),
                "mean": means[i],
                "best": np.nanmax(counted[i]),
                "rewards": list(zip(rewards[i].tolist(), is_failed[i].tolist(), strict=True)),
            }
            for i in ranks[start : start + PAGE_ROWS]
            if not np.isnan(means[i])
        ],
        "num_tasks": len(tasks),
        "start": start,
        "sort": order,
        "attempts": source.failed_attempts(limit=100),
        "config": source.config_text,
    }
    return Page("collection.html", source.id, context, live=source.id)


def score_rows(rewards: Any, counted: Any) -> list[tuple[str, float | None, float | None, int]]:
    """Return name, mean, standard error and number of tasks of the reward [T, N], and of pass@k of `counted` rewards.

    `counted` has failed rollouts as wrong answers. NaN: missing.
    """
    if not rewards.size:
        return []
    scores = {f"pass@{k}": pass_at_k_of_tasks(counted, k) for k in default_ks(min(MAX_K, rewards.shape[1]))}
    measured = {
        name: compute_score(values) for name, values in {"mean reward": mean_rewards(rewards), **scores}.items()
    }
    return [(name, score.mean, score.standard_error, score.num_tasks) for name, score in measured.items()]


def mean_rewards(rewards: Any) -> Any:
    """Return the mean reward of each task [T] from [T, N] (NaN: missing); NaN for a task without any."""
    with np.errstate(invalid="ignore"):
        return np.nansum(rewards, axis=1) / (~np.isnan(rewards)).sum(axis=1)


def task_rewards(rollouts: RolloutSet, failed: RolloutSet) -> tuple[Any, Any, Any]:
    """Return the tasks of a collection, their rewards [T, N] (NaN: none), and which rollouts [T, N] only failed."""
    reward, keys = rollouts.column("reward"), ("task_index", "seed", "generation")
    columns = [np.concatenate([each.column(name) for each in (rollouts, failed)]) for name in keys]
    (tasks, row), (seeds, seed), (repeats, repeat) = (np.unique(column, return_inverse=True) for column in columns)
    column, shape = seed * len(repeats) + repeat, (len(tasks), len(seeds) * len(repeats))
    rewards, is_failed = np.full(shape, np.nan), np.zeros(shape, np.bool_)
    is_failed[row[len(reward) :], column[len(reward) :]] = True
    is_failed[row[: len(reward)], column[: len(reward)]] = False
    rewards[row[: len(reward)], column[: len(reward)]] = reward
    return tasks, rewards, is_failed
