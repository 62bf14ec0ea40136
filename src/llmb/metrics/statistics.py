# SPDX-License-Identifier: Apache-2.0
"""Descriptive and robust statistics of a series of steps."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import mul
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from numpy.typing import NDArray


PRIOR_AUTOCORRELATION = 0.55
MOST_BLOCKS = 512
"""A longer series is first averaged in blocks of equal size, so that the effort is linear."""
QUANTILES = (
    *(12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146),
    *(2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274),
    *(2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776),
    *(2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864),
    *(2.0796138447276795,),
)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom: up to as many as ``MOST_BLOCKS`` have coefficients.
SciPy, which has them, takes longer to load than most commands take to run."""


def half_width(deviations: Sequence[float]) -> float:
    """Half the 95 % confidence interval of the mean of a series of at least 2 steps, in step order.

    ``deviations`` are the steps' differences from that mean.
    """
    blocks, size = block_means(deviations)
    rows = cosines(len(blocks))
    squares = math.fsum(weighted_sum(row, blocks) ** 2 for row in rows)
    correction = _correction(len(blocks)) if size == 1 else 1.0
    variance = correction * size * squares / len(rows)
    return QUANTILES[len(rows) - 1] * math.sqrt(variance / len(deviations))


def weighted_sum(weights: Sequence[float], values: Sequence[float]) -> float:
    """Rounded once, so that it is the same on every machine."""
    return math.fsum(map(mul, weights, values))


