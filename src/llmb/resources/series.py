# SPDX-License-Identifier: Apache-2.0
"""Values over time, and what of them belongs to spans of time. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TimeSpan(NamedTuple):
    """From ``begin_s`` to ``end_s``, in Unix time."""

    begin_s: float
    end_s: float


Point = tuple[float, float]
"""Time and value."""


def merged(spans: Iterable[TimeSpan]) -> tuple[TimeSpan, ...]:
    """In order, those that touch or overlap as one."""
    found: list[TimeSpan] = []
    for span in sorted(spans):
        if found and span.begin_s <= found[-1].end_s:
            found[-1] = TimeSpan(found[-1].begin_s, max(found[-1].end_s, span.end_s))
        else:
            found.append(span)
    return tuple(found)


def length(spans: Iterable[TimeSpan]) -> float:
    """Seconds of all spans."""
    return sum(span.end_s - span.begin_s for span in spans)


def places_inside(times: Sequence[float], spans: Sequence[TimeSpan]) -> list[int]:
    """Which of ``times``, which are in order, lie in the spans."""
    return [
        place for span in spans for place in range(bisect_left(times, span.begin_s), bisect_right(times, span.end_s))
    ]


def rise(points: Sequence[Point], spans: Sequence[TimeSpan]) -> float | None:
    """How much a counter rose in the spans, linear between its points; None if the points do not cover them."""
    if not points or not spans or spans[0].begin_s < points[0][0] or spans[-1].end_s > points[-1][0]:
        return None
    times = [time for time, _ in points]
    return sum(_value(points, times, span.end_s) - _value(points, times, span.begin_s) for span in spans)


def integral(points: Sequence[Point]) -> list[Point]:
    """The counter whose slope is linear between ``points``."""
    total, found = 0.0, []
    for number, (time, value) in enumerate(points):
        if number:
            before, earlier = points[number - 1]
            total += (time - before) * (value + earlier) / 2
        found.append((time, total))
    return found


def _value(points: Sequence[Point], times: Sequence[float], time: float) -> float:
    after = bisect_left(times, time)
    if times[after] == time:
        return points[after][1]
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + (high - low) * (time - begin) / (end - begin)
