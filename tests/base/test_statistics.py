# SPDX-License-Identifier: Apache-2.0
"""Statistics against textbook values and numpy."""

import math
from dataclasses import asdict, astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from step_series import step_noise

from llmb.base.statistics import Statistics, describe, spread_of
from llmb.verdict.judgement import describe_runs

samples = st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=60)


def test_a_known_sample():
    found = describe([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert (found.count, found.mean, found.median, found.min, found.max) == (8, 5.0, 4.5, 2.0, 9.0)
    assert found.std == pytest.approx(math.sqrt(32 / 7))
    assert found.cv == pytest.approx(math.sqrt(32 / 7) / 5)
    assert found.effective_count is None


def test_the_interval_is_that_of_the_first_cosine_coefficients():
    values = np.array([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    basis = np.array([[math.sqrt(2 / 8) * math.cos(math.pi * k * (i + 0.5) / 8) for i in range(8)] for k in (1, 2)])
    covariance = 0.55 ** np.abs(np.subtract.outer(np.arange(8), np.arange(8)))
    correction = (covariance.sum() / 8) / (np.trace(basis @ covariance @ basis.T) / 2)
    variance = correction * np.mean((basis @ values) ** 2) / 8
    half_width = 4.302653 * math.sqrt(variance)  # Student's t at 0.975, 2 degrees of freedom
    assert describe(values.tolist()).ci95 == pytest.approx((5 - half_width, 5 + half_width), rel=1e-6)


def test_two_values_use_one_degree_of_freedom():
    low, high = describe([1.0, 3.0]).ci95
    assert (high - low) / 2 == pytest.approx(
        12.7062 * math.sqrt(1.55 / 0.45), rel=1e-5
    )  # the correction for an autocorrelation of 0.55


def test_one_value_has_no_spread():
    found = describe([2.5])
    assert (found.mean, found.median, found.min, found.max) == (2.5, 2.5, 2.5, 2.5)
    assert (found.std, found.cv, found.ci95, describe_runs([2.5]).ci95) == (None, None, None, None)


def test_the_interval_of_run_means_is_students_t():
    found = describe_runs([12.0, 12.1, 12.2])
    assert (found.count, found.median, found.effective_count) == (3, 12.1, None)
    assert found.std == pytest.approx(0.1)
    assert found.ci95 == pytest.approx((12.1 - 0.248414, 12.1 + 0.248414), abs=1e-6)  # 4.302653 x 0.1 / sqrt(3)


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
def test_only_interval_and_effective_count_depend_on_the_order(values):
    found, reversed_ = describe(values), describe(values[::-1])
    order = dict.fromkeys(("ci95", "effective_count"))
    assert asdict(replace(reversed_, **order)) == pytest.approx(asdict(replace(found, **order)), rel=1e-9)
    if found.ci95:
        assert reversed_.ci95 == pytest.approx(found.ci95, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("steps", [10, 34, 200])
@pytest.mark.parametrize(("phi", "skewed"), [(0, False), (0.5, False), (0, True)])
def test_the_interval_covers_the_true_mean_in_95_of_100_series(steps, phi, skewed):
    count = 3000 if steps < 200 else 1000
    intervals = [describe((100 + values).tolist()).ci95 for values in step_noise((count, steps), phi, skewed=skewed)]
    covered = sum(low <= 100 <= high for low, high in intervals) / len(intervals)
    assert 0.92 < covered < 0.98  # 2 points, and the standard error of 1,000 series is 0.7


def test_the_interval_of_a_long_series_is_that_of_its_blocks():
    intervals = [describe((100 + values).tolist()).ci95 for values in step_noise((400, 2000), 0.5)]
    assert 0.91 < sum(low <= 100 <= high for low, high in intervals) / len(intervals) < 0.985
    width = np.median([high - low for low, high in intervals])
    assert width == pytest.approx(2 * 1.96 * math.sqrt(3 / 2000), rel=0.1)  # long-run variance (1 + phi) / (1 - phi)


def test_a_short_and_a_long_series_are_described_alike():
    values = step_noise((513,), 0.5) + 50
    long, short = describe(values.tolist()), describe(values[:512].tolist())
    assert (long.mean, long.median, long.std) == pytest.approx((short.mean, short.median, short.std), rel=0.02)
    assert long.effective_count == pytest.approx(short.effective_count, rel=0.05)
    assert long.ci95 == pytest.approx(short.ci95, abs=0.05)


@pytest.mark.parametrize(("phi", "low", "high"), [(0, 0.8, 1), (0.5, 0.28, 0.40), (0.8, 0.08, 0.16)])
def test_autocorrelated_steps_count_less(phi, low, high):
    counts = [describe((10 + values).tolist()).effective_count / 400 for values in step_noise((60, 400), phi)]
    assert low < np.median(counts) <= high
    assert max(counts) <= 1


def test_the_effective_count_of_few_steps_is_unknown():
    assert describe([1.0, 2.0] * 9).effective_count is None
    assert describe([1.0, 2.0] * 10).effective_count == 20  # alternating steps are not worth more than independent ones


def test_statistics_of_an_earlier_version_are_read():
    found = describe([1.0, 2.0, 3.0])
    earlier = {key: value for key, value in asdict(found).items() if key != "effective_count"}
    assert TypeAdapter(Statistics).validate_python(earlier) == found


@pytest.mark.parametrize("count", [20, 513, 100_000])
@pytest.mark.parametrize("value", [0.1, 12.27, 4.07])
def test_equal_values_have_no_spread(count: int, value: float) -> None:
    found = describe([value] * count)
    assert (found.mean, found.std, found.cv, found.ci95) == (value, 0.0, 0.0, (value, value))
    assert found.effective_count and found.effective_count > 0.8 * count


def test_the_spread_is_that_of_run_means() -> None:
    spread = spread_of([1.0, 1.2, 1.4])
    assert spread is not None
    assert astuple(spread) == pytest.approx((3, 1.2, 1.2, 0.2, 100 / 6, 1.0, 1.4))
    single = spread_of([1.0])
    assert single is not None
    assert (single.std, single.cv_pct) == (None, None)
    assert spread_of([]) is None
