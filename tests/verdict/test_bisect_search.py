# SPDX-License-Identifier: Apache-2.0
"""The search finds the candidate in noise, with few runs; wrong and missing runs do not mislead it."""

import random
from collections.abc import Callable

import pytest

from llmb.verdict.bisect_search import MOST_RUNS, SearchStep, next_step, probabilities

Means = list[list[float]]


def searched(
    count: int, mean_s: Callable[[int], float], skipped: frozenset[int] = frozenset()
) -> tuple[SearchStep, Means]:
    """The end of a search whose runs are drawn from ``mean_s``, and the runs that it took."""
    means: Means = [[] for _ in range(count)]
    while (step := next_step(means, skipped)).status == "measure":
        assert step.place is not None and step.runs
        means[step.place] += [mean_s(step.place) for _ in range(step.runs)]
    return step, means


def noisy(
    change: int, generator: random.Random, *, cv: float, slow_down: float, outliers: float = 0
) -> Callable[..., float]:
    def mean_s(place: int) -> float:
        level = 2.0 * (1 + slow_down if place >= change else 1)
        bad = 1.02 if generator.random() < outliers else 1
        return level * bad * (1 + generator.gauss(0, cv))

    return mean_s


@pytest.mark.parametrize(
    ("count", "slow_down", "outliers", "runs"),
    [(8, 0.03, 0, 11), (16, 0.03, 0, 12.5), (16, -0.03, 0, 12.5), (64, 0.03, 0, 16), (16, 0.03, 0.05, 14.5)],
)
def test_the_change_is_found_in_noise_with_few_runs(count: int, slow_down: float, outliers: float, runs: float) -> None:
    """Six of the runs are those of the two known candidates; a search without noise needs log2 of the others."""
    found, taken, trials = 0, 0, 120
    for seed in range(trials):
        generator = random.Random(seed)
        change = generator.randrange(1, count)
        step, means = searched(count, noisy(change, generator, cv=0.005, slow_down=slow_down, outliers=outliers))
        found += step.status == "found" and step.first == step.place == change
        taken += sum(map(len, means))
    assert found / trials >= 0.95
    assert taken / trials <= runs


def test_the_probability_that_is_reported_holds() -> None:
    """A small change in the same noise: searches are wrong about as often as they say."""
    said, right, trials = 0.0, 0, 120
    for seed in range(trials):
        generator = random.Random(seed)
        change = generator.randrange(1, 8)
        step, _ = searched(8, noisy(change, generator, cv=0.005, slow_down=0.015))
        if step.probability:
            said += step.probability
            right += step.first == change
    assert right >= said - 0.05 * trials


def test_the_two_known_candidates_are_run_first() -> None:
    assert next_step([[], [], [], []]) == SearchStep("measure", 0, runs=3)
    assert next_step([[1.0, 1.01, 0.99], [], [], []]) == SearchStep("measure", 3, runs=3)
    assert next_step([[1.0], [], [], []]) == SearchStep("measure", 3, runs=3)  # one at a time, they alternate
    assert probabilities([[1.0, 1.01, 0.99], [], [], []]) is None
    known: Means = [[1.0, 1.001, 0.999], [], [], [1.1, 1.101, 1.099]]
    assert next_step(known) == SearchStep("measure", 1, runs=1)
    assert probabilities(known) == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3])


def test_two_candidates_need_no_further_run() -> None:
    known: Means = [[1.0, 1.001, 0.999], [1.1, 1.101, 1.099]]
    assert next_step(known) == SearchStep("found", 1, first=1, probability=1.0)


def test_without_a_difference_there_is_nothing_to_look_for() -> None:
    same = [1.0, 1.01, 0.99, 1.0] * 3
    step = next_step([same, [], [], same])
    assert step.status == "stuck" and "within the noise" in str(step.reason)


def test_a_difference_that_is_not_clear_yet_needs_more_runs_of_both() -> None:
    step = next_step([[1.0, 1.02, 0.98], [], [], [1.02, 1.05, 1.03]])
    assert (step.status, step.place) == ("measure", 0) and step.runs and step.runs <= MOST_RUNS


def test_candidates_that_cannot_run_are_left_in_the_answer() -> None:
    for change in (3, 4, 5):
        step, means = searched(8, lambda place, change=change: 1.1 if place >= change else 1.0, frozenset({3, 4}))
        assert (step.status, step.first, step.place) == ("found", 3, 5)
        assert not means[3] and not means[4]
    step, _ = searched(8, lambda place: 1.1 if place >= 6 else 1.0, frozenset({3, 4}))
    assert (step.status, step.first, step.place) == ("found", 6, 6)


def test_two_changes_are_reported_instead_of_one() -> None:
    generator = random.Random(1)

    def mean_s(place: int) -> float:
        return (1.0 + 0.03 * (place >= 2) + 0.03 * (place >= 6)) * (1 + generator.gauss(0, 0.002))

    step, _ = searched(9, mean_s)
    assert step.status == "stuck" and step.place is not None and 2 <= step.place < 6
    assert "more than one candidate" in str(step.reason)
