# SPDX-License-Identifier: Apache-2.0
"""Which runs tell how fast a step is, and how much repeats differ. Pure."""

from collections.abc import Callable, Sequence

from llmb.analysis.records import AnalyzedRun, FoundRuns, LeftOut
from llmb.metrics.group_difference import KnownSpread, known_spread

Earlier = Callable[[AnalyzedRun], Sequence[AnalyzedRun]]
"""Finds other runs of the same configuration on the same nodes as one."""


def no_earlier(_run: AnalyzedRun) -> Sequence[AnalyzedRun]:
    return ()


def earlier_spread(before: Sequence[AnalyzedRun], after: Sequence[AnalyzedRun], earlier: Earlier) -> KnownSpread | None:
    """Spread of a single run on each side, from what was run before on the nodes of both; None if that is not known."""
    if len(before) != 1 or len(after) != 1 or not before[0].nodes or {*before[0].nodes} != {*after[0].nodes}:
        return None
    compared = {run.counted_as for run in (*before, *after)}
    others = ([run for run in earlier(one) if run.counted_as not in compared] for one in (before[0], after[0]))
    known = [known_spread([run.step_time_s.mean for run in found if run.step_time_s]) for found in others]
    return max((one for one in known if one), key=lambda one: one.spread, default=None)


def measured(found: FoundRuns) -> FoundRuns:
    """Without the runs that failed, are invalid, or whose steps do not tell how fast they are."""
    kept = tuple(run for run in found.runs if why_left_out(run) is None)
    dropped = [LeftOut(run.id, reason) for run in found.runs if (reason := why_left_out(run))]
    return FoundRuns(found.title, kept, (*found.left_out, *dropped))


def why_left_out(run: AnalyzedRun) -> str | None:
    """None for a run that is a measurement."""
    flaw = flaw_of(run)
    return f"{run.status.replace('_', ' ')}: {flaw}" if flaw and run.reason and run.status != "success" else flaw


def flaw_of(run: AnalyzedRun) -> str | None:
    """What is wrong with a run; its status only if no reason is known."""
    if run.status != "success":
        return run.reason or run.status.replace("_", " ")
    return run.reason or (None if run.step_time_s else "its steps have no statistics")
