"""A profile as a picture: rewards and lengths over tasks, pass@k and majority@k over k."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_rl.collect.measures import Floats
from nemo_rl.collect.profile import Profile, Summary
from nemo_rl.collect.whole_file import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FILE = "profile.png"
NUM_BINS = 20


def write_plot(profile: Profile, path: Path) -> None:
    """Four panels in a PNG file. Needs no display, and leaves matplotlib's settings alone."""
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
    """(k, mean) of pass@k or majority@k, of one rollout the mean reward."""
    means = {1: summary.scores["reward"].mean}
    for name, score in summary.scores.items():
        if match := re.fullmatch(rf"{kind}@(\d+)", name):
            means[int(match[1])] = score.mean
    points = sorted((k, mean) for k, mean in means.items() if mean is not None)
    return points if len(means) > 1 else []


def _add_legend(axes: "Axes") -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
