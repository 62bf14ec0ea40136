# SPDX-License-Identifier: Apache-2.0
"""Level and spread of a series that a few extreme values do not change."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
LEAST_SPREAD = 0.001
"""Share of the level: logs print step times with two to four digits, and equal values have no spread."""
OUTLIER_SPREADS = 5.0
SPIKE_NEIGHBORS = 3
"""On each side; up to as many outliers in a row are still a spike."""
_SLICE = 1 << 14
"""Values whose neighbors are sorted at once: more would take much memory, and leave the core's cache."""

Floats: TypeAlias = "NDArray[Any]"


def level_and_spread(values: Floats) -> tuple[float, float, float]:
    """The median, and the spreads below and above it, as standard deviations of a normal distribution.

    Two spreads, because step times are skewed: a step can be late by more than it can be early.
    """
    import numpy as np

    ordered = np.sort(values)
    level = _middle(ordered)
    least = LEAST_SPREAD * abs(level)
    sides = (level - ordered[: ordered.searchsorted(level, "right")], ordered[ordered.searchsorted(level) :] - level)
    below, above = (max(MAD_TO_STD * _middle(side), least) for side in sides)
    return level, below, above


def despiked(values: Floats) -> Floats:
    """``values``, at least 4, with outliers among their neighbors replaced by the neighbors' median (Hampel filter)."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    padded = np.concatenate((values[half:0:-1], values, values[-2 : -half - 2 : -1]))
    running, rest = np.empty_like(values), np.empty_like(values)
    for first in range(0, len(values), _SLICE):
        own = values[first : first + _SLICE]
        medians, others = _near_medians(own, padded[first : first + len(own) + 2 * half])
        running[first : first + len(own)], rest[first : first + len(own)] = medians, own - others
    # The level of the rest is not 0 where the noise is skewed.
    level, below, above = level_and_spread(rest)
    least = LEAST_SPREAD * abs(_middle(np.sort(values)))
    low, high = (OUTLIER_SPREADS * max(spread, least) for spread in (below, above))
    spike = (values < running + level - low) | (values > running + level + high)
    return np.where(spike, running, values)


def _near_medians(values: Floats, padded: Floats) -> tuple[Floats, Floats]:
    """The median of each value and its neighbors, and that of its neighbors alone: the rest to that is seldom 0."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    near = np.array([padded[shift : shift + len(values)] for shift in range(2 * half + 1)])
    near.sort(axis=0)
    below, middle, above = near[half - 1 : half + 2]
    lower, upper = np.where(values < middle, middle, below), np.where(values > middle, middle, above)
    return middle, (lower + upper) / 2


def _middle(ordered: Floats) -> float:
    """The median. NumPy's takes ten times as long for the few values of a window."""
    middle = len(ordered) // 2
    return float(ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
