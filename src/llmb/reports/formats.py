# SPDX-License-Identifier: Apache-2.0
"""Values as text: numbers, intervals, durations, and series as block characters. Pure."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from llmb.base.shown_text import printable, value_text

if TYPE_CHECKING:  # every command can print, and few have a use for records
    from llmb.catalogue.records import Window
    from llmb.runs.steps import Step

LONGEST_VALUE = 60
"""Maximum number of characters of a value, because lists of nodes and GPUs can be long."""
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def as_text(value: object) -> str:
    """Format a value in one line; empty if unknown."""
    return "" if value is None else printable(value)


def cell(value: float | None) -> str:
    """Format a number as ``number`` does; empty if unknown."""
    return "" if value is None else number(value)


def whole(value: int | None) -> str:
    """Format an integer with thousands separators; empty if unknown."""
    return "" if value is None else f"{value:,}"


def formatted(form: str, unknown: str = "") -> Callable[[float | None], str]:
    """Return a function that formats a number with ``form``, such as ``{:.1f}``, and None as ``unknown``."""
    return lambda value: unknown if value is None else form.format(value)


def number(value: float | None) -> str:
    """Format a number with four significant digits, or as an integer if it is 1,000 or more; 'n/a' if unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"


def interval_of(interval: tuple[float, float] | None) -> str:
    """Format the confidence interval of a positive value; an interval that includes 0 is not shown."""
    if interval is None:
        return number(None)
    low, high = interval
    return f"{number(low)} to {number(high)}" if low > 0 else unknown("too few steps")


def duration(seconds: float) -> str:
    """Format a duration in at most two units, such as ``14 s`` and ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    sizes = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    place = next(place for place, (size, _) in enumerate(sizes) if whole >= size)
    (size, unit), (small, small_unit) = sizes[place : place + 2]
    return f"{whole // size} {unit} {whole % size // small} {small_unit}"


def shortened(value: str | float | bool | None) -> str:
    """Format a value in at most ``LONGEST_VALUE`` characters, with git commits shortened to 12 digits."""
    text = _COMMIT.sub(r"\1", printable(value_text(value)))
    return crop(text, LONGEST_VALUE)


def crop(text: str, most: int) -> str:
    """Shorten a text to at most ``most`` characters, with dots at its end if it was longer."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


Value = TypeVar("Value")
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = str.maketrans(BLOCKS, "12345678")
"""Digits that replace the blocks in output that cannot show them."""
MOST_CELLS = 32
CHART_CELLS, CHART_ROWS = 64, 8
LEAST_SPAN = 0.1
"""The minimum range of the vertical axis, as a fraction of its lower end, so that ordinary noise looks small."""
LEAST = 3
"""The minimum number of values to draw unless a scale is passed."""
NOT_FINITE = "?"


def sparkline(values: Sequence[float], cells: int = MOST_CELLS, scale: Sequence[float] = ()) -> str:
    """Return ``values`` as a line of blocks; if there are more than ``cells``, each cell shows its largest value.

    Heights range from the smallest to the largest value of ``scale``, by default of the second half of ``values``,
    which excludes the warm-up; values beyond are clipped. Return an empty string if there are too few for a scale.
    """
    scaled = [value for value in scale or values[len(values) // 2 :] if math.isfinite(value)]
    if not scaled or (len(values) < LEAST and not scale):
        return ""
    low = min(scaled)
    span = max(max(scaled) - low, LEAST_SPAN * abs(low)) or 1.0
    heights = (_longest(part) for part in _parts(values, cells))
    return "".join(NOT_FINITE if value is None else _block((value - low) / span) for value in heights)


def window_sparkline(steps: Sequence["Step"], window: "Window", cells: int = MOST_CELLS) -> str:
    """Return a run's step times as a line, scaled to the window, which is in brackets if it contains steps."""
    groups: list[list[float]] = [[], [], []]
    for step in steps:
        groups[0 if step.step < window.first else 1 if step.step <= window.last else 2].append(step.step_time_s)
    before, inside, after = groups
    if not inside:
        return sparkline([*before, *after], cells)
    shares = [len(group) * cells / max(len(steps), cells) for group in groups]
    drawn = [sparkline(group, max(1, round(share)), inside) for group, share in zip(groups, shares, strict=True)]
    return f"{drawn[0]}[{drawn[1]}]{drawn[2]}"


def step_chart(
    steps: Sequence["Step"], window: "Window", cells: int = CHART_CELLS, rows: int = CHART_ROWS
) -> list[str]:
    """Return the lines of a chart of a run's step times, scaled to the range of its window, which is underlined.

    As in ``sparkline``, a column shows the slowest of its steps, and values beyond the range are clipped. Without steps
    in the window, the range is that of all steps."""
    inside = [step.step_time_s for step in steps if step.step in window]
    scaled = [value for value in inside or [step.step_time_s for step in steps] if math.isfinite(value)]
    if not scaled:
        return []
    low = min(scaled)
    span = max(max(scaled) - low, LEAST_SPAN * abs(low)) or 1.0
    parts = list(_parts(steps, cells))
    slowest = (_longest([step.step_time_s for step in part]) for part in parts)
    heights = [math.inf if value is None else (value - low) / span for value in slowest]
    limits = {0: f"{number(low + span)} s", rows - 1: f"{number(low)} s"}
    margin = max(map(len, limits.values()))
    lines = []
    for row in range(rows):
        parts_of_row = (height * rows - (rows - 1 - row) for height in heights)
        blocks = (_block(min(part, 1)) if part > 0 or row == rows - 1 else " " for part in parts_of_row)
        lines.append(f"{limits.get(row, ''):>{margin}} |{''.join(blocks)}".rstrip())
    in_window = (any(step.step in window for step in part) for part in parts)
    lines.append(f"{'':{margin}} |{''.join('=' if is_in else ' ' for is_in in in_window)}".rstrip())
    share = math.ceil(len(steps) / len(parts))
    each = "" if share == 1 else f", the slowest of up to {share} a column"
    lines.append(f"steps {steps[0].step}-{steps[-1].step}{each}; = is the window {window.first}-{window.last}")
    return lines


def _parts(values: Sequence[Value], cells: int) -> Iterator[Sequence[Value]]:
    count = min(cells, len(values))
    for place in range(count):
        yield values[place * len(values) // count : (place + 1) * len(values) // count]


def _longest(values: Sequence[float]) -> float | None:
    return max(values) if all(map(math.isfinite, values)) else None


def _block(height: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(height * len(BLOCKS))))]
