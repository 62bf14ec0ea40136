# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on time intervals: sorted, disjoint, half open, in integer nanoseconds. Pure."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The time covered by any of ``spans``, which may be in any order or empty."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def intersect(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time covered by both."""
    found: list[Span] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def subtract(left: Sequence[Span], right: Sequence[Span]) -> list[Span]:
    """The time covered by ``left`` and not by ``right``."""
    rest: list[Span] = []
    j = 0
    for start, end in left:
        while j < len(right) and right[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(right) and right[k][0] < end:
            if right[k][0] > at:
                rest.append((at, right[k][0]))
            at = max(at, right[k][1])
            k += 1
        if at < end:
            rest.append((at, end))
    return rest


def clip(spans: Sequence[Span], window: Span) -> list[Span]:
    """The part of ``spans`` inside ``window``."""
    first = bisect_right(spans, window[0], key=lambda span: span[1])
    after = bisect_left(spans, window[1], key=lambda span: span[0])
    return [(max(start, window[0]), min(end, window[1])) for start, end in spans[first:after]]


def total(spans: Iterable[Span]) -> int:
    """The nanoseconds covered by disjoint ``spans``."""
    return sum(end - start for start, end in spans)
