# SPDX-License-Identifier: Apache-2.0
"""The difference of one run from a single figure. Its interval is that of the run's steps: not that of other runs."""

import math

from llmb.metrics.statistics import Statistics


def single_difference(
    statistics: Statistics, reference_s: float, reference_ci95: tuple[float, float] | None = None
) -> tuple[float, tuple[float, float] | None]:
    """The run's mean relative to ``reference_s`` in percent, above 0 slower, and the 95 % confidence interval of that.

    The interval is None for a run with a single step. Raises ValueError for a reference that is not above 0.
    """
    if not reference_s > 0:
        raise ValueError("the reference step time has to be above 0")
    ratio = statistics.mean / reference_s
    if statistics.ci95 is None:
        return 100 * (ratio - 1), None
    widths = [(high - low) / 2 for low, high in (statistics.ci95, reference_ci95 or (reference_s, reference_s))]
    half = math.hypot(widths[0] / reference_s, ratio * widths[1] / reference_s)
    return 100 * (ratio - 1), (100 * (ratio - 1 - half), 100 * (ratio - 1 + half))
