"""Profiles and comparisons as terminal tables, JSON and plots."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nemo_rl.collect.profile import Profile, Summary, iter_task_rows
from nemo_rl.collect.profile_comparison import ProfileComparison
from nemo_rl.collect.rollout_files import atomic_write
from nemo_rl.collect.shards import OverlongInput
from nemo_rl.collect.task_metrics import Floats
from nemo_rl.experience.rollout_rows import encode_json_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "profile.png"
PROFILE_FILE = "profile.json"
TASKS_PROFILE_FILE = "profile_tasks.jsonl"
NUM_BINS = 20
LOG_COLUMNS = 160  # table width if the output is not a terminal


def write_plot(profile: Profile, path: Path) -> None:
    """Plot four panels to a PNG file. Needs no display, and leaves matplotlib's settings alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)
    (top_left, top_right), (bottom_left, bottom_right) = figure.subplots(2, 2)
    _plot_histogram(top_left, profile.measures.reward.mean, "mean reward of a task")
    _plot_reward_shares(top_right, profile)
    _plot_over_k(bottom_left, profile)
    _plot_histogram(bottom_right, profile.measures.tokens.mean, "mean generated tokens of a task")
    whole = profile.summaries[0]
    figure.suptitle(f"{whole.num_tasks} tasks, {whole.num_rollouts} rollouts, {whole.missing} missing")
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=120)


def _plot_histogram(axes: "Axes", values: Floats, label: str) -> None:
    values = values[~np.isnan(values)]
    if len(values):
        axes.hist(values, bins=NUM_BINS)
    axes.set_xlabel(label)
    axes.set_ylabel("tasks")


def _plot_reward_shares(axes: "Axes", profile: Profile) -> None:
    for summary in profile.summaries:
        means = np.sort(profile.measures.reward.mean[profile.task_indices(summary.dataset)])
        means = means[~np.isnan(means)]
        if len(means):
            axes.step(means, 1 - np.arange(len(means)) / len(means), where="pre", label=summary.dataset)
    axes.set_xlabel("mean reward")
    axes.set_ylabel("share of tasks at it or above")
    axes.set_ylim(0, 1.02)
    _add_legend(axes)


def _plot_over_k(axes: "Axes", profile: Profile) -> None:
    for color_index, summary in enumerate(profile.summaries):
        for kind, style in (("pass", "o-"), ("majority", "s--")):
            if points := _scores_by_k(summary, kind):
                axes.plot(
                    *zip(*points, strict=True), style, color=f"C{color_index}", label=f"{kind}@k, {summary.dataset}"
                )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("k")
    axes.set_ylabel("mean over tasks")
    _add_legend(axes)


def _scores_by_k(summary: Summary, kind: str) -> list[tuple[int, float]]:
    """Return (k, mean) of pass@k or majority@k; k = 1 is pass@1."""
    means = {}
    for name, score in summary.scores.items():
        if match := re.fullmatch(rf"{kind}@(\d+)|pass@1\[.*", name):
            means[int(match[1] or 1)] = score.mean
    points = sorted((k, mean) for k, mean in means.items() if mean is not None)
    return points if len(means) > 1 else []


def _add_legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def profile_to_dict(profile: Profile) -> dict[str, Any]:
    """Return a profile as plain values, without its tasks."""
    manifest = profile.table.manifest
    return {
        "seeds": list(manifest.seeds),
        "num_repeats": manifest.num_repeats,
        "stop_reasons": dict(profile.table.stop_reasons),
        "failed_attempts": dict(profile.table.failed_attempts),
        "datasets": [
            {**asdict(summary), "thresholds": {f"{limit:g}": share for limit, share in summary.thresholds.items()}}
            for summary in profile.summaries
        ],
        "run": manifest.run,
    }


def write_profile(profile: Profile, directory: Path) -> None:
    """Write `profile.json`, and `profile_tasks.jsonl` with a line for each task."""
    write_json(profile_to_dict(profile), directory / PROFILE_FILE)
    with atomic_write(directory / TASKS_PROFILE_FILE) as file:
        for row in iter_task_rows(profile):
            file.write(encode_json_line(row))


