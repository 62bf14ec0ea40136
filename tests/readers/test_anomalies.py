# SPDX-License-Identifier: Apache-2.0
"""Outlier steps, drift and periodic stalls of simulated runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_series import step_times

from llmb.readers.anomalies import Anomalies, find_anomalies


def test_single_slow_and_fast_steps_are_outliers():
    times = step_times(60, 3, phi=0)
    times[17] += 2.0
    times[40] -= 1.0
    found = find_anomalies(times.tolist(), 100).outliers
    assert [outlier.step for outlier in found] == [117, 140]
    assert found[0].step_time_s == times[17]
    assert [outlier.excess_s for outlier in found] == pytest.approx([2.0, -1.0], abs=0.2)


@pytest.mark.parametrize(("phi", "skewed", "most"), [(0, False, 0.002), (0.5, False, 0.002), (0, True, 0.01)])
def test_noise_has_hardly_any_outliers(phi, skewed, most):
    found = [find_anomalies(step_times(100, seed, phi, skewed=skewed).tolist(), 0) for seed in range(100)]
    assert sum(len(each.outliers) for each in found) <= most * 100 * 100
    assert sum(each.period_steps is not None for each in found) <= 2


@pytest.mark.parametrize("steps", [10, 50, 600])
@pytest.mark.parametrize("phi", [0, 0.5])
@pytest.mark.parametrize("drift", [0.0, 5.0])
def test_the_interval_of_the_drift_covers_it(steps, phi, drift):
    line = 1 + drift / 100 * np.linspace(-0.5, 0.5, steps)
    found = [find_anomalies((step_times(steps, seed, phi) * line).tolist(), 0) for seed in range(200)]
    covered = np.mean([each.drift_ci95_pct[0] <= drift <= each.drift_ci95_pct[1] for each in found])
    assert 0.90 < covered < 0.99  # the standard error of 200 runs is 1.5 points
    assert np.median([each.drift_pct for each in found]) == pytest.approx(drift, abs=0.2)


@pytest.mark.parametrize(("steps", "period"), [(50, 10), (50, 7), (2000, 100)])
def test_stalls_at_a_regular_distance_are_found(steps, period):
    hits = 0
    for seed in range(40):
        times = step_times(steps, seed)
        times[period - 1 :: period] += 1.0
        found = find_anomalies(times.tolist(), 0)
        hits += found.period_steps == period and found.period_excess_s == pytest.approx(1.0, abs=0.15)
    assert hits >= 38


def test_stalls_at_any_distance_have_no_period():
    times = step_times(100, 1)
    times[[3, 10, 31, 55, 90]] += 1.0
    found = find_anomalies(times.tolist(), 0)
    assert [outlier.step for outlier in found.outliers] == [3, 10, 31, 55, 90]
    assert (found.period_steps, found.period_excess_s) == (None, None)


@pytest.mark.parametrize("steps", range(10))
def test_of_few_steps_nothing_is_known(steps):
    assert find_anomalies([1.0] * steps, 0) == Anomalies()


def test_equal_steps_are_calm():
    found = find_anomalies([12.9] * 30, 0)
    assert (found.outliers, found.period_steps) == ((), None)
    assert (found.drift_pct, *found.drift_ci95_pct) == pytest.approx((0, 0, 0), abs=1e-9)


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=10, max_size=120))
def test_any_series_is_accepted(times):
    found = find_anomalies(times, 5)
    assert all(5 <= outlier.step < 5 + len(times) for outlier in found.outliers)
    low, high = found.drift_ci95_pct
    assert low <= found.drift_pct <= high
