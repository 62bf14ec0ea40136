# SPDX-License-Identifier: Apache-2.0
"""Steps in a history: found where they are, and hardly ever where there are none."""

import math
import random
from collections.abc import Sequence
from statistics import NormalDist

import pytest
from scipy.stats import ttest_ind

from llmb.readers.anomalies import FALSE_ALARM_RATE, changes_pct, find_levels

HISTORIES = 2000


def history(seed: int, *parts: tuple[int, float], spread: float = 0.01) -> list[float]:
    """Run means: as many around each level as it has."""
    generator = random.Random(seed)
    return [level * generator.lognormvariate(0, spread) for count, level in parts for _ in range(count)]


def starts(means_s: Sequence[float]) -> list[int]:
    return [level.runs.start for level in find_levels(means_s)][1:]


@pytest.mark.parametrize("count", [6, 12, 40])
def test_a_history_without_a_change_hardly_ever_has_a_step(count: int) -> None:
    false = sum(bool(starts(history(seed, (count, 10.0)))) for seed in range(HISTORIES))
    chance = NormalDist(0, (FALSE_ALARM_RATE * (1 - FALSE_ALARM_RATE) / HISTORIES) ** 0.5)
    assert false / HISTORIES <= FALSE_ALARM_RATE + chance.inv_cdf(0.999)
    assert false > 0, "the rate is not kept by finding nothing"


@pytest.mark.parametrize(("before", "after"), [(8, 8), (20, 3), (3, 20)])
def test_a_step_of_five_spreads_is_found_at_its_place(before: int, after: int) -> None:
    found = [starts(history(seed, (before, 10.0), (after, 10.5))) for seed in range(200)]
    assert sum(one == [before] for one in found) >= 190


def test_several_steps_are_found_with_their_sizes() -> None:
    levels = find_levels(history(1, (10, 10.0), (10, 11.0), (10, 9.9)))
    assert [level.runs for level in levels] == [range(10), range(10, 20), range(20, 30)]
    assert changes_pct(levels) == pytest.approx([10, -10], abs=1)


def test_one_run_is_no_step() -> None:
    for count in (8, 19, 60):
        steady = history(2, (count, 10.0))
        for place in (0, 1, count // 2, count - 2, count - 1):
            disturbed = [*steady]
            disturbed[place] *= 1.5
            assert starts(disturbed) == []


@pytest.mark.parametrize("means_s", [[], [1.0], [1.0, 1.0, 2.0, 2.0], [1.0] * 30])
def test_few_or_equal_runs_have_no_step(means_s: Sequence[float]) -> None:
    assert starts(means_s) == []


def test_the_probability_is_that_of_students_test() -> None:
    """A history just beyond the rate, and one just below it, by an independent implementation."""
    for after in (10.15, 10.2, 10.25, 10.3, 10.35):
        means_s = history(3, (4, 10.0), (4, after))
        logs = [math.log(mean) for mean in means_s]
        splits = range(3, 6)
        least = min((float(ttest_ind(logs[:place], logs[place:]).pvalue), place) for place in splits)
        assert starts(means_s) == ([least[1]] if least[0] * len(splits) <= FALSE_ALARM_RATE / 2 else [])
