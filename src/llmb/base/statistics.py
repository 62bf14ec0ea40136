# SPDX-License-Identifier: Apache-2.0
"""Descriptive and robust statistics of a series of steps, and of repeats."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, stdev
from typing import Any, TypeAlias

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[Any]
Series: TypeAlias = Sequence[float] | Floats

PRIOR_AUTOCORRELATION = 0.55
MOST_BLOCKS = 512
"""A longer series is first averaged in blocks of equal size, so that the cost stays linear."""


def student_t(freedom: float, probability: float = 0.975) -> float:
    """Return the quantile at ``probability`` of Student's t distribution with ``freedom`` degrees of freedom."""
    from scipy.special import stdtrit  # most commands do not need SciPy

    return float(stdtrit(freedom, probability))


def half_width(deviations: Floats) -> float:
    """Return half the width of the mean's 95 % confidence interval (EWC, Lazarus et al. 2018). ``deviations``: in step
    order."""
    blocks, size = block_means(deviations)
    waves = cosines(len(blocks))
    correction = _correction(len(blocks)) if size == 1 else 1.0
    variance = correction * size * float(((waves @ blocks) ** 2).mean())
    return student_t(len(waves)) * math.sqrt(variance / len(deviations))


def block_means(values: Series) -> tuple[Floats, int]:
    """Return the means of consecutive complete blocks, and the block size: 1 for up to ``MOST_BLOCKS`` values."""
    size = -(-len(values) // MOST_BLOCKS)
    whole = np.asarray(values, float)[: len(values) // size * size]
    return whole.reshape(-1, size).mean(axis=1), size


@lru_cache(maxsize=16)
def cosines(count: int, more: int = 0) -> Floats:
    """Return the cosines of the lowest frequencies over ``count`` steps, one per row, with norm 1 and sum 0."""
    terms = max(min(2, count // 4), round(count ** (2 / 3) / 3)) + more
    angles = np.pi / count * np.outer(np.arange(1, terms + 1), np.arange(count) + 0.5)
    waves: Floats = np.sqrt(2 / count) * np.cos(angles)
    return waves


def ar1_variances(weights: Floats) -> Floats:
    """Return the variance of each row's weighted sum of an AR(1) series with variance 1 and the prior correlation."""
    places = np.arange(weights.shape[-1])
    correlations = PRIOR_AUTOCORRELATION ** np.abs(np.subtract.outer(places, places))
    variances: Floats = ((weights @ correlations) * weights).sum(axis=-1)
    return variances


@lru_cache(maxsize=16)
def _correction(count: int) -> float:
    """Return the variance of the mean divided by its expected estimate, for the prior AR(1) series."""
    of_mean = ar1_variances(np.full(count, 1 / math.sqrt(count)))
    return float(of_mean / ar1_variances(cosines(count)).mean())


MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
LEAST_SPREAD = 0.001
"""Minimum spread, relative to the level: logs print two to four digits, and equal values have no spread."""
OUTLIER_SPREADS = 5.0
SPIKE_NEIGHBORS = 3
"""Number of neighbors on each side of a step; at most this many consecutive outliers are a spike."""


def level_and_spread(values: Series) -> tuple[float, float, float]:
    """Return the median, and the spreads below and above it as standard deviations of a normal distribution."""
    array = np.asarray(values, float)
    level = float(np.median(array))
    below, above = (float(np.median(side)) for side in (level - array[array <= level], array[array >= level] - level))
    least = LEAST_SPREAD * abs(level)
    return level, max(MAD_TO_STD * below, least), max(MAD_TO_STD * above, least)


def despike(values: Series) -> Floats:
    """Return ``values`` (at least 4) with outliers replaced by the running median of 7 (Hampel filter)."""
    array, half = np.asarray(values, float), SPIKE_NEIGHBORS
    padded = np.concatenate((array[half:0:-1], array, array[-2 : -half - 2 : -1]))
    windows = sliding_window_view(padded, 2 * half + 1)
    running = np.sort(windows, axis=1)[:, half]
    # Without the value itself, because its difference from the median of all seven is often 0.
    others = np.sort(windows[:, [*range(half), *range(half + 1, 2 * half + 1)]], axis=1)
    rest = array - others[:, half - 1 : half + 1].mean(axis=1)
    level, below, above = level_and_spread(rest)
    least = LEAST_SPREAD * abs(float(np.median(array)))
    low, high = OUTLIER_SPREADS * max(below, least), OUTLIER_SPREADS * max(above, least)
    spikes = (array < running + level - low) | (array > running + level + high)
    return np.where(spikes, running, array)


FEWEST_FOR_AUTOCORRELATION = 20


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a series. ``std`` and ``cv`` are None for a single step or for means of several steps."""

    count: int
    """Number of steps, or of runs in statistics of their means."""
    mean: float
    median: float
    std: float | None
    """Sample standard deviation (n - 1)."""
    cv: float | None
    """Coefficient of variation, std / mean; None if the mean is 0."""
    ci95: tuple[float, float] | None
    """95 % confidence interval of the mean, which holds for autocorrelated steps; None for one mean without error."""
    min: float
    max: float
    effective_count: float | None = None
    """Number of independent steps with the same uncertainty; None for fewer than 20 steps, means, and older records."""


def describe(values: Sequence[float]) -> Statistics:
    """Return statistics of ``values`` in step order; raise ValueError if there are none, or if one is not finite."""
    count = len(values)
    if not count:
        raise ValueError("statistics of an empty sample")
    array = np.asarray(values, float)
    if not np.isfinite(array).all():
        raise ValueError("statistics of values that are not finite")
    low, high, middle = float(array.min()), float(array.max()), float(np.median(array))
    mean = min(max(float(array.mean()), low), high)  # rounding may move the mean of equal values
    if count == 1:
        return Statistics(count, mean, middle, None, None, None, low, high)
    deviations = array - mean
    squares, neighbors = float(deviations @ deviations), float(deviations[:-1] @ deviations[1:])
    std, half = math.sqrt(squares / (count - 1)), half_width(deviations)
    return Statistics(
        count=count,
        mean=mean,
        median=middle,
        std=std,
        cv=std / mean if mean else None,
        ci95=(mean - half, mean + half),
        min=low,
        max=high,
        effective_count=_effective_count(count, neighbors / squares if squares else 0.0),
    )


def describe_means(values: Sequence[float], steps: Sequence[int], error: float = 0.0) -> Statistics:
    """Return statistics of all steps; ``values[i]`` is the mean of ``steps[i]`` steps, and ``error`` the mean's largest
    error."""
    array = np.asarray(values, float)
    mean = float(np.average(array, weights=steps))
    half = error + (half_width(array - mean) if len(array) > 1 else 0.0)
    interval = (mean - half, mean + half) if half else None
    middle, low, high = float(np.median(array)), float(array.min()), float(array.max())
    return Statistics(sum(steps), mean, middle, None, None, interval, low, high)


def are_between(low: float, values: Sequence[float], high: float) -> bool:
    """Return whether all values are strictly between ``low`` and ``high``; NaN is not."""
    array = np.asarray(values, float)
    return bool(((low < array) & (array < high)).all())


def _effective_count(count: int, correlation: float) -> float | None:
    """Correlations of short series are too low by about (1 + 4 rho) / n (Kendall, Biometrika 41, 1954)."""
    if count < FEWEST_FOR_AUTOCORRELATION:
        return None
    unbiased = min(max((count * correlation + 1) / (count - 4), 0.0), 1.0)
    return max(1.0, count * (1 - unbiased) / (1 + unbiased))


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of repeats' mean step times, in seconds; ``std`` and ``cv_pct`` (percent) are None for one repeat."""

    count: int
    mean: float
    median: float
    std: float | None
    cv_pct: float | None
    min: float
    max: float


def spread_of(means_s: Sequence[float]) -> Spread | None:
    """Return the spread of repeats; None if there are no repeats."""
    if not means_s:
        return None
    mean, std = fmean(means_s), stdev(means_s) if len(means_s) > 1 else None
    cv_pct = None if std is None else 100 * std / mean
    return Spread(len(means_s), mean, median(means_s), std, cv_pct, min(means_s), max(means_s))
