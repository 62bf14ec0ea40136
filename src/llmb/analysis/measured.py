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
    flaw = flaw_of(run)
    return f"{run.status.replace('_', ' ')}: {flaw}" if flaw and run.reason and run.status != "success" else flaw


def flaw_of(run: AnalyzedRun) -> str | None:
    """The same without the status of the run, if there is a reason."""
    if run.status != "success":
        return run.reason or run.status.replace("_", " ")
    return run.reason or (None if run.step_time_s else "its steps have no statistics")
