# SPDX-License-Identifier: Apache-2.0
"""Finds anomalies in step times, lasting changes in histories of runs, and the steady part of a run."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import median

import numpy as np

from llmb.base.statistics import (
    LEAST_SPREAD,
    MAD_TO_STD,
    OUTLIER_SPREADS,
    Floats,
    ar1_variances,
    block_means,
    cosines,
    despike,
    level_and_spread,
    student_t,
)
from llmb.catalogue.records import Window
from llmb.catalogue.window import STEADY

FEWEST_STEPS = 10
FEWEST_STALLS = 3
LEAST_HITS = 0.8
"""Minimum fraction of slow steps among the steps that are one period apart."""
LEAST_PERIODIC = 0.6
"""Minimum fraction of the slow steps that are one period apart."""
MOST_PERIODS = 200
"""Maximum number of distances between slow steps to try as the period."""
FALSE_ALARM_RATE = 0.01
FEWEST_RUNS = 3
"""Minimum number of runs on each side of a change."""
MOST_PAIRED = 1000
"""Maximum number of runs among which pairs of changes are searched for; the number of pairs grows quadratically."""
LONG_HISTORY = 20
"""Minimum number of runs for the removal of outliers."""


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that is much slower or, with an excess below 0, much faster than its neighbors."""

    step: int
    step_time_s: float
    excess_s: float


@dataclass(frozen=True, slots=True)
class Anomalies:
    """Anomalies of a window; unknown values are None or empty. The period is None if no stall is periodic."""

    outliers: tuple[Outlier, ...] = ()
    drift_pct: float | None = None
    """Change of the step time from the first to the last step, in percent of the mean."""
    drift_ci95_pct: tuple[float, float] | None = None
    period_steps: int | None = None
    period_excess_s: float | None = None
    """Median time that a periodic stall adds to its step."""


def find_anomalies(step_times_s: Sequence[float], first_step: int) -> Anomalies:
    """Find anomalies of steps numbered from ``first_step``; all are unknown for fewer than 10. Times must be finite."""
    if len(step_times_s) < FEWEST_STEPS:
        return Anomalies()
    calm = despike(step_times_s)
    outliers = tuple(
        Outlier(first_step + place, float(step_times_s[place]), float(step_times_s[place] - calm[place]))
        for place in np.flatnonzero(calm != step_times_s).tolist()
    )
    drift, half = _drift(calm)
    slow = {outlier.step - first_step: outlier.excess_s for outlier in outliers if outlier.excess_s > 0}
    period = _period(sorted(slow), len(calm)) if slow else None
    return Anomalies(
        outliers=outliers,
        drift_pct=drift,
        drift_ci95_pct=(drift - half, drift + half),
        period_steps=period[0] if period else None,
        period_excess_s=median(slow[index] for index in period[1]) if period else None,
    )


def _drift(values: Floats) -> tuple[float, float]:
    blocks, size = block_means(values)
    count = len(blocks)
    line, rows, correction = _drift_weights(count)
    error = math.sqrt(float(((rows @ blocks) ** 2).mean())) * (correction if size == 1 else 1)
    scale = 100 * (count - 1) / _line_length(count) / float(blocks.mean())
    return float(line @ blocks) * scale, student_t(len(rows)) * error * scale


def _line_length(count: int) -> float:
    """Return the norm of the vector of ``count`` positions relative to their middle."""
    return math.sqrt(count * (count * count - 1) / 12)


@lru_cache(maxsize=16)
def _drift_weights(count: int) -> tuple[Floats, Floats, float]:
    line = (np.arange(count) - (count - 1) / 2) / _line_length(count)
    waves = cosines(count, 1)
    mirror = waves @ line  # a reflection turns the line in the waves into the first one
    mirror[0] += math.copysign(math.sqrt(mirror @ mirror), mirror[0])
    across = 2 / (mirror @ mirror) * (mirror @ waves)
    rows = waves[1:] - np.outer(mirror[1:], across)
    correction = math.sqrt(float(ar1_variances(line) / ar1_variances(rows).mean()))
    return line, rows, correction


def _period(slow: Sequence[int], count: int) -> tuple[int, list[int]] | None:
    near = pairwise(slow), zip(slow, slow[2:], strict=False)
    distances = Counter(after - before for pairs in near for before, after in pairs)
    best: tuple[int, list[int]] | None = None
    for period, _ in distances.most_common(MOST_PERIODS):
        phase, hits = Counter(index % period for index in slow).most_common(1)[0]
        expected = len(range(phase, count, period))
        if (
            period > 1
            and hits >= max(FEWEST_STALLS, LEAST_HITS * expected, LEAST_PERIODIC * len(slow))
            and (best is None or hits > len(best[1]))
        ):
            best = period, [index for index in slow if index % period == phase]
    return best


@dataclass(frozen=True, slots=True)
class Level:
    """Consecutive runs, by index, whose step times differ only by chance; their mean is geometric."""

    runs: range
    mean_s: float


