"""Time intervals in nanoseconds. A set of them is disjoint and in order; `union` makes one of any."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union. Example: (0, 3), (2, 5) and (7, 8) give (0, 5), (7, 8)."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        elif end > start:
            joined.append((start, end))
    return joined


def clip(intervals: Iterable[Interval], start: int, end: int) -> list[Interval]:
    """Return the parts that lie within a window."""
    return [(max(a, start), min(b, end)) for a, b in intervals if a < end and b > start]


def gaps(covered: Sequence[Interval], start: int, end: int) -> list[Interval]:
    """Return the parts of a window that a union does not cover."""
    edges = [start, *(edge for interval in clip(covered, start, end) for edge in interval), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def total(intervals: Iterable[Interval]) -> int:
    """Return the length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def open_counts(intervals: Iterable[Interval]) -> list[tuple[int, int]]:
    """Return how many of any intervals are open after each of their starts and ends: (time, count), by time."""
    events = sorted(event for start, end in intervals for event in ((start, 1), (end, -1)))
    counts = accumulate(change for _, change in events)
    return [(at, count) for (at, _), count in zip(events, counts, strict=True)]
