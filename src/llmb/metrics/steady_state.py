# SPDX-License-Identifier: Apache-2.0
"""Where a run is steady: the longest stretch of steps whose level does not change.

Single slow steps, such as those with a checkpoint, are replaced by the running median (Hampel filter), so that they do
not count as changes of level. The series is then divided where that lowers the sum of squares most, and each part again
(binary segmentation), as long as a division lowers it by more than ``PENALTY`` x ln(n) x the variance of a step. The
penalty is six times the usual one for independent steps, 3 ln n, because autocorrelated steps wander: six is the
long-run variance of an AR(1) series with 0.5 over the variance that its differences show.
"""

import math
from collections.abc import Sequence

import numpy as np

from llmb.catalogue.records import Window
from llmb.metrics.statistics import LEAST_SPREAD, MAD_TO_STD, OUTLIER_SPREADS, Floats, despike, level_and_spread
from llmb.metrics.window import STEADY

FEWEST_STEPS = 10
LEAST_STEADY = 8
LEAST_SHARE = 1 / 3
"""Share of the run that has to be steady, as ``LEAST_STEADY`` steps."""
PENALTY = 18.0
NO_STEADY_STATE = (
    f"no steady state: it takes {FEWEST_STEPS} steps after the first one, and a constant level in a third of them; "
    "choose the window, such as --window 35-44"
)
MOST_BLOCKS = 512
"""A longer series is first replaced by the medians of blocks of equal size."""


def steady_window(step_times_s: Sequence[float], first_step: int) -> Window | None:
    """The steps, numbered from ``first_step``, in which the run is steady; None if it is not for a third of its steps.

    ``step_times_s`` are those of one attempt, in order and finite, all of them. Fewer than 10 steps are never steady.
    """
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
    """First and last index of each part with a level of its own."""
    # Of differences, so that changes of level do not count as noise.
    noise = MAD_TO_STD * float(np.median(np.abs(np.diff(values)))) / math.sqrt(2)
    variance = max(noise, LEAST_SPREAD * abs(float(np.median(values)))) ** 2
    threshold = PENALTY * math.log(len(values)) * variance
    found, open_parts = [], [(0, len(values) - 1)]
    while open_parts:
        first, last = open_parts.pop()
        split = _split(values[first : last + 1], threshold)
        if split is None:
            found.append((first, last))
        else:
            open_parts += [(first, first + split - 1), (first + split, last)]
    return sorted(found)


def _split(values: Floats, threshold: float) -> int | None:
    """The index at which a second level begins; None if one level explains the values as well."""
    count = len(values)
    if count < 2:
        return None
    sums = np.cumsum(values - values.mean())[:-1]
    sizes = np.arange(1, count)
    gains = sums**2 * (1 / sizes + 1 / (count - sizes))
    best = int(np.argmax(gains))
    return best + 1 if gains[best] > threshold else None


def _without_outlying_ends(values: Floats, first: int, last: int) -> tuple[int, int]:
    """A warm-up of a few steps, or a last step with a checkpoint, is too short for a level."""
    level, below, above = level_and_spread(values[first : last + 1])

    def outlying(index: int) -> bool:
        return not -OUTLIER_SPREADS * below <= float(values[index]) - level <= OUTLIER_SPREADS * above

    while first < last and outlying(first):
        first += 1
    while last > first and outlying(last):
        last -= 1
    return first, last
