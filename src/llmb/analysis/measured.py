# SPDX-License-Identifier: Apache-2.0
"""Which runs tell how fast a step is. Pure."""

from llmb.analysis.records import AnalyzedRun, FoundRuns, LeftOut


def measured(found: FoundRuns) -> FoundRuns:
    """Without the runs that failed, are invalid, or whose steps do not tell how fast they are."""
    kept = tuple(run for run in found.runs if why_left_out(run) is None)
    dropped = [LeftOut(run.id, reason) for run in found.runs if (reason := why_left_out(run))]
    return FoundRuns(found.title, kept, (*found.left_out, *dropped))


def why_left_out(run: AnalyzedRun) -> str | None:
    """None for a run that is a measurement."""
    if run.status != "success":
        return f"{run.status.replace('_', ' ')}: {run.reason}" if run.reason else run.status
    return run.reason or (None if run.step_time_s else "its steps have no statistics")
