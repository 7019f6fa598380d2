"""The timeline of a traced run: the spans of a step as bars, one row per lane, and the bubble table beside them."""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from nemo_rl.errors import DataError
from nemo_rl.observability.trace_file import TRACE_FILE
from nemo_rl.trace.advice import Advice
from nemo_rl.trace.bubbles import Bubbles, count_bubbles
from nemo_rl.trace.planned_advice import advise_with_plans
from nemo_rl.trace.run_config import read_run_config
from nemo_rl.trace.timeline import Step, Timeline, read_last_start
from nemo_rl.trace.trace_command import table_rows
from nemo_rl.tracing import SpanRecord
from nemo_rl.viewer.charts import LARGE, LEFT, RIGHT
from nemo_rl.viewer.page import Page, whole_number
from nemo_rl.viewer.viewer_sources import ViewerSource

MAX_TRACE_BYTES = 64 << 20  # compressed: about 3 million spans, which take a few GB of memory
MAX_LANES = 150  # drawn per track
LANE_HEIGHT, TRACK_GAP, AXIS = 14, 20, 24
INSET = 3  # a span is lower by this than the one that it is within
MIN_WIDTH = 0.4  # a bar's; narrower ones that follow each other are one
NUM_TICKS = 8
KEY = '<svg class="key" viewBox="0 0 1 1"><rect class="fill c{}" width="1" height="1"/></svg>'  # in the legend
FIRST_TRACKS = (r"driver", r"policy.*", r"teacher.*", r"engine.*")  # then the others, in the order of the alphabet
COLOURS = {  # class c0 to c7 of spans that a reader looks for; of others by their name
    "rollout": 7,
    "generation": 0,
    "queue": 4,
    "prefill": 5,
    "decode": 0,
    "policy_training": 2,
    "micro_batch": 2,
    "weight_sync": 6,
    "engines paused": 6,
    "total_step_time": 7,
}


@dataclass(frozen=True, slots=True)
class _Trace:
    """Parts of a trace that the page needs; the spans by their starts."""

    spans: Sequence[SpanRecord]
    steps: Mapping[int, Step]
    bubbles: Bubbles | None
    advice: Sequence[Advice]


def has_timeline(source: ViewerSource) -> bool:
    return (source.path / TRACE_FILE).is_file()


def timeline_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    """Return the page of a step; `from` and `to` are microseconds after its start. Raises DataError without a trace."""
    path = source.path / TRACE_FILE
    if not path.is_file():
        raise DataError(f"{source.id} has no {TRACE_FILE}; start runs with logger.trace.enabled=true")
    if path.stat().st_size > MAX_TRACE_BYTES:
        limit = f"{MAX_TRACE_BYTES >> 20} MiB, the most whose spans the viewer holds in memory"
        raise DataError(f"{path} is larger than {limit}; open it at https://ui.perfetto.dev")
    trace = source.remember("timeline", lambda: _read(source))
    if not trace.steps:
        raise DataError(f"{path} has no whole training step yet")
    numbers = list(trace.steps)
    number = whole_number(values.get("step")) or numbers[-1]
    if number not in trace.steps:
        raise DataError(f"{path} has no step {number}; it has {numbers[0]} to {numbers[-1]}")
    step = trace.steps[number]
    length_us = (step.end_ns - step.start_ns) // 1000
    first = min(whole_number(values.get("from")), length_us - 1)
    last = min(whole_number(values.get("to")) or length_us, length_us)
    last = max(last, first + 1)
    at = numbers.index(number)
    context = {
        "source": source,
        "step": number,
        "previous": numbers[at - 1] if at else None,
        "next": numbers[at + 1] if at + 1 < len(numbers) else None,
        "first": first,
        "last": last,
        "is_whole": (first, last) == (0, length_us),
        "picture": _draw(trace.spans, step.start_ns, first, last),
        "bubbles": trace.bubbles,
        "rows": table_rows(trace.bubbles) if trace.bubbles else [],
        "advice": trace.advice,
    }
    return Page("timeline.html", f"{source.id}: timeline", context)


def _read(source: ViewerSource) -> _Trace:
    records = read_last_start(source.path)
    spans = sorted((each for each in records if isinstance(each, SpanRecord)), key=lambda each: each.start_ns)
    timeline = Timeline.of_spans(spans)
    bubbles = count_bubbles(timeline)
    advice = advise_with_plans(bubbles, timeline, read_run_config(source.path)) if bubbles else []
    return _Trace(spans, {step.number: step for step in timeline.steps}, bubbles, advice)


