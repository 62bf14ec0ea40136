# SPDX-License-Identifier: Apache-2.0
"""Which of an ordered list of candidates changed the step time, with as few runs as their noise allows. Pure.

The first candidate is known to be as before, the last one as after, and one candidate between made the change. What is
known of it is a probability for each candidate. Each run multiplies the probabilities by how likely its mean is before
and after, by Student's t, as the noise is itself an estimate. The next candidate to run is the one that is closest to
being as likely before as after; the search ends as soon as one candidate, or those between which only skipped ones are,
has the probability that is wanted. A wrong run is thus outvoted, not final.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from llmb.metrics.group_difference import REPEATS, RunMean, decide, group_difference

CONFIDENCE = 0.95
MOST_RUNS = 24
"""Runs of one candidate; more would not tell either."""
LEAST_NOISE = 1e-4
"""Repeats that agree better than this do so by chance, or because a clock is coarse."""
BETWEEN = 0.001
"""Probability that a candidate is called neither before nor after though it is one of them."""


@dataclass(frozen=True, slots=True)
class Observations:
    """``means_s``: of every run, by the place of its candidate; ``skipped``: places of candidates that cannot run."""

    count: int
    means_s: Mapping[int, Sequence[float]]
    skipped: frozenset[int] = frozenset()

    def of(self, place: int) -> Sequence[float]:
        return self.means_s.get(place, ())


@dataclass(frozen=True, slots=True)
class Measure:
    """Run the candidate at ``place`` so many times more."""

    place: int
    runs: int


@dataclass(frozen=True, slots=True)
class BisectFinding:
    """The change came with one of the candidates ``first`` to ``last``; those but the last were skipped."""

    first: int
    last: int
    probability: float


@dataclass(frozen=True, slots=True)
class Stuck:
    """The search cannot go further; ``place`` is the candidate that is the reason, if one is."""

    reason: str
    place: int | None = None


@dataclass(frozen=True, slots=True)
class _Levels:
    """Logarithms of the step time before and after, the noise between runs, and what the noise was estimated from."""

    before: float
    after: float
    noise: float
    freedom: int
    counts: tuple[int, int]

    def error(self, side: int, runs: int = 1) -> float:
        """Standard error of the difference between the mean of ``runs`` runs and a level."""
        return self.noise * math.sqrt(1 / runs + 1 / self.counts[side])


Step = Measure | BisectFinding | Stuck


def next_step(known: Observations, confidence: float = CONFIDENCE) -> Step:
    """What to run next, or the end of the search. Raises ValueError for fewer than two candidates."""
    if known.count < 2:
        raise ValueError("a search is between two candidates at least")
    return _ends(known) or _inner_step(known, confidence)


def probabilities(known: Observations) -> list[float] | None:
    """That the change came with each candidate; None while too little is known of the first and the last one."""
    if min(len(known.of(0)), len(known.of(known.count - 1))) < REPEATS:
        return None
    return _posterior(known, _levels(known))


def _ends(known: Observations) -> Step | None:
    """Runs that the first and the last candidate still need before there is a difference to look for.

    The one with fewer runs is next: run one at a time, they alternate, and drift is not taken for a difference.
    """
    last = known.count - 1
    if ends := {0, last} & known.skipped:
        return Stuck("it cannot be skipped: it is one of the two that are compared", min(ends))
    fewer = 0 if len(known.of(0)) <= len(known.of(last)) else last
    if (missing := REPEATS - len(known.of(fewer))) > 0:
        return Measure(fewer, missing)
    difference = group_difference(_means(known.of(0)), _means(known.of(last)))
    decision = decide(difference, 0)
    if decision.verdict in ("regressed", "improved"):
        return None
    if not decision.more_runs or len(known.of(fewer)) >= MOST_RUNS:
        change = f"the last candidate differs from the first by {difference.delta_pct:+.1f} %"
        return Stuck(f"{change}, which is within the noise: there is no change to look for")
    return Measure(fewer, math.ceil(decision.more_runs / 2))


def _inner_step(known: Observations, confidence: float) -> Step:
    levels = _levels(known)
    posterior = _posterior(known, levels)
    if (place := _between(known, levels)) is not None:
        return Stuck("it is neither as before nor as after: more than one candidate changed the step time", place)
    after = [math.fsum(posterior[: place + 1]) for place in range(known.count)]
    open_ = [
        place
        for place in range(1, known.count - 1)
        if place not in known.skipped and 1 - confidence < after[place] < confidence
    ]
    if not open_:
        return _found(known, posterior, confidence)
    place = min(open_, key=lambda place: (round(abs(after[place] - 0.5), 9), place))
    if len(known.of(place)) >= MOST_RUNS:
        return Stuck(f"{MOST_RUNS} runs do not tell whether it is as before or as after", place)
    return Measure(place, max(1, _runs_needed(levels) - len(known.of(place))))


def _found(known: Observations, posterior: Sequence[float], confidence: float) -> Step:
    """The most likely candidate, with the skipped ones before it and those that they hide."""
    best = max(range(known.count), key=lambda place: posterior[place])
    first = last = best
    while first - 1 in known.skipped:
        first -= 1
    while last in known.skipped:
        last += 1
    probability = math.fsum(posterior[first : last + 1])
    if probability < confidence:  # no candidate's own is clear, yet the sum over them is: neighbors share it
        return Measure(_least_run(known), 1)
    return BisectFinding(first, last, probability)


def _least_run(known: Observations) -> int:
    inner = [place for place in range(1, known.count - 1) if place not in known.skipped]
    return min(inner, key=lambda place: (len(known.of(place)), place))


def _levels(known: Observations) -> _Levels:
    """The noise is that of repeats of the same candidate, all candidates together."""
    groups = [[math.log(mean) for mean in means] for means in known.means_s.values() if means]
    squares = math.fsum((value - fmean(group)) ** 2 for group in groups for value in group)
    freedom = sum(len(group) - 1 for group in groups)
    ends = [[math.log(mean) for mean in known.of(place)] for place in (0, known.count - 1)]
    noise = max(math.sqrt(squares / freedom), LEAST_NOISE)
    return _Levels(median(ends[0]), median(ends[1]), noise, freedom, (len(ends[0]), len(ends[1])))


def _posterior(known: Observations, levels: _Levels) -> list[float]:
    """Before any run, each candidate but the first is as likely as any other."""
    weights = []
    for change in range(1, known.count):
        terms = (
            _log_likelihood(math.log(mean), levels, after=place >= change)
            for place, means in known.means_s.items()
            if 0 < place < known.count - 1
            for mean in means
        )
        weights.append(math.fsum(terms))
    top = max(weights)
    shares = [math.exp(weight - top) for weight in weights]
    return [0.0, *(share / math.fsum(shares) for share in shares)]


def _log_likelihood(value: float, levels: _Levels, *, after: bool) -> float:
    """Log-likelihood of Student's t, without what is the same before and after."""
    error = levels.error(int(after))
    distance = (value - (levels.after if after else levels.before)) / error
    return -(levels.freedom + 1) / 2 * math.log1p(distance**2 / levels.freedom) - math.log(error)


def _runs_needed(levels: _Levels) -> int:
    """Runs of one candidate, so that its mean is on the right side of the middle between before and after."""
    separation = abs(levels.after - levels.before) / levels.noise
    return max(1, min(MOST_RUNS, math.ceil((2 * _t(levels.freedom, 0.975) / separation) ** 2)))


def _between(known: Observations, levels: _Levels) -> int | None:
    """A candidate whose runs are between before and after, and too far from both."""
    low, high = sorted((levels.before, levels.after))
    for place, means in known.means_s.items():
        if not 0 < place < known.count - 1 or len(means) < REPEATS:
            continue
        center = fmean(math.log(mean) for mean in means)
        distances = (
            abs(center - level) / levels.error(side, len(means))
            for side, level in enumerate((levels.before, levels.after))
        )
        if low < center < high and min(distances) > _t(levels.freedom, 1 - BETWEEN / 2):
            return place
    return None


def _means(values: Sequence[float]) -> list[RunMean]:
    return [RunMean(mean_s=value) for value in values]


def _t(freedom: int, probability: float) -> float:
    from scipy.special import stdtrit  # takes longer to load than most commands take to run

    return float(stdtrit(freedom, probability))
