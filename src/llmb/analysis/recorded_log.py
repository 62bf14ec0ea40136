# SPDX-License-Identifier: Apache-2.0
"""The log of a run folder, with what the record and the steps beside it tell."""

from collections.abc import Sequence
from dataclasses import replace

from llmb.analysis.analyzed_run import AnalyzedRun, without_figures
from llmb.analysis.copies import digest_of
from llmb.analysis.recorded_run import (
    MeasuredWindow,
    described,
    figures_by_steps,
    first_times,
    measure_window,
    planned_window,
    read_folder,
    readable_steps,
    times_of,
)
from llmb.errors import UsageError
from llmb.logs.files import ParsedFile, parse_file
from llmb.logs.outcome import FINISHED, LogOutcome, Status, steps_span
from llmb.metrics.statistics import describe
from llmb.metrics.window import DEFAULT_RULE
from llmb.missing import Missing
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord
from llmb.runs.result import NOT_SUCCESSFUL
from llmb.runs.steps import Step


def run_with_log(folder: RunFolder, file: ParsedFile, rule: str) -> AnalyzedRun:
    """The run of a folder whose log was parsed with a window; its steps count, where it has them all.

    Raises BrokenRecord, or OSError if its record cannot be read.
    """
    recorded = read_folder(folder)
    record, steps = recorded.record, readable_steps(folder)
    outcome, inside = _outcome(file, record, steps, rule)
    known = replace(
        described(recorded),
        **figures_by_steps(record.plan, outcome.step_time_s, inside),
        figures="exact" if inside else "rounded",
        first_times_s=first_times(steps),
        content=digest_of(outcome.digest, [(step.step, step.step_time_s) for step in steps]),
    )
    return known.with_outcome(replace(file, outcome=outcome))


def _outcome(
    file: ParsedFile, record: RunRecord, steps: Sequence[Step], rule: str
) -> tuple[LogOutcome, tuple[Step, ...]]:
    """With the steps that its figures are of; none for those of the log."""
    outcome = _in_planned_window(file, record, rule)
    contradiction = why_contradicting(record, steps, log_gpus=outcome.gpus, log_gbs=outcome.gbs)
    if contradiction and (outcome.status in FINISHED or record.status == "success"):
        return without_figures(outcome, contradiction), ()
    outcome = _as_recorded(outcome, record)
    did_all = record.status == "success" or outcome.step_time_s
    if not did_all or outcome.status == "invalid" or record.plan.recipe.pretended_rank is not None:
        return outcome, ()
    try:
        window = record.plan.window if rule == DEFAULT_RULE else planned_window(record.plan, rule)
    except UsageError:
        return outcome, ()
    if sum(step.step in window for step in steps) < window.size:
        return outcome, ()
    return _as_measured(outcome, record, measure_window(record, window, steps), steps)


def _in_planned_window(file: ParsedFile, record: RunRecord, rule: str) -> LogOutcome:
    """A log does not tell the window that the run was planned with; the record does."""
    read, window = file.outcome.window, record.window
    if rule != DEFAULT_RULE or read is None or read == window:
        return file.outcome
    again = parse_file(file.path, f"{window.first}-{window.last}").outcome
    return replace(again, window=window) if again.window else again


def _as_recorded(outcome: LogOutcome, record: RunRecord) -> LogOutcome:
    """The record knows what the log may not: whose it is, whether the run is still running, and how it ended."""
    if outcome.status == "not_training_log":
        said = record.reason or record.plan.recipe.pretended_text
        why = f": {said}" if said else ""
        return replace(outcome, status="no_data", reason=f"no step line; the run is {record.status} by its record{why}")
    if record.status == "invalid":
        return without_figures(outcome, record.reason or "invalid by its record")
    if record.status in ("failed", "cancelled"):
        why = f"the run {'failed' if record.status == 'failed' else 'was cancelled'}, by its record: {record.reason}"
        if outcome.status in FINISHED:
            return replace(without_figures(outcome, why), status="incomplete")
        return replace(outcome, reason=why) if outcome.status in ("no_data", "incomplete") else outcome
    if outcome.status == "incomplete" and record.status in ("queued", "running"):
        done = "no step" if outcome.max_step is None else f"step {outcome.max_step}"
        return replace(outcome, reason=f"the run has not ended, by its record; {done} is the last one in the log")
    return outcome


def _as_measured(
    outcome: LogOutcome, record: RunRecord, found: MeasuredWindow, steps: Sequence[Step]
) -> tuple[LogOutcome, tuple[Step, ...]]:
    """As ``llmb result`` and ``llmb judge`` have it, whatever of the steps the log shows."""
    if isinstance(found.step_time_s, Missing):
        slowed: Status = "traced" if record.plan.nccl_trace else "profiled"
        profiled = len(found.steps) < found.window.size
        status: Status = "invalid" if found.step_time_s == NOT_SUCCESSFUL else slowed if profiled else "too_few_steps"
        return replace(without_figures(outcome, found.flaw or ""), status=status), ()
    times, attempts = times_of(found.steps), len(record.attempts)
    shown = replace(outcome, step_times_s=times, step_time_s=describe(times))
    if outcome.status == "success" and outcome.window == found.window:
        return shown, found.steps
    reason = f"{steps_span(found.window.first, found.window.last)} of {record.plan.last_step + 1}"
    told = replace(
        shown,
        status="success",
        reason=f"{reason} (attempt {attempts})" if attempts > 1 else reason,
        window=found.window,
        tflops_per_gpu=None,
    )
    return told if outcome.steps else _with_steps(told, steps, attempts), found.steps


def _with_steps(outcome: LogOutcome, steps: Sequence[Step], attempts: int) -> LogOutcome:
    """What else a log tells that has no step or was not read."""
    first, last = steps[0], steps[-1]
    return replace(
        outcome,
        steps=len(steps),
        attempts=max(attempts, 1),
        max_step=last.step,
        loss_first=first.loss,
        loss_last=last.loss,
    )
