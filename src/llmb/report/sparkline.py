# SPDX-License-Identifier: Apache-2.0
"""A series of step times as a line of block characters. Pure."""

import math
from collections.abc import Iterator, Sequence

from llmb.catalogue.records import Window
from llmb.runs.steps import Step

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = str.maketrans(BLOCKS, "12345678")
"""For an output that has no block characters: the height as a digit."""
MOST_CELLS = 32
LEAST_SPAN = 0.1
"""The full height is at least this share of the step time, so that ordinary noise looks like what it is."""
LEAST = 3
"""Fewer values are no series."""
NOT_FINITE = "?"


def sparkline(values: Sequence[float], cells: int = MOST_CELLS, scale: Sequence[float] = ()) -> str:
    """The values from left to right; of more than ``cells``, the longest of those that share a cell.

    The height is between the smallest and the largest value of ``scale``, by default the second half of ``values``,
    which is without the warm-up; what is beyond has the lowest or the full height. Empty for less than ``LEAST``.
    """
    scaled = [value for value in scale or values[len(values) // 2 :] if math.isfinite(value)]
    if not scaled or (len(values) < LEAST and not scale):
        return ""
    low = min(scaled)
    span = max(max(scaled) - low, LEAST_SPAN * abs(low)) or 1.0
    heights = (_longest(part) for part in _parts(values, cells))
    return "".join(NOT_FINITE if value is None else _block((value - low) / span) for value in heights)


def window_sparkline(steps: Sequence[Step], window: Window, cells: int = MOST_CELLS) -> str:
    """The step times of a run, scaled by those of its window, which is in brackets; empty without a step."""
    groups: list[list[float]] = [[], [], []]
    for step in steps:
        groups[0 if step.step < window.first else 1 if step.step <= window.last else 2].append(step.step_time_s)
    before, inside, after = groups
    if not inside:
        return sparkline([*before, *after], cells)
    shares = [len(group) * cells / max(len(steps), cells) for group in groups]
    drawn = [sparkline(group, max(1, round(share)), inside) for group, share in zip(groups, shares, strict=True)]
    return f"{drawn[0]}[{drawn[1]}]{drawn[2]}"


def _parts(values: Sequence[float], cells: int) -> Iterator[Sequence[float]]:
    count = min(cells, len(values))
    for place in range(count):
        yield values[place * len(values) // count : (place + 1) * len(values) // count]


def _longest(values: Sequence[float]) -> float | None:
    """None if one is not finite."""
    return max(values) if all(map(math.isfinite, values)) else None


def _block(height: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(height * len(BLOCKS))))]
