"""Charts as SVG, made by the server: lines over steps, stacked shares and phases, heat maps, sparklines.

They need no script and no inline style: colours are classes of the stylesheet, so that dark mode and a strict
Content-Security-Policy hold for charts too. `data-points` tells the page's script the values under the pointer.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup, escape

SMALL, LARGE = (460, 200), (1000, 420)  # width and height of a chart
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
MAX_POINTS = 400  # points per line; longer lines are thinned
MAX_DOTS = 60  # points per line up to which each has a dot
MAX_COLUMNS = 60  # steps per row of a heat map; more are joined
NUM_SHADES = 9  # classes h1 to h9 of a heat map
MIN_LOG = 1e-12  # lowest value on a logarithmic axis


@dataclass(frozen=True, slots=True)
class ChartLine:
    label: str
    values: Mapping[int, float]  # by step
    colour: int | None = None  # class c0 to c7; None: by the line's place among all lines


@dataclass(frozen=True, slots=True)
class ChartView:
    """Options of the drawing of lines."""

    smoothing: float = 0.0  # weight of the past in an exponential moving average, below 1; 0: none
    is_log: bool = False  # logarithmic values; those of 0 and below are not drawn
    first: int | None = None  # first and last step shown; None: all
    last: int | None = None
    size: tuple[int, int] = SMALL
    full_size: str | None = None  # address of the chart in full size


@dataclass(frozen=True, slots=True)
class Frame:
    """The ranges of both axes, and the mapping to the picture."""

    x: tuple[float, float]
    y: tuple[float, float]  # logarithms if `is_log`
    size: tuple[int, int] = SMALL
    is_log: bool = False

    def at(self, step: float, value: float) -> tuple[float, float]:
        width, height = self.size
        value = math.log10(max(value, MIN_LOG)) if self.is_log else value
        across = (step - self.x[0]) / (self.x[1] - self.x[0] or 1)
        up = (value - self.y[0]) / (self.y[1] - self.y[0] or 1)
        return LEFT + across * (width - LEFT - RIGHT), height - BOTTOM - up * (height - TOP - BOTTOM)


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    alarm: float | None = None,
    link: Callable[[int], str | None] = lambda step: None,
    view: ChartView = ChartView(),
) -> Markup:
    """Return a chart of lines over steps; "" if no line has a value. `alarm` is a marked level.

    A point is a link if `link` returns an address for its step. Smoothed lines lie over what they are the mean of.
    """
    shown = [line for line in (_select(line, view) for line in _coloured(lines)) if line.values]
    if not shown:
        return Markup("")
    curves = [replace(line, values=smooth(line.values, view.smoothing)) for line in shown]
    values = [v for line in shown for v in line.values.values()] + ([alarm] if alarm is not None else [])
    steps = [s for line in shown for s in line.values]
    low, high = min(values), max(values)
    y = (math.log10(low) - 0.02, math.log10(high) + 0.02) if view.is_log else _pad(low, high)
    frame = Frame((min(steps), max(steps)), y, view.size, view.is_log)
    parts = [_axes(frame)]
    if view.smoothing:
        parts += [_polyline(line, frame, "line faint") for line in shown]
    for line in curves:
        parts += [_polyline(line, frame, "line"), *_dots(line, frame, link)]
    if alarm is not None:
        (x0, y0), (x1, _) = frame.at(frame.x[0], alarm), frame.at(frame.x[1], alarm)
        parts.append(f'<line class="alarm" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y0:.1f}" y2="{y0:.1f}"/>')
    return _figure(_Figure(title, frame, parts, curves), view.full_size)


def stacked_chart(title: str, lines: Sequence[ChartLine], *, view: ChartView = ChartView()) -> Markup:
    """Return a chart in which the lines lie on top of each other: seconds by phase, shares of a whole."""
    lines = [line for line in _coloured(lines) if any(value > 0 for value in line.values.values())]
    steps = sorted({step for line in lines for step in line.values})
    if len(steps) < 2:
        return Markup("")
    steps = [steps[i] for i in _thin(len(steps))]
    below = [0.0] * len(steps)
    layers = []
    for line in lines:
        above = [b + max(0.0, line.values.get(s, 0.0)) for b, s in zip(below, steps, strict=True)]
        layers.append((line.colour, below, above))
        below = above
    frame = Frame((steps[0], steps[-1]), (0.0, max(below) or 1.0), view.size)
    parts = [_axes(frame)]
    for colour, low, high in layers:
        outline = [frame.at(s, v) for s, v in zip(steps, high, strict=True)]
        outline += [frame.at(s, v) for s, v in zip(reversed(steps), reversed(low), strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        parts.append(f'<polygon class="fill c{colour}" points="{points}"/>')
    return _figure(_Figure(title, frame, parts, lines), view.full_size)


def heat_map(title: str, steps: Any, values: Any, *, num_rows: int = 16, view: ChartView = ChartView()) -> Markup:
    """Return the distribution of values [N] over steps [N]: darker where more of a step's values lie.

    Values that are not finite are not drawn; "" with fewer than two steps or with equal values.
    """
    known = np.isfinite(values) & (steps >= 0)
    steps, values = steps[known], values[known]
    if not len(values) or steps.min() == steps.max() or values.min() == values.max():
        return Markup("")
    first, last = int(steps.min()), int(steps.max())
    columns = min(MAX_COLUMNS, last - first + 1)
    span = (float(first), float(last + 1)), (float(values.min()), float(values.max()))
    counts, *edges = np.histogram2d(steps, values, bins=(columns, num_rows), range=span)  # [columns, rows]
    x_edges, y_edges = (each.tolist() for each in edges)
    middles = (edges[1][:-1] + edges[1][1:]) / 2
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    frame = Frame(span[0], span[1], view.size)
    parts = [_axes(frame)]
    for column, row in zip(*np.nonzero(shares), strict=True):
        (x0, y0), (x1, y1) = (
            frame.at(x_edges[column], y_edges[row]),
            frame.at(x_edges[column + 1], y_edges[row + 1]),
        )
        shade = max(1, math.ceil(NUM_SHADES * math.sqrt(shares[column, row])))
        text = (
            f"step {math.ceil(x_edges[column])}, {format_number(y_edges[row])} to {format_number(y_edges[row + 1])}: "
        )
        parts.append(
            f'<rect class="h{shade}" x="{x0:.1f}" y="{y1:.1f}" width="{x1 - x0 + 0.2:.1f}"'
            f' height="{y0 - y1 + 0.2:.1f}">'
            f"<title>{escape(text)}{shares[column, row]:.0%}</title></rect>"
        )
    means = {
        math.ceil(x_edges[column]): float((counts[column] * middles).sum() / total)
        for column, total in enumerate(counts.sum(axis=1))
        if total
    }
    return _figure(_Figure(title, frame, parts, [ChartLine("mean", means)]), view.full_size)


def sparkline(values: Mapping[int, float]) -> Markup:
    """Return a small curve without axes; "" with fewer than two values."""
    finite = [value for _, value in sorted(values.items()) if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    finite = [finite[i] for i in np.linspace(0, len(finite) - 1, min(len(finite), 60)).astype(int)]
    low, high = min(finite), max(finite)
    points = " ".join(
        f"{100 * i / (len(finite) - 1):.1f},{22 - 20 * (value - low) / (high - low or 1):.1f}"
        for i, value in enumerate(finite)
    )
    text = f"from {format_number(finite[0])} to {format_number(finite[-1])}"
    return Markup(
        f'<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img" aria-label="{text}">'
        f'<polyline class="line c0" points="{points}"/></svg>'
    )


def histogram(title: str, counts: Sequence[tuple[str, int]]) -> Markup:
    """Return bars of counts, each with its label."""
    if not any(count for _, count in counts):
        return Markup("")
    frame = Frame((0, len(counts)), (0, max(count for _, count in counts)))
    parts = []
    for number, (label, count) in enumerate(counts):
        (x, y), (end, zero) = frame.at(number, count), frame.at(number + 1, 0)
        parts.append(
            f'<rect class="fill c0" x="{x + 1:.1f}" y="{y:.1f}" width="{max(1, end - x - 2):.1f}"'
            f' height="{zero - y:.1f}"><title>{escape(label)}: {count}</title></rect>'
            f'<text class="tick" x="{(x + end) / 2:.1f}" y="{zero + 18:.1f}" text-anchor="middle">'
            f"{escape(label)}</text>"
        )
    parts.append(f'<text class="tick" x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{frame.y[1]:g}</text>')
    return _svg(title, frame, parts, ", ".join(f"{label}: {count}" for label, count in counts))


def smooth(values: Mapping[int, float], weight: float) -> dict[int, float]:
    """Return the exponential moving average over the steps, without the bias towards 0 of its beginning.

    Example: 1, 2 with weight 0.5 become 1 and (0.5 * 0.5 * 1 + 0.5 * 2) / 0.75 = 1.6667.
    """
    result: dict[int, float] = {}
    mean = total = 0.0
    for step, value in values.items():
        mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        result[step] = mean / total
    return result


def format_number(value: float) -> str:
    """Return a number with at most four significant digits.

    Example: 0.012345 is "0.01235", 12345.6 is "12,346".
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class _Figure:
    """The parts of a chart whose lines have names."""

    title: str
    frame: Frame
    parts: Sequence[str]
    lines: Sequence[ChartLine]


