# SPDX-License-Identifier: Apache-2.0
"""Level and spread of a series that a few extreme values do not change."""

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""
LEAST_SPREAD = 0.001
"""Of the level: logs print step times with two to four digits, and equal values have no spread."""
OUTLIER_SPREADS = 5.0
SPIKE_NEIGHBORS = 3
"""On each side; up to as many outliers in a row are still a spike."""

Floats: TypeAlias = "NDArray[Any]"


def level_and_spread(values: Floats) -> tuple[float, float, float]:
    """The median, and the spreads below and above it, as standard deviations of a normal distribution.

    Two spreads, because step times are skewed: a step can be late by more than it can be early.
    """
    level = _median(values)
    least = LEAST_SPREAD * abs(level)
    sides = (level - values[values <= level], values[values >= level] - level)
    below, above = (max(MAD_TO_STD * _median(side), least) for side in sides)
    return level, below, above


def despiked(values: Floats) -> Floats:
    """``values``, at least 4, with outliers among their neighbors replaced by the neighbors' median (Hampel filter)."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    padded = np.concatenate((values[half:0:-1], values, values[-2 : -half - 2 : -1]))
    near = np.array([padded[shift : shift + len(values)] for shift in range(2 * half + 1)])
    running = np.sort(near, axis=0)[half]
    # Without the step itself: else the rest is often 0.
    others = np.sort(np.concatenate((near[:half], near[half + 1 :])), axis=0)
    rest = values - (others[half - 1] + others[half]) / 2
    # The level of the rest is not 0 where the noise is skewed.
    level, below, above = level_and_spread(rest)
    least = LEAST_SPREAD * abs(_median(values))
    low, high = (OUTLIER_SPREADS * max(spread, least) for spread in (below, above))
    spike = (values < running + level - low) | (values > running + level + high)
    return np.where(spike, running, values)


def _median(values: Floats) -> float:
    """As NumPy's, which takes ten times as long for the few values of a window."""
    import numpy as np

    ordered, middle = np.sort(values), len(values) // 2
    return float(ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2)
