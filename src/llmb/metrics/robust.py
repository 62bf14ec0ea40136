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
    import numpy as np

    level = float(np.median(values))
    least = LEAST_SPREAD * abs(level)
    sides = (level - values[values <= level], values[values >= level] - level)
    below, above = (max(MAD_TO_STD * float(np.median(side)), least) for side in sides)
    return level, below, above


def despiked(values: Floats) -> Floats:
    """``values``, at least 4, with outliers among their neighbors replaced by the neighbors' median (Hampel filter)."""
    import numpy as np

    half = SPIKE_NEIGHBORS
    near = np.lib.stride_tricks.sliding_window_view(np.pad(values, half, mode="reflect"), 2 * half + 1)
    running = np.median(near, axis=1)
    rest = values - np.median(np.delete(near, half, axis=1), axis=1)  # without the step itself: else often 0
    # The level of the rest is not 0 where the noise is skewed.
    level, below, above = level_and_spread(rest)
    least = LEAST_SPREAD * abs(float(np.median(values)))
    low, high = (OUTLIER_SPREADS * max(spread, least) for spread in (below, above))
    spike = (values < running + level - low) | (values > running + level + high)
    return np.where(spike, running, values)