def block_means(values: "Series") -> tuple[Sequence[float], int]:
    """``values`` as means of complete blocks, and the size of a block: 1 for up to ``MOST_BLOCKS`` values."""
    size = -(-len(values) // MOST_BLOCKS)
    if size == 1:
        return cast("Sequence[float]", values), 1
    import numpy as np

    whole = np.asarray(values, float)[: len(values) // size * size]
    means: list[float] = whole.reshape(-1, size).mean(axis=1).tolist()
    return means, size


@lru_cache(maxsize=16)
def cosines(count: int, more: int = 0) -> tuple[tuple[float, ...], ...]:
    """Orthogonal weights of the slowest movements of ``count`` steps, and of ``more``: each of length 1, of sum 0."""
    scale = math.sqrt(2 / count)
    terms = max(min(2, count // 4), round(count ** (2 / 3) / 3)) + more
    return tuple(
        tuple(scale * math.cos(math.pi * term * (step + 0.5) / count) for step in range(count))
        for term in range(1, terms + 1)
    )


def ar1_variance(weights: Sequence[float]) -> float:
    """Variance of the weighted sum of an AR(1) series with ``PRIOR_AUTOCORRELATION`` whose values have variance 1."""
    total, carried = 0.0, 0.0
    for weight in weights:
        total += weight * (weight + 2 * carried)
        carried = PRIOR_AUTOCORRELATION * (carried + weight)
    return total


@lru_cache(maxsize=16)
def _correction(count: int) -> float:
    """Variance of the mean over the expected estimate, of an AR(1) series with ``PRIOR_AUTOCORRELATION``."""
    rows = cosines(count)
    return ar1_variance((1 / math.sqrt(count),) * count) * len(rows) / math.fsum(map(ar1_variance, rows))


MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
LEAST_SPREAD = 0.001
"""Share of the level: logs print step times with two to four digits, and equal values have no spread."""
OUTLIER_SPREADS = 5.0
SPIKE_NEIGHBORS = 3
"""On each side; up to as many outliers in a row are still a spike."""
_SORTING_7 = (
    *((0, 6), (2, 3), (4, 5), (0, 2), (1, 4), (3, 6), (0, 1), (2, 5)),
    *((3, 4), (1, 2), (4, 6), (2, 3), (4, 5), (1, 2), (3, 4), (5, 6)),
)
"""Pairs whose exchange, where the first is greater, sorts seven values: a sorting network. On rows of values at once it
takes a third of the time of sorting each column."""
_SAMPLE, _MARGIN = 1 << 12, 1 << 8
"""Values of a series that tell where its median is, and how many of them on each side it is surely between."""
_SLICE = 1 << 14
"""Values whose neighbors are sorted at once: more would take much memory, and leave the core's cache."""

Floats: TypeAlias = "NDArray[Any]"
Series: TypeAlias = "Sequence[float] | Floats"


def level_and_spread(values: Series) -> tuple[float, float, float]:
    """The median, and the spreads below and above it, as standard deviations of a normal distribution.

    Two spreads, because step times are skewed: a step can be late by more than it can be early.
    """
    level, sides = _level_and_sides(values) if len(values) <= _MANY else _level_and_middles(values)
    least = LEAST_SPREAD * abs(level)
    below, above = (max(MAD_TO_STD * _middle_distance(side, level), least) for side in sides)
    return level, below, above


def _level_and_sides(values: Series) -> tuple[float, tuple[Series, Series]]:
    """The median, and the values up to it and from it on, in order."""
    ordered = _ordered(values)
    level = _middle(ordered)
    return level, (ordered[: bisect_right(ordered, level)], ordered[bisect_left(ordered, level) :])


def _level_and_middles(values: Series) -> tuple[float, tuple[Series, Series]]:
    """The median, and the one or two values in the middle of each side. Sorting the sides takes twice as long."""
    import numpy as np

    array = np.asarray(values, float)
    level = _middle(_selected(array, _middle_places(0, len(array))))
    low = _middle_places(0, int(np.count_nonzero(array <= level)))
    high = _middle_places(int(np.count_nonzero(array < level)), len(array))
    return level, (_selected(array, low), _selected(array, high))


def _selected(values: Floats, places: slice) -> Floats:
    """What is at ``places``, one or two in a row, of the sorted values.

    A sample tells between which values they are; only these few are ordered, a tenth of the work.
    """
    import numpy as np

    sample = np.sort(values[:: max(1, len(values) // _SAMPLE)])
    middle = places.start * len(sample) // len(values)
    low, high = sample[max(0, middle - _MARGIN)], sample[min(len(sample) - 1, middle + _MARGIN)]
    near = values[(values >= low) & (values <= high)]
    before = int(np.count_nonzero(values < low))
    if not before <= places.start < places.stop <= before + len(near):
        near, before = values, 0
    first, last = places.start - before, places.stop - 1 - before
    return np.partition(near, (first, last))[first : last + 1]


def _middle_places(first: int, end: int) -> slice:
    """Where the sorted values from ``first`` to ``end`` have the one or two in their middle."""
    return slice((first + end - 1) // 2, (first + end) // 2 + 1)


def despiked_steps(values: Sequence[float]) -> Series:
    """``values``, at least 4, with outliers among their neighbors replaced by the neighbors' median (Hampel filter)."""
    if len(values) > _MANY:
        import numpy as np

        return despiked(np.asarray(values, float))
    half = SPIKE_NEIGHBORS
    padded = [*values[half:0:-1], *values, *values[-2 : -half - 2 : -1]]
    running, rest = [], []
    for place, value in enumerate(values):
        below, middle, above = sorted(padded[place : place + 2 * half + 1])[half - 1 : half + 2]
        running.append(middle)
        rest.append(value - ((middle if value < middle else below) + (middle if value > middle else above)) / 2)
    level, low, high = _usual_rest(values, rest)
    return [
        usual if value < usual + level - low or value > usual + level + high else value
        for value, usual in zip(values, running, strict=True)
    ]


def differing(values: Sequence[float], others: Series) -> list[int]:
    """The places at which they differ."""
    if len(values) <= _MANY:
        return [place for place, (value, other) in enumerate(zip(values, others, strict=True)) if value != other]
    import numpy as np

    return np.flatnonzero(np.asarray(values, float) != others).tolist()


def despiked(values: Floats) -> Floats:
    """What ``despiked_steps`` makes of ``values``."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    padded = np.concatenate((values[half:0:-1], values, values[-2 : -half - 2 : -1]))
    running, rest = np.empty_like(values), np.empty_like(values)
    parts = [slice(first, first + _SLICE) for first in range(0, len(values), _SLICE)]
    for part in parts:
        own = values[part]
        running[part], others = _near_medians(own, padded[part.start : part.start + len(own) + 2 * half])
        rest[part] = own - others
    level, low, high = _usual_rest(values, rest)
    for part in parts:
        own, usual = values[part], running[part]
        spike = (own < usual + level - low) | (own > usual + level + high)
        running[part] = np.where(spike, usual, own)
    return running


def _usual_rest(values: Series, rest: Series) -> tuple[float, float, float]:
    """The level of what values differ from their neighbors, not 0 where the noise is skewed, and the most that others
    are below it and above."""
    level, below, above = level_and_spread(rest)
    least = LEAST_SPREAD * abs(_median(values))
    return level, OUTLIER_SPREADS * max(below, least), OUTLIER_SPREADS * max(above, least)


def _near_medians(values: Floats, padded: Floats) -> tuple[Floats, Floats]:
    """The median of each value and its neighbors, and that of its neighbors alone: the rest to that is seldom 0."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    near = [padded[shift : shift + len(values)] for shift in range(2 * half + 1)]
    for low, high in _SORTING_7:
        near[low], near[high] = np.minimum(near[low], near[high]), np.maximum(near[low], near[high])
    below, middle, above = near[half - 1 : half + 2]
    lower, upper = np.where(values < middle, middle, below), np.where(values > middle, middle, above)
    return middle, (lower + upper) / 2


def _ordered(values: Series) -> Series:
    if isinstance(values, Sequence):
        return sorted(values)
    import numpy as np

    return np.sort(values)


def _median(values: Series) -> float:
    if len(values) <= _MANY:
        return _middle(_ordered(values))
    import numpy as np

    array = np.asarray(values, float)
    return _middle(_selected(array, _middle_places(0, len(array))))


def _middle(ordered: Series) -> float:
    """The median of sorted values. NumPy's takes ten times as long for the few values of a window."""
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)


def _middle_distance(ordered: Series, level: float) -> float:
    """The median of distances from ``level``, which no value or every one is above."""
    middle = len(ordered) // 2
    after = abs(ordered[middle] - level)
    return float(after if len(ordered) % 2 else (abs(ordered[middle - 1] - level) + after) / 2)


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


def are_between(low: float, values: Sequence[float], high: float) -> bool:
    """Whether all values are; nan is not."""
    if len(values) <= _MANY:
        return all(low < value < high for value in values)
    import numpy as np

    array = np.asarray(values, float)
    return bool(((low < array) & (array < high)).all())


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
    return float(array.mean()), _median(array), float(array.min()), float(array.max())


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


@dataclass(frozen=True, slots=True)
class Spread:
    """How the mean step times of repeats differ, in seconds; ``std`` and ``cv_pct`` are None for one repeat."""

    count: int
    mean: float
    median: float
    std: float | None
    cv_pct: float | None
    min: float
    max: float


def spread_of(means_s: Sequence[float]) -> Spread | None:
    """None without a repeat."""
    if not means_s:
        return None
    mean, std = fmean(means_s), stdev(means_s) if len(means_s) > 1 else None
    cv_pct = None if std is None else 100 * std / mean
    return Spread(len(means_s), mean, median(means_s), std, cv_pct, min(means_s), max(means_s))
