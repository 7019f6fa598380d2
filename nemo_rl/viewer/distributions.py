"""Distributions over the steps of a run: rewards, lengths and outcomes of groups, from the columns of its rollouts, and
the load of experts, from its metrics."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from nemo_rl.viewer import charts
from nemo_rl.viewer.charts import ChartLine
from nemo_rl.viewer.metrics_file import MetricsFile
from nemo_rl.viewer.rollout_set import RolloutSet

Outcome: TypeAlias = Literal["wrong", "mixed", "right"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
OUTCOME_LABELS = {"wrong": "all wrong", "mixed": "mixed", "right": "all right"}
LOADS = {"least": "p0", "10th percentile": "p10", "median": "p50", "90th percentile": "p90", "most": "max"}
DRAWN: dict[Outcome, int] = {"right": 2, "mixed": 7, "wrong": 6}  # from below; colours of the chart


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The groups of a run with a reward, in the order of their first rollout; arrays are [G]."""

    step: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]  # first rollout of each, counted over all files
    mean: npt.NDArray[np.float64]
    low: npt.NDArray[np.float64]
    high: npt.NDArray[np.float64]
    count: npt.NDArray[np.int64]  # rollouts that have a reward

    def outcome(self, name: Outcome) -> npt.NDArray[np.bool_]:
        """Return which groups are wrong (no reward above 0), right (all at least 1), or mixed (others)."""
        wrong, right = self.high <= 0, self.low >= 1
        return {"wrong": wrong, "right": right, "mixed": ~(wrong | right)}[name]


def group_table(rollouts: RolloutSet) -> GroupTable:
    """Return the groups of training rollouts. Failed rollouts have no reward and do not count."""
    step, group, reward = (rollouts.column(name) for name in ("step", "group", "reward"))
    known = np.flatnonzero(np.isfinite(reward) & (step >= 0))
    ids = (step[known].astype(np.int64) << 32) | group[known].astype(np.int64)
    _, first, member, count = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
    rewards = reward[known]
    low, high = np.full(len(count), np.inf), np.full(len(count), -np.inf)
    np.minimum.at(low, member, rewards)
    np.maximum.at(high, member, rewards)
    mean = np.bincount(member, weights=rewards, minlength=len(count)) / count
    order = np.argsort(first, kind="stable")
    row = known[first][order]
    return GroupTable(
        step=step[row].astype(np.int64),
        row=row,
        mean=mean[order],
        low=low[order],
        high=high[order],
        count=count[order],
    )


def outcome_lines(groups: GroupTable) -> list[ChartLine]:
    """Return the share of the groups of each outcome by step."""
    steps, at = np.unique(groups.step, return_inverse=True)
    total = np.bincount(at, minlength=len(steps))
    return [
        ChartLine(
            OUTCOME_LABELS[name],
            dict(zip(steps.tolist(), _shares(at[groups.outcome(name)], total), strict=True)),
            colour,
        )
        for name, colour in DRAWN.items()
    ]


def _shares(at: npt.NDArray[np.int64], total: npt.NDArray[np.int64]) -> list[float]:
    return (np.bincount(at, minlength=len(total)) / total).tolist()


def distribution_charts(rollouts: RolloutSet) -> list[Markup]:
    """Return the charts that have data: outcomes of groups, rewards and lengths over the steps."""
    if not len(rollouts):
        return []
    step = rollouts.column("step")
    drawn = (
        charts.stacked_chart("Groups by outcome", outcome_lines(group_table(rollouts))),
        charts.heat_map("Rewards of rollouts", step, rollouts.column("reward")),
        charts.heat_map("Lengths of rollouts (sampled tokens)", step, rollouts.column("tokens").astype(float)),
    )
    return [chart for chart in drawn if chart]


def expert_load_chart(metrics: MetricsFile) -> Markup:
    """Return the chart of the load of experts over the steps, each over the mean of its layer; "" for dense models."""
    lines = [
        ChartLine(label, metrics.series(f"train/moe/load_{name}_over_mean"), colour)
        for colour, (label, name) in enumerate(LOADS.items())
    ]
    return charts.line_chart("Load of experts over the mean of their layer", lines, alarm=1.0)
