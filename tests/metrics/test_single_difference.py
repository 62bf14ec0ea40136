# SPDX-License-Identifier: Apache-2.0
"""One run against a single figure."""

import math

import pytest

from llmb.metrics.statistics import describe
from llmb.verdict.judgement import single_difference

TIMES = [12.9, 12.95, 12.91, 12.88, 12.92, 12.9, 12.93, 12.89, 12.94, 12.9]


def test_the_interval_is_that_of_the_mean():
    statistics = describe(TIMES)
    delta, interval = single_difference(statistics, 12.27)
    assert delta == pytest.approx(100 * (statistics.mean / 12.27 - 1))
    assert interval == pytest.approx([100 * (end / 12.27 - 1) for end in statistics.ci95])


def test_the_spread_of_the_reference_widens_it():
    statistics = describe(TIMES)
    delta, (low, high) = single_difference(statistics, 12.27, (12.17, 12.37))
    own = (statistics.ci95[1] - statistics.mean) / 12.27
    half = 100 * math.hypot(own, statistics.mean / 12.27 * 0.1 / 12.27)
    assert (low, high) == pytest.approx((delta - half, delta + half))


def test_a_single_step_has_no_interval():
    assert single_difference(describe([2.0]), 1.0) == (100.0, None)


@pytest.mark.parametrize("reference", [0.0, -1.0, math.nan])
def test_a_reference_has_to_be_above_0(reference):
    with pytest.raises(ValueError, match="above 0"):
        single_difference(describe(TIMES), reference)
