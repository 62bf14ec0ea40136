# SPDX-License-Identifier: Apache-2.0
"""Interval arithmetic against sets of nanoseconds."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from llmb.traces.timeline import clip, intersect, subtract, total, union

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {point for start, end in spans for point in range(start, end)}


def is_tidy(spans: list[tuple[int, int]]) -> bool:
    """Sorted, none empty, none touching the next."""
    return all(start < end for start, end in spans) and all(before[1] < after[0] for before, after in pairwise(spans))


@given(SPANS)
def test_a_union_covers_what_any_span_covers(spans: list[tuple[int, int]]) -> None:
    merged = union(spans)
    assert points(merged) == points(spans)
    assert is_tidy(merged)
    assert total(merged) == len(points(spans))


@given(SPANS, SPANS)
def test_intersection_and_difference_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    a, b = union(left), union(right)
    assert points(intersect(a, b)) == points(left) & points(right)
    assert points(subtract(a, b)) == points(left) - points(right)
    assert total(intersect(a, b)) + total(subtract(a, b)) == total(a)
    assert is_tidy(subtract(a, b))


@given(SPANS, st.integers(0, 40), st.integers(0, 40))
def test_clipping_keeps_what_is_inside(spans: list[tuple[int, int]], first: int, width: int) -> None:
    window = (first, first + width)
    assert points(clip(union(spans), window)) == points(spans) & points([window])
