# SPDX-License-Identifier: Apache-2.0
"""A short calibration of verdicts; ``benchmarks/verdict_calibration.py`` is the long one."""

from statistics import mean

import pytest
from benchmarks.verdict_calibration import measure, measure_power

ERRORS = 4.0
"""Standard errors that a share of few simulations may be off."""


@pytest.mark.slow
def test_intervals_and_verdicts_keep_their_rates() -> None:
    cases = list(measure(60, seed=7, lengths=(10, 34)))
    missed = [
        case
        for case in cases
        if case.share < (case.least or 0) - ERRORS * case.error
        or (case.most is not None and case.share > case.most + ERRORS * case.error)
    ]
    assert missed == []
    assert {case.question for case in cases if case.least or case.most} == {
        "interval contains the mean",
        "interval contains the difference",
        "false alarm, tolerance 0",
        "slow-down of 3 % found",
        "equal, seem to differ",
        "smallest change found, same runs",
    }
    assert min(case.share for case in cases if case.question.startswith("slow-down")) >= 0.95


def test_the_smallest_change_is_found() -> None:
    """All cells together, 1,800 comparisons: the standard error of a share of 80 % is 0.9 %."""
    cases = [case for case in measure_power(200, seed=5) if case.question == "smallest change found, same runs"]
    assert 0.77 < mean(case.share for case in cases) < 0.83


def test_the_same_seed_gives_the_same_figures() -> None:
    first, again, other = (next(measure(100, seed)) for seed in (1, 1, 2))
    assert first == again != other
