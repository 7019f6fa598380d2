"""The page of charts: any metrics of one or more runs over each other, smoothed, zoomed, on a logarithmic axis.

All of it is in the address: `/charts?run=exp_001&run=exp_002&metric=train/reward&smooth=0.9&log=1&from=10&to=90`.
"""

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from markupsafe import Markup

from nemo_rl.viewer import charts
from nemo_rl.viewer.charts import ChartLine, ChartView
from nemo_rl.viewer.distributions import distribution_charts, expert_load_chart
from nemo_rl.viewer.page import Page, address, whole_number
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources

MAX_CHARTS = 60  # charts on one page
MAX_RUNS = 8  # runs over each other
MAX_OFFERED = 60  # further runs to choose from
MAX_SMOOTHING = 0.99
Resolve: TypeAlias = Callable[[str], str | None]  # the link to an address; None for a page that does not exist
Drawing: TypeAlias = Callable[[Resolve], Markup]
DEFAULT_METRICS = (
    *("train/reward", "validation/reward", "validation/accuracy", "train/mean_gen_tokens_per_sample"),
    *("train/truncation_rate", "train/approx_entropy", "train/loss", "train/grad_norm", "timing/train/total_step_time"),
)


def chart_address(run_ids: Sequence[str], metrics: Sequence[str], **choices: object) -> str:
    return address("/charts", run=list(run_ids), metric=",".join(metrics), **choices)


def charts_page(sources: ViewerSources, parameters: Sequence[tuple[str, str]]) -> Page:
    """Return the page of charts. Raises DataError for an unknown run."""
    values = dict(parameters)
    ids = list(dict.fromkeys(value for name, value in parameters if name in ("run", "a", "b") and value))[:MAX_RUNS]
    runs = [sources.get(run_id) for run_id in ids]
    names = sorted({name for run in runs for name in run.metrics.by_name})
    pattern = values.get("metric", "").strip()
    chosen = _choose(names, pattern)
    view, shown = parse_view(values), chosen[:MAX_CHARTS]
    is_large = len(shown) == 1 or bool(values.get("together"))
    drawn: list[Drawing] = []
    if values.get("together"):
        drawn.append(partial(_draw_together, runs=runs, names=shown, view=view))
    else:
        drawn += [partial(_draw, runs=runs, name=name, view=view, is_large=is_large) for name in shown]
    if len(runs) == 1 and not pattern and runs[0].kind == "run":
        distributions = [*distribution_charts(runs[0].split("train")), expert_load_chart(runs[0].metrics)]
        drawn += [lambda resolve, chart=chart: chart for chart in distributions if chart]
    offered = [source for source in sources.in_order() if source.kind == "run" and source not in runs]
    context = {
        "runs": runs,
        "offered": offered[:MAX_OFFERED],
        "names": names,
        "pattern": pattern,
        "charts": drawn,
        "num_hidden": len(chosen) - len(shown),
        "values": {name: values.get(name, "") for name in ("smooth", "log", "from", "to", "together")},
        "is_large": is_large,
    }
    return Page("charts.html", "Charts", context, live=runs[0].id if runs else "")


def parse_view(values: Mapping[str, str]) -> ChartView:
    """Return how an address wants its charts; a value that is no number counts as absent."""
    smoothing = values.get("smooth", "")
    return ChartView(
        smoothing=min(float(smoothing), MAX_SMOOTHING) if re.fullmatch(r"[01]?\.?\d{1,6}", smoothing) else 0.0,
        is_log=bool(values.get("log")),
        first=whole_number(values["from"]) if values.get("from") else None,
        last=whole_number(values["to"]) if values.get("to") else None,
        size=charts.LARGE,
    )


def _choose(names: Sequence[str], pattern: str) -> list[str]:
    """Return the metrics that match any of the patterns, in the order of the patterns; by default the usual ones."""
    if not pattern:
        return [name for name in DEFAULT_METRICS if name in names]
    wanted = [part for part in re.split(r"[,\s]+", pattern) if part]
    return list(dict.fromkeys(name for part in wanted for name in names if fnmatch.fnmatchcase(name, part)))


def _draw(resolve: Resolve, *, runs: Sequence[ViewerSource], name: str, view: ChartView, is_large: bool) -> Markup:
    lines = [ChartLine(run.id, run.metrics.series(name)) for run in runs]
    if is_large:
        return charts.line_chart(name, lines, view=view)
    choices = {"smooth": view.smoothing or None, "log": view.is_log or None, "from_": view.first, "to": view.last}
    full_size = resolve(chart_address([run.id for run in runs], [name], **choices))
    return charts.line_chart(name, lines, view=replace(view, size=charts.SMALL, full_size=full_size))


def _draw_together(resolve: Resolve, *, runs: Sequence[ViewerSource], names: Sequence[str], view: ChartView) -> Markup:
    lines = [
        ChartLine(f"{run.id} {name}" if len(runs) > 1 else name, run.metrics.series(name))
        for name in names
        for run in runs
    ]
    return charts.line_chart(", ".join(names), lines, view=view)