def _figure(figure: _Figure, full_size: str | None = None) -> Markup:
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect class="fill c{line.colour}" width="10" '
        f'height="10"/></svg>{escape(line.label)}</li>'
        for line in figure.lines
    )
    foot = f"<ul class=legend>{legend}</ul>" if len(figure.lines) > 1 else ""
    points = json.dumps(_points(figure), ensure_ascii=False)
    return _svg(
        figure.title, figure.frame, figure.parts, _describe(figure.lines), points=points, foot=foot, full_size=full_size
    )


def _svg(
    title: str,
    frame: Frame,
    parts: Sequence[str],
    description: str,
    *,
    points: str = "",
    foot: str = "",
    full_size: str | None = None,
) -> Markup:
    width, height = frame.size
    data = f' data-points="{escape(points)}" data-steps="{frame.x[0]:g} {frame.x[1]:g}"' if points else ""
    heading = f'<a class="full" href="{escape(full_size)}">{escape(title)}</a>' if full_size else escape(title)
    return Markup(
        f'<figure class="chart"><figcaption>{heading}<output></output></figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="group" aria-label="{escape(title)}: {escape(description)}"{data}>'
        f"{''.join(parts)}</svg>{foot}</figure>"
    )


def _points(figure: _Figure) -> list[tuple[float, str]]:
    """Return the position of each step, and the values that its lines have there, as text."""
    steps = sorted({step for line in figure.lines for step in line.values})
    named = len(figure.lines) > 1
    return [
        (
            round(figure.frame.at(step, 1)[0], 1),
            f"step {step:,}: "
            + ", ".join(
                f"{line.label} {format_number(line.values[step])}" if named else format_number(line.values[step])
                for line in figure.lines
                if step in line.values
            ),
        )
        for step in (steps[i] for i in _thin(len(steps)))
    ]


