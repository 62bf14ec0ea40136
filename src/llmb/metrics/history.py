# SPDX-License-Identifier: Apache-2.0
"""Steps in a history of runs: where their step time changed for good. The unit is the run, as in group_difference.

The logarithms of the run means are split where the squared deviations from the means of the parts are smallest: at one
place, or else at two, of which the second ends what the first began. The parts are split again, as long as Student's t
is beyond what chance gives in ``FALSE_ALARM_RATE`` of histories without a step, wherever it is (Bonferroni). The rate
holds for runs that are independent of each other. A run that was disturbed makes no step: a part has at least three
runs, and outliers of a long history are replaced before.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from llmb.metrics.statistics import despiked

if TYPE_CHECKING:
    from numpy.typing import NDArray

FALSE_ALARM_RATE = 0.01
FEWEST = 3
"""Runs on each side of a step."""
MOST_PAIRED = 1000
"""In a longer history, or part of one, pairs of steps are not looked for: there would be millions."""
LONG = 20
"""With fewer runs one outlier among three, however far, is not beyond chance."""


@dataclass(frozen=True, slots=True)
class Level:
    """Consecutive runs, by their places, whose step time is the same but for chance, and its geometric mean."""

    runs: range
    mean_s: float


def find_levels(means_s: Sequence[float]) -> list[Level]:
    """The levels of a history in order of time; a single one if no step is found. ``means_s`` are above 0."""
    import numpy as np

    if not means_s:
        return []
    logs = np.log(means_s)
    logs = despiked(logs) if len(logs) >= LONG else logs
    return [
        Level(part, math.exp(float(logs[part.start : part.stop].mean()))) for part in _parts(logs, range(len(logs)))
    ]


def changes_pct(levels: Sequence[Level]) -> list[float]:
    """From each level to the next one."""
    return [100 * (after.mean_s / before.mean_s - 1) for before, after in pairwise(levels)]


def _parts(logs: "NDArray[Any]", part: range) -> Iterator[range]:
    values = logs[part.start : part.stop]
    places = _split(values, 1) or _split(values, 2)
    if not places:
        yield part
        return
    for first, end in pairwise((part.start, *(part.start + place for place in places), part.stop)):
        yield from _parts(logs, range(first, end))


def _split(values: "NDArray[Any]", steps: int) -> list[int] | None:
    """The places of one or two steps; None if chance explains them."""
    import numpy as np
    from scipy.special import stdtr  # takes longer to load than most commands take to run

    count = len(values)
    if count < FEWEST * (steps + 1) or (steps == 2 and count > MOST_PAIRED):
        return None
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    if steps == 1:
        begins, ends = np.zeros(count - 2 * FEWEST + 1, int), np.arange(FEWEST, count - FEWEST + 1)
    else:
        begins, ends = (place + FEWEST for place in np.triu_indices(count - 2 * FEWEST + 1, FEWEST))
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
