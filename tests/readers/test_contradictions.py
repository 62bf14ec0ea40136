# SPDX-License-Identifier: Apache-2.0
"""When step times and a clock contradict each other."""

import pytest

from llmb.readers.contradictions import Lap, clock_contradiction


@pytest.mark.parametrize(
    ("steps_s", "clock_s", "apart_s", "contradicts"),
    [
        (10.0, 10.0, 0.0, False),
        (10.0, 5.0, 0.0, True),
        (10.0, 5.0, 6.0, False),  # the slowest of ranks that do not wait for each other is another one in every step
        (10.0, 5.0, 0.5, True),
        (10.0, 60.0, 0.0, True),
        (0.05, 0.4999, 0.0, True),
        (0.15, 0.0501, 0.0, True),
        (0.15, 0.0501, 0.15, False),
        (0.05, 1.0, 0.0, False),  # by a clock of whole seconds, most of them may end in one
        (0.0011, 0.0021, 0.0, False),
    ],
)
def test_step_times_sum_to_what_passed(steps_s: float, clock_s: float, apart_s: float, contradicts: bool) -> None:
    laps = [Lap(steps_s=steps_s, clock_s=clock_s, ranks_apart_s=apart_s)] * 8
    assert bool(clock_contradiction(laps)) is contradicts


def test_a_host_may_see_one_end_late() -> None:
    """The first of two steps of 10 s is seen when the second one is half done."""
    assert clock_contradiction([Lap(steps_s=10.0, clock_s=5.0), Lap(steps_s=10.0, clock_s=6.0)]) is None


def test_a_host_that_waits_once_in_a_short_window_contradicts_nothing() -> None:
    assert clock_contradiction([Lap(steps_s=0.05, clock_s=0.4999)] * 2) is None


def test_a_clock_may_be_set_back_once_and_not_by_every_step() -> None:
    usual, back = Lap(steps_s=0.5, clock_s=0.5001), Lap(steps_s=0.5, clock_s=-3600.0)
    assert clock_contradiction([usual, back, usual]) is None
    assert clock_contradiction([usual, back, back]) == "most steps of the window end before the step before them"