def _select(line: ChartLine, view: ChartView) -> ChartLine:
    """Return the values that can be drawn, in the order of the steps."""
    first, last = -math.inf if view.first is None else view.first, math.inf if view.last is None else view.last
    values = {
        step: value
        for step, value in sorted(line.values.items())
        if first <= step <= last and math.isfinite(value) and (value > 0 or not view.is_log)
    }
    return replace(line, values=values)


def _coloured(lines: Sequence[ChartLine]) -> list[ChartLine]:
    return [
        replace(line, colour=number % 8 if line.colour is None else line.colour) for number, line in enumerate(lines)
    ]


def _axes(frame: Frame) -> str:
    width, height = frame.size
    values = _log_ticks(*frame.y) if frame.is_log else _ticks(*frame.y)
    parts = []
    for value in values:
        x, y = frame.at(frame.x[0], value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{x - 6:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{format_number(value)}</text>'
        )
    for step in sorted({int(step) for step in _ticks(*frame.x) if step == int(step)}):
        x, _ = frame.at(step, 1)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{height - 8}" text-anchor="middle">{step:,}</text>')
    return "".join(parts)


def _polyline(line: ChartLine, frame: Frame, kind: str) -> str:
    steps = list(line.values)
    places = [frame.at(steps[i], line.values[steps[i]]) for i in _thin(len(steps))]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline class="{kind} c{line.colour}" points="{points}"/>'


def _dots(line: ChartLine, frame: Frame, link: Callable[[int], str | None]) -> list[str]:
    """Return the points of a line, as links if they lead somewhere; without links only those of short lines."""
    steps, parts = list(line.values), []
    for step in (steps[i] for i in _thin(len(steps))):
        address = link(step)
        if address is None and len(steps) > MAX_DOTS:
            continue
        (x, y), text = frame.at(step, line.values[step]), f"{line.label}, step {step}"
        text = escape(f"{text}: {format_number(line.values[step])}")
        dot = f'<circle class="dot fill c{line.colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{text}</title></circle>'
        parts.append(f'<a href="{escape(address)}" tabindex="-1" aria-label="{text}">{dot}</a>' if address else dot)
    return parts


def _thin(count: int) -> list[int]:
    """Return at most MAX_POINTS indices, spread evenly, with the first and the last."""
    if count <= MAX_POINTS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)})


def _ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers in a range."""
    if high <= low:
        return [low]
    magnitude = 10 ** math.floor(math.log10((high - low) / 4))
    apart = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude * 4.5 >= high - low)
    first = math.ceil(low / apart - 1e-9)
    return [round(number * apart, 12) for number in range(first, first + 12) if number * apart <= high + apart * 1e-9]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in a range of logarithms: powers of ten, with 2 and 5 if there are few."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    apart = max(1, len(powers) // 6)
    factors = (1, 2, 5) if len(powers) <= 3 else (1,)
    ticks = [factor * 10.0**power for power in powers[::apart] for factor in factors]
    shown = [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return shown if len(shown) > 1 else _ticks(10**low, 10**high)


def _pad(low: float, high: float) -> tuple[float, float]:
    if low == high == 0:
        return 0.0, 1.0
    if low == high:
        return low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    return (0.0, high) if 0 <= low < 0.3 * high else (low, high)


def _describe(lines: Sequence[ChartLine]) -> str:
    def text(line: ChartLine) -> str:
        first, last = min(line.values), max(line.values)
        values = format_number(line.values[first]), format_number(line.values[last])
        return f"{line.label} {values[0]} at step {first}, {values[1]} at step {last}"

    return "; ".join(text(line) for line in lines if line.values)
