# SPDX-License-Identifier: Apache-2.0
"""Descriptive statistics of a series of steps."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from llmb.metrics.long_run import half_width

FEWEST_FOR_AUTOCORRELATION = 20
_MANY = 512
"""Longer series are worth loading NumPy for."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a series. Spread and interval are None for a single value; of means of several steps, so is the
    spread, and median and extremes are those of the means."""

    count: int
    """Number of steps."""
    mean: float
    median: float
    std: float | None
    """Sample standard deviation (n - 1)."""
    cv: float | None
    """Coefficient of variation, std / mean."""
    ci95: tuple[float, float] | None
    """95 % confidence interval of the mean, which holds for autocorrelated steps."""
    min: float
    max: float
    effective_count: float | None = None
    """Number of independent steps whose mean is as certain; None for fewer than 20 steps, and in older records."""


def describe(values: Sequence[float]) -> Statistics:
    """Statistics of finite ``values`` in step order.

    Raises ValueError for an empty series or a value that is not finite.
    """
    count = len(values)
    if not count:
        raise ValueError("statistics of an empty sample")
    mean, median, low, high = _summary(values)
    mean = min(max(mean, low), high)  # rounding gives equal values a mean beside them, and so a spread
    if not math.isfinite(mean):
        raise ValueError("statistics of values that are not finite")
    if count == 1:
        return Statistics(count, mean, median, None, None, None, low, high)
    deviations = _deviations(values, mean)
    squares, neighbors = _products(deviations)
    std, half = math.sqrt(squares / (count - 1)), half_width(deviations)
    return Statistics(
        count=count,
        mean=mean,
        median=median,
        std=std,
        cv=std / mean if mean else None,
        ci95=(mean - half, mean + half),
        min=low,
        max=high,
        effective_count=_effective_count(count, neighbors / squares if squares else 0.0),
    )


def describe_means(values: Sequence[float], steps: Sequence[int], error: float = 0.0) -> Statistics:
    """Statistics of consecutive steps of which finite ``values`` are the means: the first of the first ``steps``, and
    so on. Their mean is off by at most ``error``, which widens the interval."""
    count = sum(steps)
    mean = math.fsum(value * number for value, number in zip(values, steps, strict=True)) / count
    _, median, low, high = _summary(values)
    half = error + (half_width([value - mean for value in values]) if len(values) > 1 else 0.0)
    return Statistics(count, mean, median, None, None, (mean - half, mean + half) if half else None, low, high)


def _effective_count(count: int, correlation: float) -> float | None:
    """Effective count of a series with lag-1 ``correlation``, as if it were AR(1); negative correlation does not count.

    In a short series the correlation comes out too low by about (1 + 4 rho) / n (Kendall, Biometrika 41, 1954).
    """
    if count < FEWEST_FOR_AUTOCORRELATION:
        return None
    unbiased = min(max((count * correlation + 1) / (count - 4), 0.0), 1.0)
    return max(1.0, count * (1 - unbiased) / (1 + unbiased))


def _summary(values: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, median, minimum and maximum."""
    count = len(values)
    middle = count // 2
    if count <= _MANY:
        ordered = sorted(values)
        median = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return math.fsum(values) / count, median, ordered[0], ordered[-1]
    import numpy as np

    array = np.asarray(values, float)
    return float(array.mean()), float(np.median(array)), float(array.min()), float(array.max())


def _deviations(values: Sequence[float], mean: float) -> Sequence[float]:
    if len(values) <= _MANY:
        return [value - mean for value in values]
    import numpy as np

    return cast("Sequence[float]", np.asarray(values, float) - mean)


def _products(deviations: Sequence[float]) -> tuple[float, float]:
    """The sum of squares, and that of the products of neighbors."""
    if len(deviations) <= _MANY:
        squares = math.fsum(value * value for value in deviations)
        return squares, math.fsum(value * after for value, after in pairwise(deviations))
    import numpy as np

    array = np.asarray(deviations)
    return float(array @ array), float(array[:-1] @ array[1:])
