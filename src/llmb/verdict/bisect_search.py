# SPDX-License-Identifier: Apache-2.0
"""Which of an ordered list of candidates changed the step time, with as few runs as their noise allows. Pure.

The first candidate is known to be as before, the last one as after, and one candidate between made the change. What is
known of it is a probability for each candidate. Each run multiplies the probabilities by how likely its mean is before
and after, by Student's t, as the noise is itself an estimate. The next candidate to run is the one that is closest to
being as likely before as after; the search ends as soon as one candidate, or those between which only skipped ones are,
has the probability that is wanted. A wrong run is thus outvoted, not final.

A candidate is its place in the list, and ``means_s`` has the mean step times of the runs of each one.
"""

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Literal

from llmb.metrics.group_difference import REPEATS, GroupDifference, RunMean, decide, group_difference, student_t

CONFIDENCE = 0.95
MOST_RUNS = 24
"""Runs of one candidate; more would not tell either."""
LEAST_NOISE = 1e-4
"""Repeats that agree better than this do so by chance, or because a clock is coarse."""
BETWEEN = 0.001
"""Probability that a candidate is called neither before nor after though it is one of them."""

Means = Sequence[Sequence[float]]
Status = Literal["measure", "found", "stuck"]


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Run the candidate at ``place`` so many times more, or the end of the search there."""

    status: Status
    place: int | None = None
    """The candidate that made the change; of a search that is stuck the one that is the reason, if one is."""
    runs: int | None = None
    first: int | None = None
    """If the change may as well have come with skipped candidates before ``place``: the first of these."""
    probability: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _Levels:
    """Logarithms of the step time before and after, how many runs each is from, and the noise between runs."""

    centers: tuple[float, float]
    counts: tuple[int, int]
    noise: float
    freedom: int

    def error(self, side: int, runs: int = 1) -> float:
        """Standard error of the difference between the mean of ``runs`` runs and a level."""
        return self.noise * math.sqrt(1 / runs + 1 / self.counts[side])

    def log_likelihood(self, mean_s: float, side: int) -> float:
        """Log-likelihood of Student's t, without what is the same before and after."""
        error = self.error(side)
        distance = (math.log(mean_s) - self.centers[side]) / error
        return -(self.freedom + 1) / 2 * math.log1p(distance**2 / self.freedom) - math.log(error)


def next_step(means_s: Means, skipped: Set[int] = frozenset()) -> SearchStep:
    """What to run next, or the end of the search. Neither the first nor the last candidate can be skipped."""
    if step := _compare_ends(means_s):
        return step
    levels = _levels(means_s)
    if (between := _between(means_s, levels)) is not None:
        why = "it is neither as before nor as after: more than one candidate changed the step time"
        return SearchStep("stuck", between, reason=why)
    posterior = _posterior(means_s, levels)
    first, last = _suspects(posterior, skipped)
    if (probability := math.fsum(posterior[first : last + 1])) >= CONFIDENCE:
        return SearchStep("found", last, first=first, probability=probability)
    after = list(accumulate(posterior))
    inner = [place for place in range(1, len(means_s) - 1) if place not in skipped]
    place = min(inner, key=lambda place: (round(abs(after[place] - 0.5), 9), place))
    if (runs := len(means_s[place])) >= MOST_RUNS:
        return SearchStep("stuck", place, reason=f"{MOST_RUNS} runs do not tell whether it is as before or as after")
    return SearchStep("measure", place, runs=max(1, _runs_needed(levels) - runs))


def probabilities(means_s: Means) -> list[float] | None:
    """That the change came with each candidate; None while too little is known of the first and the last one."""
    if min(len(means_s[0]), len(means_s[-1])) < REPEATS:
        return None
    return _posterior(means_s, _levels(means_s))


def ends_difference(means_s: Means) -> GroupDifference | None:
    """Between the last and the first candidate; None before both have runs."""
    first, last = ([RunMean(mean_s=mean) for mean in means_s[place]] for place in (0, -1))
    return group_difference(first, last) if first and last else None


def _compare_ends(means_s: Means) -> SearchStep | None:
    """Runs that the first and the last candidate still need before there is a difference to look for.

    The one with fewer runs is next: run one at a time, they alternate, and drift is not taken for a difference.
    """
    fewer = 0 if len(means_s[0]) <= len(means_s[-1]) else len(means_s) - 1
    if (missing := REPEATS - len(means_s[fewer])) > 0:
        return SearchStep("measure", fewer, runs=missing)
    difference = ends_difference(means_s)
    assert difference
    decision = decide(difference, 0)
    if decision.verdict in ("regressed", "improved"):
        return None
    if not decision.more_runs or len(means_s[fewer]) >= MOST_RUNS:
        change = f"the last candidate differs from the first by {difference.delta_pct:+.1f} %"
        return SearchStep("stuck", reason=f"{change}, which is within the noise: there is no change to look for")
    return SearchStep("measure", fewer, runs=math.ceil(decision.more_runs / 2))


def _suspects(posterior: Sequence[float], skipped: Set[int]) -> tuple[int, int]:
    """The first and the last of the most likely candidate and the skipped ones that its runs do not tell from it."""
    first = last = max(range(len(posterior)), key=lambda place: posterior[place])
    while first - 1 in skipped:
        first -= 1
    while last in skipped:
        last += 1
    return first, last


def _levels(means_s: Means) -> _Levels:
    """The noise is that of repeats of the same candidate, all candidates together."""
    groups = [[math.log(mean) for mean in means] for means in means_s if means]
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    freedom = sum(len(group) - 1 for group in groups)
    noise = max(math.sqrt(squares / freedom), LEAST_NOISE)
    first, last = groups[0], groups[-1]
    return _Levels((median(first), median(last)), (len(first), len(last)), noise, freedom)


def _posterior(means_s: Means, levels: _Levels) -> list[float]:
    """Before any run, each candidate but the first is as likely as any other."""
    weights = []
    for change in range(1, len(means_s)):
        terms = (
            levels.log_likelihood(mean_s, side=int(place >= change))
            for place, means in enumerate(means_s[1:-1], start=1)
            for mean_s in means
        )
        weights.append(math.fsum(terms))
    top = max(weights)
    shares = [math.exp(weight - top) for weight in weights]
    total = math.fsum(shares)
    return [0.0, *(share / total for share in shares)]


def _runs_needed(levels: _Levels) -> int:
    """Runs of one candidate, so that its mean is on the right side of the middle between before and after."""
    before, after = levels.centers
    separation = abs(after - before) / levels.noise
    return max(1, min(MOST_RUNS, math.ceil((2 * student_t(levels.freedom, 0.975) / separation) ** 2)))


def _between(means_s: Means, levels: _Levels) -> int | None:
    """A candidate whose runs are between before and after, and too far from both."""
    low, high = sorted(levels.centers)
    for place, means in enumerate(means_s[1:-1], start=1):
        if len(means) < REPEATS:
            continue
        center = fmean(map(math.log, means))
        distances = (abs(center - level) / levels.error(side, len(means)) for side, level in enumerate(levels.centers))
        if low < center < high and min(distances) > student_t(levels.freedom, 1 - BETWEEN / 2):
            return place
    return None