def find_levels(means_s: Sequence[float]) -> list[Level]:
    """Return the levels of a history of runs' mean step times, oldest first. ``means_s`` must be positive."""
    if not means_s:
        return []
    logs = np.log(means_s)
    logs = despike(logs) if len(logs) >= LONG_HISTORY else logs
    return [
        Level(part, math.exp(float(logs[part.start : part.stop].mean()))) for part in _parts(logs, range(len(logs)))
    ]


def changes_pct(levels: Sequence[Level]) -> list[float]:
    """Return the change from each level to the next one, in percent."""
    return [100 * (after.mean_s / before.mean_s - 1) for before, after in pairwise(levels)]


def _parts(logs: Floats, part: range) -> Iterator[range]:
    values = logs[part.start : part.stop]
    places = _split(values, 1) or _split(values, 2)
    if not places:
        yield part
        return
    for first, end in pairwise((part.start, *(part.start + place for place in places), part.stop)):
        yield from _parts(logs, range(first, end))


def _split(values: Floats, steps: int) -> list[int] | None:
    from scipy.special import stdtr

    count = len(values)
    if count < FEWEST_RUNS * (steps + 1) or (steps == 2 and count > MOST_PAIRED):
        return None
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    if steps == 1:
        begins, ends = np.zeros(count - 2 * FEWEST_RUNS + 1, int), np.arange(FEWEST_RUNS, count - FEWEST_RUNS + 1)
    else:
        begins, ends = (place + FEWEST_RUNS for place in np.triu_indices(count - 2 * FEWEST_RUNS + 1, FEWEST_RUNS))
    sizes = ends - begins
    between = (sums[ends] - sums[begins]) ** 2 * count / (sizes * (count - sizes))
    best = int(np.argmax(between))
    within = float(((values - values.mean()) ** 2).sum() - between[best])
    if between[best] <= 0:
        return None
    t = math.sqrt(float(between[best]) * (count - 2) / within) if within > 0 else math.inf
    chance = 2 * len(sizes) * float(stdtr(count - 2, -t))
    return (
        [place for place in (int(begins[best]), int(ends[best])) if place] if chance <= FALSE_ALARM_RATE / 2 else None
    )


LEAST_STEADY = 8
LEAST_SHARE = 1 / 3
"""Minimum fraction of the run's steps in the steady part, which has at least ``LEAST_STEADY`` steps."""
PENALTY = 18.0  # six times the usual 3 ln n, as steps are autocorrelated: like AR(1) with coefficient 0.5
NO_STEADY_STATE = (
    f"no steady state: at least {FEWEST_STEPS} steps after the first one are required, a third of them (and at least "
    f"{LEAST_STEADY}) at one level; specify the steps instead, such as --window 35-44"
)
MOST_BLOCKS = 512
"""A longer series is first replaced by the medians of blocks of equal size."""


def steady_window(step_times_s: Sequence[float], first_step: int) -> Window | None:
    """Return the longest part of the steps at a constant level; None if it is too short."""
    count = len(step_times_s)
    if count < FEWEST_STEPS:
        return None
    values = np.asarray(step_times_s, float)
    size = -(-count // MOST_BLOCKS)
    blocks = values if size == 1 else np.median(values[: count // size * size].reshape(-1, size), axis=1)
    first, last = max(_segments(despike(blocks)), key=lambda part: part[1] - part[0])
    first, last = first * size, count - 1 if last == len(blocks) - 1 else (last + 1) * size - 1
    first, last = _without_outlying_ends(values, first, last)
    if last - first + 1 < max(LEAST_STEADY, LEAST_SHARE * count):
        return None
    return Window(first=first_step + first, last=first_step + last, rule=STEADY)


def _segments(values: Floats) -> list[tuple[int, int]]:
    # Of differences, so that changes of level do not count as noise.
    noise = MAD_TO_STD * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    variance = max(noise, LEAST_SPREAD * abs(float(np.median(values)))) ** 2
    threshold = PENALTY * math.log(len(values)) * variance
    changes, open_parts = [], [(0, len(values) - 1)]
    while open_parts:
        first, last = open_parts.pop()
        split = _second_level(values[first : last + 1], threshold)
        if split is None:
            changes.append((first, last))
        else:
            open_parts += [(first, first + split - 1), (first + split, last)]
    return sorted(changes)


def _second_level(values: Floats, threshold: float) -> int | None:
    count = len(values)
    if count < 2:
        return None
    sums = np.cumsum(values - values.mean())[:-1]
    sizes = np.arange(1, count)
    gains = sums**2 * (1 / sizes + 1 / (count - sizes))
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > threshold else None


def _without_outlying_ends(values: Floats, first: int, last: int) -> tuple[int, int]:
    level, below, above = level_and_spread(values[first : last + 1])

    def outlying(index: int) -> bool:
        return not -OUTLIER_SPREADS * below <= float(values[index]) - level <= OUTLIER_SPREADS * above

    while first < last and outlying(first):
        first += 1
    while last > first and outlying(last):
        last -= 1
    return first, last
