# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.resources.samples import TimeSpan, integral, length, merged, places_inside, rise

POINTS = [(0.0, 0.0), (1.0, 10.0), (2.0, 10.0), (4.0, 30.0)]


def test_spans_that_touch_are_one() -> None:
    assert merged([TimeSpan(3, 4), TimeSpan(0, 1), TimeSpan(1, 2), TimeSpan(0.5, 1.5)]) == (
        TimeSpan(0, 2),
        TimeSpan(3, 4),
    )
    assert length(merged([TimeSpan(3, 4), TimeSpan(0, 1), TimeSpan(1, 2)])) == 3


def test_which_samples_lie_in_spans() -> None:
    assert places_inside([0.0, 1.0, 2.0, 3.0, 4.0], [TimeSpan(0.5, 2.0), TimeSpan(3.5, 9)]) == [1, 2, 4]
    assert places_inside([0.0, 5.0], [TimeSpan(1, 2)]) == []


def test_a_counter_rises_between_its_points() -> None:
    assert rise(POINTS, [TimeSpan(0, 4)]) == 30
    assert rise(POINTS, [TimeSpan(0.5, 1.5)]) == 5
    assert rise(POINTS, [TimeSpan(0, 1), TimeSpan(3, 4)]) == 20
    assert rise(POINTS, [TimeSpan(-1, 1)]) is None
    assert rise(POINTS, [TimeSpan(3, 4.1)]) is None
    assert rise([], [TimeSpan(0, 1)]) is None


def test_the_integral_of_power_is_energy() -> None:
    assert integral([(0.0, 100.0), (1.0, 200.0), (3.0, 200.0)]) == [(0.0, 0.0), (1.0, 150.0), (3.0, 550.0)]


@given(st.lists(st.floats(0, 99), min_size=1, max_size=6))
def test_parts_rise_as_much_as_the_whole(cuts: list[float]) -> None:
    points = [(0.0, 1.0), (30.0, 7.0), (70.0, 7.5), (100.0, 50.0)]
    ends = [0.0, *sorted(cuts), 100.0]
    parts = [rise(points, [TimeSpan(*pair)]) for pair in pairwise(ends)]
    assert sum(part or 0.0 for part in parts) == pytest.approx(49.0)
