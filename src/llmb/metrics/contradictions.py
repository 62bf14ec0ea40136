# SPDX-License-Identifier: Apache-2.0
"""Facts of a run that cannot all be true. Its figures are then no measurement, whatever they are. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

SHORTEST_STEP_S, LONGEST_STEP_S = 1e-9, 1e9
"""Whatever is not between them, such as 30 years, is damage."""
MOST_OF_CLOCK = 1.1
"""Step times may sum to this much of the time that passed by the clock, which may have been corrected meanwhile."""
LEAST_OF_CLOCK = 0.5
"""A usual step may take this little of the time between two ends of steps, less what is known to lie between them: a
checkpoint or an evaluation lies between some steps, but not between most."""
CLOCK_ERROR_S = 1.0
"""Error of moments that a waiting host, or a clock of whole seconds, tells."""
FINE_CLOCK_ERROR_S = 1e-3
"""Error of usual moments by a clock that counts parts of a second."""
FEW_LAPS = 3
"""A host that waits once may make the usual one longer where there are fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lap:
    """From the end of a step to that of a later one."""

    steps_s: float
    """The sum of the step times."""
    clock_s: float
    """Seconds by the clock."""
    between_s: float = 0.0
    """What is known to lie between the steps."""
    steps: int = 1
    ranks_apart_s: float = 0.0
    """The time of the slowest rank less that of the fastest: a step's time is that of the slowest one of this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What has to agree in a run that did all its steps. What is not known is left empty."""

    first_step: int
    last_step: int
    window: tuple[int, int]
    steps: Sequence[int] = ()
    """Numbers, in the order in which they were written."""
    step_times_s: Sequence[float] = ()
    """Times of ``steps``."""
    not_updated: Sequence[int] = ()
    """Steps that did not update the parameters."""
    recorded: Sequence[int] = ()
    """Steps said to be slowed down by what is recorded of them, and not planned so, or the other way round."""
    laps: Sequence[Lap] = ()
    """Laps of the window."""
    gpus: Mapping[str, int] = field(default_factory=dict)
    """Number of GPUs or ranks, by who tells."""
    batches: Mapping[str, int] = field(default_factory=dict)
    """Global batch size, by who tells."""
    tokens_per_step: int | None = None
    """By the layout."""
    tokens: Mapping[int, int] = field(default_factory=dict)
    """By step, as written."""


def contradictions(facts: RunFacts) -> tuple[str, ...]:
    """Why the run is invalid, for people; empty if all agrees."""
    found = (_of_window(facts), _of_order(facts), _of_times(facts), _of_updates(facts), _of_recording(facts.recorded))
    counts = _told_apart("number of GPUs", facts.gpus), _told_apart("global batch size", facts.batches)
    return tuple(reason for reason in (*found, _of_clock(facts.laps), *counts, _of_tokens(facts)) if reason)


def _of_window(facts: RunFacts) -> str | None:
    first, last = facts.window
    if facts.first_step <= first <= last <= facts.last_step:
        return None
    return f"the window is steps {first}-{last}, and the run has steps {facts.first_step}-{facts.last_step}"


def _of_order(facts: RunFacts) -> str | None:
    if not facts.steps:
        return None
    for before, number in pairwise((facts.first_step - 1, *facts.steps, facts.last_step + 1)):
        if number == before:
            return f"step {number} was written twice"
        if number < before:
            return f"step {number} is written after step {before}"
        if number > before + 1:
            return f"step {before + 1} is missing"
    return None


def _of_times(facts: RunFacts) -> str | None:
    times = zip(facts.steps, facts.step_times_s, strict=True)
    bad = next(((step, seconds) for step, seconds in times if not SHORTEST_STEP_S < seconds < LONGEST_STEP_S), None)
    return f"step {bad[0]} took {bad[1]:.4g} s, which no step takes" if bad else None


def _of_updates(facts: RunFacts) -> str | None:
    first, last = facts.window
    count = sum(first <= step <= last for step in facts.not_updated)
    if not count:
        return None
    return f"{'1 step' if count == 1 else f'{count} steps'} of the window skipped the update of the parameters"


def _of_recording(steps: Sequence[int]) -> str | None:
    return f"step {steps[0]} was profiled or was not, against the plan" if steps else None


def _of_clock(every: Sequence[Lap]) -> str | None:
    laps = [lap for lap in every if lap.clock_s >= 0]  # a clock that was set back once, as in autumn, tells nothing
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
        return f"step times of the window sum to {steps_s:.4g} s, and by the clock {clock_s:.4g} s passed"
    step_s, known_s = median(lap.steps_s for lap in laps), median(lap.clock_s - lap.between_s for lap in laps)
    error_s = FINE_CLOCK_ERROR_S if is_fine and len(laps) >= FEW_LAPS else CLOCK_ERROR_S
    if step_s + error_s < LEAST_OF_CLOCK * known_s:
        count = max(lap.steps for lap in laps)
        told = "a step of the window takes" if count == 1 else f"{count} steps of the window take"
        return f"{told} {step_s:.4g} s, and by the clock {known_s:.4g} s"
    return None


def _told_apart(what: str, counts: Mapping[str, int]) -> str | None:
    if len(set(counts.values())) < 2:
        return None
    return f"the {what} is " + ", ".join(f"{count} in the {who}" for who, count in counts.items())


def _of_tokens(facts: RunFacts) -> str | None:
    wanted = facts.tokens_per_step
    bad = next(_other_tokens(facts, wanted), None) if wanted else None
    return f"step {bad} has {facts.tokens[bad]:,} tokens, and the layout {wanted:,}" if bad is not None else None


def _other_tokens(facts: RunFacts, wanted: int) -> Iterator[int]:
    return (step for step, tokens in facts.tokens.items() if tokens != wanted)
