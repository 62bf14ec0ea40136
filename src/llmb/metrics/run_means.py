# SPDX-License-Identifier: Apache-2.0
"""Statistics of the means of several runs, which are independent of each other, unlike the steps of one."""

import math
from collections.abc import Sequence
from dataclasses import replace

from llmb.metrics.statistics import Statistics, describe


def describe_runs(means_s: Sequence[float]) -> Statistics:
    """Of run means, in seconds; the interval is Student's t. Raises ValueError as ``describe``."""
    from scipy.special import stdtrit  # takes longer to load than most commands take to run

    found = describe(means_s)
    if found.std is None:
        return found
    half = float(stdtrit(found.count - 1, 0.975)) * found.std / math.sqrt(found.count)
    return replace(found, ci95=(found.mean - half, found.mean + half), effective_count=None)
