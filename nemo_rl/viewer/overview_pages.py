"""The pages of all runs, of one run and of one collection."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from markupsafe import Markup

from nemo_rl.collect.profile import compute_score
from nemo_rl.collect.table import count_failed_as_wrong
from nemo_rl.collect.task_metrics import default_ks, pass_at_k_of_tasks
from nemo_rl.viewer import charts
from nemo_rl.viewer.charts import ChartLine
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import ALARM_MULT_PROB_ERROR, PAGE_ROWS, Page, finite_mean, histogram_buckets, whole_number
from nemo_rl.viewer.rollout_set import RolloutSet
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources

MAX_STEPS = 400  # rows in the table of a run
MAX_K = 64  # highest k of pass@k
CURVES: tuple[tuple[str, Mapping[str, str], float | None], ...] = (
    (
        "Reward",
        {"train": "train/reward", "validation": "validation/accuracy", "greedy": "validation/greedy_accuracy"},
        None,
    ),
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
PHASE_PREFIX = "timing/train/"


def runs_page(sources: ViewerSources) -> Page:
    rows = []
    for source in sources.in_order():
        reward = source.metrics.series("train/reward") or {}
        accuracy = source.metrics.series("validation/accuracy")
        rollouts = next(iter(source.splits.values()))
        rows.append(
            {
                "source": source,
                "step": max(source.metrics.steps, default=None),
                "rollouts": sum(map(len, source.splits.values())),
                "failed": sum(
                    sum(len(rows) for _, rows in split.select(Query(failure="any"))) for split in source.splits.values()
                ),
                "reward": list(reward.values())[-1] if reward else finite_mean(rollouts.column("reward")),
                "accuracy": list(accuracy.values())[-1] if accuracy else None,
            }
        )
    return Page("runs.html", "Runs", {"rows": rows})


def source_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    """Return the page of a run or of a collection."""
    return _collection_page(source, values) if source.kind == "collection" else _run_page(source, values)


def _run_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    metrics = source.metrics

    def draw(resolve: Callable[[str], str | None], title: str, names: Mapping[str, str], alarm: float | None) -> Markup:
        lines = [ChartLine(label, metrics.series(name)) for label, name in names.items()]
        return charts.line_chart(title, lines, alarm=alarm, link=lambda step: resolve(f"/s/{source.id}/step/{step}"))

    pictures = [
        partial(draw, title=title, names=names, alarm=alarm)
        for title, names, alarm in CURVES
        if any(metrics.series(name) for name in names.values())
    ]
    phases = [
        ChartLine(name.removeprefix(PHASE_PREFIX).replace("_", " "), metrics.series(name))
        for name in sorted(metrics.by_name)
        if name.startswith(PHASE_PREFIX) and not name.endswith("total_step_time")
    ]
    stacked = charts.stacked_chart("Seconds per step, by phase", phases)
    steps = metrics.steps or sorted({int(s) for s in source.split("train").column("step").tolist()})
    shown = steps[-MAX_STEPS:]
    table = [
        (
            step,
            [
                metrics.by_name.get(name, {}).get(step)
                for name in (
                    "train/reward",
                    "validation/accuracy",
                    "train/mean_gen_tokens_per_sample",
                    "train/truncation_rate",
                    "train/loss",
                    "timing/train/total_step_time",
                )
            ],
        )
        for step in reversed(shown)
    ]
    context = {
        "source": source,
        "charts": pictures,
        "phases": stacked,
        "failures": source.failures("train"),
        "steps": table,
        "num_hidden": len(steps) - len(shown),
        "config": source.config_text,
    }
    return Page("run.html", source.id, context, live=source.id)


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