def _draw(spans: Iterable[SpanRecord], start_ns: int, first: int, last: int) -> Markup:
    """Return the spans of a window of a step, whose ends are in microseconds after its start, as SVG."""
    window = start_ns + first * 1000, start_ns + last * 1000
    shown = [span for span in spans if span.start_ns < window[1] and span.end_ns > window[0]]
    by_track: dict[str, dict[int, list[SpanRecord]]] = {}
    for span in shown:
        by_track.setdefault(span.track, {}).setdefault(span.lane, []).append(span)
    width, top, parts = LARGE[0], AXIS, list[str]()
    for track in sorted(by_track, key=_order):
        lanes = by_track[track]
        hidden = f" ({len(lanes) - MAX_LANES} more lanes)" if len(lanes) > MAX_LANES else ""
        parts.append(f'<text class="tick" x="{LEFT}" y="{top + 13}">{escape(track)}{hidden}</text>')
        top += TRACK_GAP
        for lane in sorted(lanes)[:MAX_LANES]:
            parts += _bars(lanes[lane], window, top, width)
            top += LANE_HEIGHT
    ticks = "".join(_ticks(first, last, width, top))
    points = json.dumps(
        [[LEFT + (width - LEFT - RIGHT) * i / 100, _time(first + (last - first) * i / 100)] for i in range(101)]
    )
    names = sorted({span.name for span in shown}, key=lambda name: (_colour(name), name))
    legend = "".join(f"<li>{KEY.format(_colour(name))}{escape(name)}</li>" for name in names)
    return Markup(
        f'<figure class="chart timeline"><figcaption>{len(shown)} spans<output></output></figcaption>'
        f'<svg viewBox="0 0 {width} {top + 4}" role="group" aria-label="timeline of {len(shown)} spans" '
        f'data-points="{escape(points)}" data-steps="{first} {last}">{ticks}{"".join(parts)}</svg>'
        f"<ul class=legend>{legend}</ul></figure>"
    )


def _order(track: str) -> tuple[int, str]:
    place = next((i for i, pattern in enumerate(FIRST_TRACKS) if re.fullmatch(pattern, track)), len(FIRST_TRACKS))
    return place, track


def _bars(spans: Sequence[SpanRecord], window: tuple[int, int], top: int, width: int) -> Iterator[str]:
    """Yield a lane: a span within another is drawn over it, lower by an inset; very short neighbours are one bar."""
    scale = (width - LEFT - RIGHT) / (window[1] - window[0])
    open_ends: list[int] = []
    drawn_until: dict[int, float] = {}  # by depth
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        while open_ends and open_ends[-1] <= span.start_ns:
            open_ends.pop()
        depth = len(open_ends)
        open_ends.append(span.end_ns)
        x = LEFT + max(span.start_ns - window[0], 0) * scale
        length = (min(span.end_ns, window[1]) - max(span.start_ns, window[0])) * scale
        if length < MIN_WIDTH and x < drawn_until.get(depth, 0.0):
            continue
        drawn_until[depth] = x + MIN_WIDTH
        inset = min(depth, 3) * INSET
        size = f'width="{max(length, MIN_WIDTH):.2f}" height="{LANE_HEIGHT - 2 - inset}"'
        place = f'x="{x:.2f}" y="{top + inset}" {size}'
        yield f'<rect class="fill c{_colour(span.name)}" {place}><title>{escape(_describe(span))}</title></rect>'


def _describe(span: SpanRecord) -> str:
    values = "".join(f"\n{name}: {value}" for name, value in span.attributes.items())
    return f"{span.name}, {_time((span.end_ns - span.start_ns) / 1000)}{values}"


def _ticks(first: int, last: int, width: int, bottom: int) -> Iterator[str]:
    for i in range(NUM_TICKS + 1):
        x = LEFT + (width - LEFT - RIGHT) * i / NUM_TICKS
        text = _time(first + (last - first) * i / NUM_TICKS)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{AXIS - 6}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="12" text-anchor="middle">{text}</text>'


def _colour(name: str) -> int:
    return COLOURS.get(name, zlib.crc32(name.encode()) % 8)


def _time(microseconds: float) -> str:
    """Return a time in the unit that suits it. Example: 1500 is "1.5 ms"."""
    if microseconds >= 1e6:
        return f"{microseconds / 1e6:.4g} s"
    return f"{microseconds / 1e3:.4g} ms" if microseconds >= 1e3 else f"{microseconds:.4g} µs"
