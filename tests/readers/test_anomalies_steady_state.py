# SPDX-License-Identifier: Apache-2.0
"""Where simulated runs with warm-up, checkpoints, throttling and noise are steady."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_series import step_times

from llmb.readers.anomalies import steady_window


def windows(make, count=100):
    found = [steady_window(make(seed).tolist(), 0) for seed in range(count)]
    return [(window.first, window.last) for window in found if window], sum(window is None for window in found)


@pytest.mark.parametrize("steps", [20, 50, 300, 3000])
@pytest.mark.parametrize(("phi", "skewed"), [(0, False), (0.5, False), (0, True)])
def test_noise_is_steady(steps, phi, skewed):
    count = 100 if steps < 1000 else 20
    found, lost = windows(lambda seed: step_times(steps, seed, phi, skewed=skewed), count)
    assert not lost
    assert sum(last - first + 1 >= 0.9 * steps for first, last in found) >= 0.95 * count


def test_warm_up_is_left_out_and_checkpoints_are_not():
    def run(seed):
        times = step_times(100, seed) + 20 * np.exp(-np.arange(100) / 2)  # 0.15 s, 3 spreads, is left at step 10
        times[9::10] += 3
        return times

    found, lost = windows(run)
    assert not lost
    first, last = np.array(found).T
    assert np.percentile(first, 5) >= 7
    assert np.percentile(first, 95) <= 20
    assert np.percentile(last, 5) >= 97


def test_a_slow_first_step_and_a_slow_last_step_are_left_out():
    times = step_times(50, 1)
    times[[0, -1]] = 40.0
    window = steady_window(times.tolist(), 100)
    assert (window.first, window.last, window.rule) == (101, 148, "auto")


@pytest.mark.parametrize(("change", "first", "last"), [(20, 20, 49), (35, 0, 34), (44, 0, 43)])
def test_the_longer_of_two_levels_is_the_steady_one(change, first, last):
    def run(seed):
        times = step_times(50, seed)
        times[change:] *= 1.04
        return times

    found, _ = windows(run)
    assert sum(abs(one - first) <= 2 and abs(other - last) <= 2 for one, other in found) >= 95


def test_a_run_that_keeps_changing_has_no_steady_state():
    steps = np.arange(60)
    assert steady_window((step_times(60, 1) * 1.1 ** (steps // 10)).tolist(), 0) is None


@pytest.mark.parametrize("steps", range(10))
def test_too_few_steps_have_none(steps):
    assert steady_window([1.0] * steps, 0) is None


@pytest.mark.parametrize("times", [[1.0] * 50, [12.9, 12.91] * 25, [0.02, 0.02, 0.03, 0.02, 0.02] * 10])
def test_rounded_times_are_steady(times):
    assert steady_window(times, 0) is not None


@given(st.lists(st.floats(min_value=1e-3, max_value=1e3), min_size=1, max_size=200), st.integers(0, 10**6))
def test_any_series_gives_a_window_inside_it(times, first_step):
    window = steady_window(times, first_step)
    if window:
        assert first_step <= window.first <= window.last < first_step + len(times)
        assert window.last - window.first + 1 >= max(8, len(times) / 3)
