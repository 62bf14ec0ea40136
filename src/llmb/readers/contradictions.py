# SPDX-License-Identifier: Apache-2.0
"""Finds step times that timestamps contradict, and that are therefore invalid. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SHORTEST_STEP_S, LONGEST_STEP_S = 1e-9, 1e9
"""Step times outside of this range are considered damaged data."""
MOST_OF_CLOCK = 1.1
"""Maximum sum of step times relative to the elapsed clock time."""
LEAST_OF_CLOCK = 0.5
"""Minimum ratio of the median step time to the median time between ends of steps, without known pauses."""
CLOCK_ERROR_S = 1.0
"""Maximum error of a timestamp in whole seconds, or of a waiting host's note of a step's end."""
FINE_CLOCK_ERROR_S = 1e-3
"""Maximum error, in seconds, of the median time between lines if the clock shows fractions."""
FEW_LAPS = 3
"""With fewer laps, a single wait of the host may change the median time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """The time from the end of a step to the end of a later step."""

    steps_s: float
    """The sum of the step times."""
    clock_s: float
    """Seconds that passed by the clock."""
    between_s: float = 0.0
    """Seconds between the steps, such as pauses, that no step time includes."""
    steps: int = 1
    ranks_apart_s: float = 0.0
    """Step time of the slowest rank minus that of the fastest rank, or 0 if unknown."""


def clock_contradiction(every: Sequence[Lap]) -> str | None:
    """Describe how the clock contradicts the step times of a window; None if it does not."""
    laps = [lap for lap in every if lap.clock_s >= 0]  # a clock that was set back once, as in autumn, proves nothing
    if 2 * len(laps) < len(every):
        return "most steps of the window end before the step before them"
    steps_s, clock_s = sum(lap.steps_s for lap in laps), sum(lap.clock_s for lap in laps)
    if not clock_s or not all(0 < lap.steps_s < LONGEST_STEP_S for lap in laps):
        return None
    is_fine = any(not lap.clock_s.is_integer() for lap in laps)
    # A host that queues steps for a GPU may see the end of one as late as that of the next one.
    late_s = max(lap.steps_s / lap.steps for lap in laps) + sum(lap.ranks_apart_s for lap in laps)
    error_s = min(CLOCK_ERROR_S, clock_s) if is_fine else CLOCK_ERROR_S
    if steps_s > MOST_OF_CLOCK * clock_s + error_s + late_s:
        return f"step times of the window sum to {steps_s:.4g} s, but {clock_s:.4g} s passed by the clock"
    step_s, clock_step_s = median(lap.steps_s for lap in laps), median(lap.clock_s - lap.between_s for lap in laps)
    error_s = FINE_CLOCK_ERROR_S if is_fine and len(laps) >= FEW_LAPS else CLOCK_ERROR_S
    if step_s + error_s < LEAST_OF_CLOCK * clock_step_s:
        count = max(lap.steps for lap in laps)
        subject = "a step of the window takes" if count == 1 else f"{count} steps of the window take"
        return f"{subject} {step_s:.4g} s, but {clock_step_s:.4g} s by the clock"
    return None