def write_json(values: Mapping[str, Any], path: Path) -> None:
    """Write a file of indented JSON atomically."""
    with atomic_write(path) as file:
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        file.write(text.encode("utf-8", errors="backslashreplace"))


def open_report_console() -> Console:
    """Return a console on stdout for tables: as wide as the terminal, or `LOG_COLUMNS` in a log."""
    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else LOG_COLUMNS)


def summary_table(profile: Profile) -> Table:
    """Tabulate quantities (rows) by dataset (columns): means over tasks, with the standard error of the mean.

    Stop reasons and failed attempts are counted over all datasets.
    """
    is_partial = any(score.num_tasks < s.num_tasks for s in profile.summaries for score in s.scores.values())
    caption = "in brackets: how many tasks have rollouts enough, where not all have" if is_partial else None
    table = Table(title=escape(str(profile.directory)), caption=caption)
    table.add_column("")
    for summary in profile.summaries:
        table.add_column(escape(summary.dataset) or "(no name)", justify="right")
    for name, values in _summary_rows(profile.summaries):
        table.add_row(escape(name), *values)
    if (overlong := OverlongInput.of_run(profile.table.manifest.run)) is not None:
        fate = "left out" if overlong.treatment == "drop" else "wrong answers"
        table.add_row(f"over-long prompts, {fate}", str(sum(overlong.num_prompts.values())))
    for title, counts in (("ended", profile.table.stop_reasons), ("failed", profile.table.failed_attempts)):
        for name, count in counts.items():
            table.add_row(escape(f"{title}: {name}"), str(count))
    return table


def comparison_table(comparison: ProfileComparison, first: str, second: str) -> Table:
    """Tabulate differences by dataset and quantity; `first` and `second` are paths or names of the collections."""
    how = "task by task" if comparison.are_paired else "of means: the tasks are not the same"
    table = Table(title=escape(f"{second} against {first}, differences {how}"))
    for name in ("dataset", "quantity"):
        table.add_column(name)
    for name in (*_strip_common_prefix(first, second), "difference", "better", "worse"):
        table.add_column(escape(name), justify="right", overflow="fold")
    for row in comparison.differences:
        counts = (row.num_better, row.num_worse)
        numbers = [
            _format_value(row.quantity, row.first),
            _format_value(row.quantity, row.second),
            _format_value(row.quantity, row.difference, row.standard_error, sign="+"),
            *("" if count is None or row.quantity == "tokens" else str(count) for count in counts),
        ]
        table.add_row(escape(row.dataset), escape(row.quantity), *numbers)
    return table


def _strip_common_prefix(first: str, second: str) -> tuple[str, str]:
    """Remove the parent directories that both share.

    Example: runs/a/step_5 and runs/a/step_9 give step_5 and step_9.
    """
    one, other = first.split("/"), second.split("/")
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one[:-1], other[:-1], strict=False)))
    return "/".join(one[shared:]), "/".join(other[shared:])


def _summary_rows(summaries: Sequence[Summary]) -> Sequence[tuple[str, list[str]]]:
    rows = [
        ("tasks", [str(s.num_tasks) for s in summaries]),
        ("rollouts", [str(s.num_rollouts) for s in summaries]),
        ("missing", [str(s.missing) for s in summaries]),
    ]
    if summaries[0].num_failed:
        rows.append(("failed, wrong in pass@k", [str(s.num_failed) for s in summaries]))
    for name in summaries[0].scores:
        rows.append((name, [_format_score(name, summary) for summary in summaries]))
    for limit in summaries[0].thresholds:
        shares = [summary.thresholds.get(limit) for summary in summaries]
        rows.append((f"tasks at reward {limit:g} or above", ["" if s is None else f"{s:.1%}" for s in shares]))
    return rows


def _format_score(name: str, summary: Summary) -> str:
    score = summary.scores[name]
    text = _format_value(name, score.mean, score.standard_error)
    return text if not text or score.num_tasks == summary.num_tasks else f"{text} ({score.num_tasks})"


def _format_value(quantity: str, value: float | None, error: float | None = None, *, sign: str = "") -> str:
    if value is None:
        return ""
    digits = 1 if quantity == "tokens" else 4
    text = f"{value:{sign}z.{digits}f}"
    return text if error is None else f"{text} ± {error:.{digits}f}"
