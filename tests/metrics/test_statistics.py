# SPDX-License-Identifier: Apache-2.0
"""Statistics against textbook values and numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.metrics.statistics import describe

samples = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=60)


def test_a_known_sample():
    found = describe([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (found.count, found.mean, found.median, found.min, found.max) == (8, 5.0, 4.5, 2.0, 9.0)
    assert found.std == pytest.approx(math.sqrt(32 / 7))
    assert found.cv == pytest.approx(math.sqrt(32 / 7) / 5)
    half_width = 2.364624 * math.sqrt(32 / 7) / math.sqrt(8)  # Student's t at 0.975, 7 degrees of freedom
    assert found.ci95 == pytest.approx((5 - half_width, 5 + half_width), rel=1e-6)


def test_two_values_use_one_degree_of_freedom():
    low, high = describe([1.0, 3.0]).ci95
    assert (high - low) / 2 == pytest.approx(12.7062, rel=1e-5)


def test_one_value_has_no_spread():
    found = describe([2.5])
    assert (found.mean, found.median, found.min, found.max) == (2.5, 2.5, 2.5, 2.5)
    assert (found.std, found.cv, found.ci95) == (None, None, None)


def test_equal_values_have_no_spread_but_an_interval():
    found = describe([0.5] * 10)
    assert (found.std, found.cv, found.ci95) == (0.0, 0.0, (0.5, 0.5))


def test_cv_of_a_zero_mean_is_unknown():
    assert describe([-1.0, 1.0]).cv is None


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_what_has_no_statistics_is_refused(values):
    with pytest.raises(ValueError, match="statistics of"):
        describe(values)


@given(samples)
def test_agrees_with_numpy(values):
    found = describe(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert found.median == pytest.approx(np.median(values))
    assert (found.min, found.max) == (min(values), max(values))
    if len(values) > 1:
        assert found.std == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-9)
        low, high = found.ci95
        assert low <= found.mean <= high


@given(samples)
def test_order_does_not_matter(values):
    assert describe(values) == describe(values[::-1])
