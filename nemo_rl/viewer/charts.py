"""Charts as SVG, made by the server: lines over steps and stacked phases, without any script or inline style.

Colours are classes of the stylesheet, so that dark mode and a strict Content-Security-Policy hold for charts too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH, HEIGHT = 460, 200
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
MAX_POINTS = 400  # points per line; longer lines are thinned


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One line of a chart."""

    label: str
    values: Mapping[int, float]  # by step


@dataclass(frozen=True, slots=True)
class Frame:
    """The ranges of both axes, and the mapping to the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, step: float, value: float) -> tuple[float, float]:
        """Return the position of a value."""
        across = (step - self.x[0]) / (self.x[1] - self.x[0] or 1)
        up = (value - self.y[0]) / (self.y[1] - self.y[0] or 1)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    *,
    alarm: float | None = None,
    link: Callable[[int], str | None] = lambda step: None,
) -> Markup:
    """Return a chart of lines over steps; "" if no line has a value. `alarm` is a marked level.

    A point is a link if `link` returns an address for its step.
    """
    finite = [
        ChartLine(line.label, {s: v for s, v in sorted(line.values.items()) if math.isfinite(v)}) for line in lines
    ]
    finite = [line for line in finite if line.values]
    if not finite:
        return Markup("")
    values = [v for line in finite for v in line.values.values()] + ([alarm] if alarm is not None else [])
    steps = [s for line in finite for s in line.values]
    frame = Frame((min(steps), max(steps)), _pad(min(values), max(values)))
    parts = [_axes(frame), *(_polyline(line, number, frame, link) for number, line in enumerate(finite))]
    if alarm is not None:
        (x0, y), (x1, _) = frame.at(frame.x[0], alarm), frame.at(frame.x[1], alarm)
        parts.append(f'<line class="alarm" x1="{x0:.1f}" x2="{x1:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return _figure(title, parts, [line.label for line in finite], _describe(finite))


def stacked_chart(title: str, lines: Sequence[ChartLine]) -> Markup:
    """Return a chart in which the lines lie on top of each other: seconds of a step by phase."""
    lines = [line for line in lines if any(value > 0 for value in line.values.values())]
    steps = sorted({step for line in lines for step in line.values})
    if len(steps) < 2:
        return Markup("")
    steps = [steps[i] for i in _thin(len(steps))]
    below = [0.0] * len(steps)
    layers = []
    for line in lines:
        above = [b + max(0.0, line.values.get(s, 0.0)) for b, s in zip(below, steps, strict=True)]
        layers.append((below, above))
        below = above
    frame = Frame((steps[0], steps[-1]), (0.0, max(below) or 1.0))
    parts = [_axes(frame)]
    for number, (low, high) in enumerate(layers):
        outline = [frame.at(s, v) for s, v in zip(steps, high, strict=True)]
        outline += [frame.at(s, v) for s, v in zip(reversed(steps), reversed(low), strict=True)]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in outline)
        parts.append(f'<polygon class="fill c{number % 8}" points="{points}"/>')
    return _figure(title, parts, [line.label for line in lines], _describe(lines))


def histogram(title: str, counts: Sequence[tuple[str, int]]) -> Markup:
    """Return bars of counts, each with its label."""
    if not any(count for _, count in counts):
        return Markup("")
    most, width = max(count for _, count in counts), (WIDTH - LEFT - RIGHT) / len(counts)
    parts = []
    for number, (label, count) in enumerate(counts):
        height = (HEIGHT - TOP - BOTTOM) * count / most
        x, y = LEFT + number * width, HEIGHT - BOTTOM - height
        parts.append(
            f'<rect class="fill c0" x="{x + 1:.1f}" y="{y:.1f}" width="{max(1, width - 2):.1f}" height="{height:.1f}">'
            f"<title>{escape(label)}: {count}</title></rect>"
            f'<text class="tick" x="{x + width / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>'
        )
    parts.append(f'<text class="tick" x="{LEFT - 6}" y="{TOP + 8}" text-anchor="end">{most}</text>')
    return _figure(title, parts, [], ", ".join(f"{label}: {count}" for label, count in counts))


def format_number(value: float) -> str:
    """Return a number with at most four significant digits.

    Example: 0.012345 is "0.01235", 12345.6 is "12,346".
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _figure(title: str, parts: Sequence[str], labels: Sequence[str], description: str) -> Markup:
    legend = "".join(
        f'<li><svg class="key" viewBox="0 0 10 10" aria-hidden="true"><rect class="fill c{number % 8}" width="10" '
        f'height="10"/></svg>{escape(label)}</li>'
        for number, label in enumerate(labels)
    )
    return Markup(
        f'<figure class="chart"><figcaption>{escape(title)}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="group" aria-label="{escape(title)}: {escape(description)}">'
        f"{''.join(parts)}</svg>{f'<ul class=legend>{legend}</ul>' if len(labels) > 1 else ''}</figure>"
    )


def _axes(frame: Frame) -> str:
    parts = []
    for value in _ticks(*frame.y):
        x, y = frame.at(frame.x[0], value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{x - 6:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{format_number(value)}</text>'
        )
    for step in sorted({int(step) for step in _ticks(*frame.x) if step == int(step)}):
        x, _ = frame.at(step, frame.y[0])
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{step:,}</text>')
    return "".join(parts)


def _polyline(line: ChartLine, number: int, frame: Frame, link: Callable[[int], str | None]) -> str:
    steps = list(line.values)
    steps = [steps[i] for i in _thin(len(steps))]
    places = {step: frame.at(step, line.values[step]) for step in steps}
    colour = f"c{number % 8}"
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places.values())
    parts = [f'<polyline class="line {colour}" points="{points}"/>']
    for step, (x, y) in places.items():
        text = f"{line.label}, step {step}: {format_number(line.values[step])}"
        dot = (
            f'<circle class="dot fill {colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{escape(text)}</title></circle>'
        )
        address = link(step)
        parts.append(
            f'<a href="{escape(address)}" tabindex="-1" aria-label="{escape(text)}">{dot}</a>' if address else dot
        )
    return "".join(parts)


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
