"""The page of all runs and collections: filtered, sorted, with what became of each."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl.viewer import charts
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import Page, address, finite_mean
from nemo_rl.viewer.run_summary import STATES, RunSummary, summarize
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources

SORT_KEYS: Mapping[str, Callable[["RunRow"], Any]] = {  # numbers: missing ones count as lowest
    "name": lambda row: row.summary.name,
    "state": lambda row: STATES.index(row.summary.state) if row.summary.state else len(STATES),
    "reward": lambda row: _order(row.reward),
    "accuracy": lambda row: _order(row.accuracy),
    "step": lambda row: _order(row.step),
    "started": lambda row: _order(row.summary.started_at),
    "duration": lambda row: _order(row.summary.duration_s),
    "rollouts": lambda row: row.rollouts,
}


@dataclass(frozen=True, slots=True)
class RunRow:
    """A line of the list."""

    source: ViewerSource
    summary: RunSummary
    step: int | None
    reward: float | None
    accuracy: float | None
    rollouts: int
    failed: int
    curve: charts.Markup


def runs_page(sources: ViewerSources, values: Mapping[str, str]) -> Page:
    """Return the list; by default the one that was written last comes first."""
    rows = [_row(source) for source in sources.in_order()]
    states = [state for state in STATES if any(row.summary.state == state for row in rows)]
    text, state = values.get("text", "").strip(), values.get("state", "")
    shown = [row for row in rows if text.lower() in row.summary.text and state in ("", row.summary.state)]
    order = values.get("sort", "")
    if key := SORT_KEYS.get(order.removeprefix("-")):
        shown.sort(key=key, reverse=order.startswith("-"))
    context = {
        "rows": shown,
        "num_all": len(rows),
        "states": states,
        "filters": {"text": text, "state": state},
        "sort": order,
        "sort_addresses": {
            name: address("/", text=text, state=state, sort=f"-{name}" if order == name else name) for name in SORT_KEYS
        },
    }
    return Page("runs.html", "Runs", context)


def _row(source: ViewerSource) -> RunRow:
    reward, accuracy = (source.metrics.series(name) for name in ("train/reward", "validation/accuracy"))
    rollouts = next(iter(source.splits.values()))
    splits = source.splits.values()
    return RunRow(
        source=source,
        summary=summarize(source),
        step=max(source.metrics.steps, default=None),
        reward=_last(reward) if reward else finite_mean(rollouts.column("reward")),
        accuracy=_last(accuracy),
        rollouts=sum(map(len, splits)),
        failed=sum(len(rows) for split in splits for _, rows in split.select(Query(failure="any"))),
        curve=charts.sparkline(reward),
    )


def _last(values: Mapping[int, float]) -> float | None:
    return list(values.values())[-1] if values else None


def _order(value: float | None) -> float:
    return -math.inf if value is None or math.isnan(value) else value
