# SPDX-License-Identifier: Apache-2.0
"""The pace of a run, the forecast of its end, and how it stands to its expectation."""

import math
import random

import pytest

from llmb.analysis.watched import Expected, compare_with, find_pace, forecast
from llmb.runs.steps import StepNews


def news(times: list[float], first: int = 0) -> list[StepNews]:
    return [StepNews(first + number, time_s, 5.0) for number, time_s in enumerate(times)]


def noisy(count: int, mean: float, cv: float = 0.01, seed: int = 1) -> list[float]:
    source = random.Random(seed)
    return [source.gauss(mean, cv * mean) for _ in range(count)]


def test_without_a_step_there_is_no_pace() -> None:
    assert find_pace([]) is None
    assert find_pace([StepNews(0, 1.0, 5.0, profiled=True), StepNews(1, math.nan, 5.0)]) is None


def test_the_first_step_is_left_out_while_there_are_few() -> None:
    pace = find_pace(news([30.0, 1.0, 1.2]))
    assert pace and not pace.steady
    assert (pace.first_step, pace.last_step, pace.step_time_s.median) == (1, 2, 1.1)
    only = find_pace(news([30.0]))
    assert only and only.step_time_s.mean == 30.0


def test_warm_up_and_profiled_steps_do_not_count() -> None:
    steps = news([30.0, 8.0, *noisy(40, 1.0)], first=100)
    steps[20] = steps[20]._replace(step_time_s=9.0, profiled=True)
    pace = find_pace(steps)
    assert pace and pace.steady and pace.before_s is None
    assert 102 <= pace.first_step <= 104 and pace.last_step == 141
    assert pace.step_time_s.max < 1.1


def test_what_has_followed_a_change_counts() -> None:
    pace = find_pace(news([*noisy(40, 1.0), *noisy(15, 1.5, seed=2)]))
    assert pace and pace.steady
    assert pace.first_step == 40
    assert pace.step_time_s.median == pytest.approx(1.5, rel=0.02)
    assert pace.before_s == pytest.approx(1.0, rel=0.02)


def test_a_few_slow_steps_at_the_end_are_no_change_yet() -> None:
    pace = find_pace(news([*noisy(40, 1.0), *noisy(5, 1.5, seed=2)]))
    assert pace and pace.before_s is None
    assert pace.step_time_s.median == pytest.approx(1.0, rel=0.02)


def test_the_forecast_is_the_mean_of_the_remaining_steps() -> None:
    pace = find_pace(news([5.0, *noisy(40, 2.0)]))
    assert pace
    ends = forecast(pace, 100, since_last_s=1.5)
    assert ends.steps_left == 100
    assert ends.remaining_s == pytest.approx(100 * pace.step_time_s.mean - 1.5)
    assert ends.remaining_s_ci95 and ends.remaining_s_ci95[0] < ends.remaining_s < ends.remaining_s_ci95[1]
    assert forecast(pace, 0, since_last_s=1.5).remaining_s == 0
    assert forecast(pace, 1, since_last_s=900.0).remaining_s == 0


def test_steps_that_are_not_steady_have_no_interval() -> None:
    pace = find_pace(news([1.0, 2.0, 1.0]))
    assert pace and forecast(pace, 10, 0.0).remaining_s_ci95 is None


@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_the_interval_of_the_forecast_covers_the_end(correlation: float) -> None:
    source, covered, runs = random.Random(7), 0, 200
    for _ in range(runs):
        noise, times = 0.0, []
        for _ in range(160):
            noise = correlation * noise + source.gauss(0, 0.02)
            times.append(1.0 + noise)
        pace = find_pace(news(times[:60]))
        assert pace
        after = pace.last_step + 1
        ends = forecast(pace, 160 - after, 0.0)
        if ends.remaining_s_ci95:
            covered += ends.remaining_s_ci95[0] <= sum(times[after:]) <= ends.remaining_s_ci95[1]
    assert covered / runs > 0.88


@pytest.mark.parametrize(
    ("times", "standing"),
    [
        ([2.0] * 4, "too early"),
        ([2.0, 1.0] * 4, "too early"),
        (noisy(30, 1.0), "as expected"),
        (noisy(30, 1.15), "slower"),
        (noisy(30, 0.85), "faster"),
        (noisy(30, 1.05), "undecided"),
    ],
)
def test_standing(times: list[float], standing: str) -> None:
    comparison = compare_with(Expected(step_time_s=1.0, source="as given", tolerance_pct=5.0), find_pace(news(times)))
    assert comparison.standing == standing
    assert (comparison.delta_pct is None) == (standing == "too early")
    assert (comparison.more_steps is not None) == (standing == "too early")


def test_before_the_first_step_it_is_too_early() -> None:
    assert compare_with(Expected(step_time_s=1.0, source="", tolerance_pct=5.0), None).standing == "too early"


def test_who_looks_after_every_step_seldom_sees_a_false_difference() -> None:
    """At the border of the tolerance each look is a chance of an error, of which a 95 % interval would make many."""
    expected, alarms, runs = Expected(step_time_s=1.0, source="", tolerance_pct=5.0), 0, 100
    for seed in range(runs):
        times = noisy(60, 1.05, cv=0.02, seed=seed)
        looks = (compare_with(expected, find_pace(news(times[:count]))) for count in range(11, 61, 7))
        alarms += any(look.standing in ("slower", "faster") for look in looks)
    assert alarms / runs <= 0.1
