# SPDX-License-Identifier: Apache-2.0
"""The log of a run folder, with what the record and the steps beside it tell."""

from dataclasses import replace

from llmb.analysis.copies import digest_of
from llmb.analysis.parsed_run import ParsedRun, anomalies_of, without_figures
from llmb.catalogue.records import Window
from llmb.logs.files import ParsedFile, parse_file
from llmb.logs.outcome import FINISHED, LogOutcome
from llmb.metrics.statistics import describe
from llmb.metrics.window import DEFAULT_RULE
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_record, seconds_of
from llmb.runs.record_file import BrokenRecord
from llmb.runs.recorded_identity import conditions_of, identity_of
from llmb.runs.result import figures_of, measured_packing
from llmb.runs.steps import Step, read_steps


def recorded_run(file: ParsedFile, folder: RunFolder) -> ParsedRun:
    """The run whose log in ``folder`` was parsed. Raises BrokenRecord, or OSError if its record cannot be read."""
    record = read_record(folder)
    environment = record.environment
    file = _with_planned_window(file, record)
    steps = _steps(folder)
    contradiction = why_contradicting(record, steps, log_gpus=file.outcome.gpus)
    if contradiction and (file.outcome.status in FINISHED or record.status == "success"):
        outcome, exact = without_figures(file.outcome, contradiction), False
    else:
        outcome, exact = _with_exact_times(_as_recorded(file.outcome, record, steps), steps)
    figures = {}
    if outcome.step_time_s and outcome.window:
        packing = measured_packing(record.plan, _inside(steps, outcome.window)) if exact else None
        figures = figures_of(record.plan, outcome.step_time_s.mean, packing)
    return ParsedRun(
        file=ParsedFile(file.path, outcome),
        id=record.id,
        configuration=identity_of(record).configuration,
        software={key: value for key, value in conditions_of(record).items() if key.startswith("software.")},
        figures=("exact" if exact else "rounded") if outcome.step_time_s else None,
        nodes=environment.nodes if environment else (),
        time_s=seconds_of(record.started_at),
        label=record.label,
        recorded_release=record.plan.recipe.release,
        origin=record.plan.origin,
        folder=folder.path,
        anomalies=anomalies_of(outcome),
        run_id=record.run_id,
        network=(record.result and record.result.network) or None,
        content=digest_of(outcome.digest, [(step.step, step.step_time_s) for step in steps]),
        mfu_pct=figures.get("mfu_pct", {}),
        tokens_per_s_per_gpu=figures.get("tokens_per_s_per_gpu"),
        days_per_1t_tokens=figures.get("days_per_1t_tokens"),
    )


def _with_planned_window(file: ParsedFile, record: RunRecord) -> ParsedFile:
    """A log does not tell the window that the run was planned with; the record does. Another rule was asked for."""
    read, window = file.outcome.window, record.window
    if read is None or read.rule != DEFAULT_RULE or read == window:
        return file
    again = parse_file(file.path, f"{window.first}-{window.last}").outcome
    return ParsedFile(file.path, replace(again, window=window) if again.window else again)


def _steps(folder: RunFolder) -> list[Step]:
    """Empty for a program that writes its steps to the log alone, and for a file that is damaged."""
    try:
        return read_steps(folder.steps)
    except (OSError, BrokenRecord):
        return []


def _inside(steps: list[Step], window: Window) -> list[Step]:
    return [step for step in steps if window.first <= step.step <= window.last]


def _as_recorded(outcome: LogOutcome, record: RunRecord, steps: list[Step]) -> LogOutcome:
    """The record knows what the log may not: whose it is, whether the run is still running, and how it ended."""
    if outcome.status == "not_training_log":
        said = record.reason or record.plan.recipe.pretended_text
        why = f": {said}" if said else ""
        return replace(outcome, status="no_data", reason=f"no step line; the run is {record.status} by its record{why}")
    if record.status == "invalid":
        return without_figures(outcome, record.reason or "invalid by its record")
    unsuccessful = record.status in ("failed", "cancelled")
    why = f"the run {'failed' if record.status == 'failed' else 'was cancelled'}, by its record: {record.reason}"
    if unsuccessful and outcome.status in FINISHED:
        return replace(without_figures(outcome, why), status="incomplete")
    if outcome.status == "no_data" and unsuccessful:
        return replace(outcome, reason=why)
    if outcome.status != "incomplete":
        return outcome
    if unsuccessful:
        return replace(outcome, reason=why)
    if record.status in ("queued", "running"):
        done = "no step" if outcome.max_step is None else f"step {outcome.max_step}"
        return replace(outcome, reason=f"the run has not ended, by its record; {done} is the last one in the log")
    asked = outcome.window
    window = asked if asked and asked.rule != record.window.rule else record.window
    if record.status == "success" and len(_inside(steps, window)) == window.last - window.first + 1:
        reason = f"steps {window.first}-{window.last} of {record.plan.last_step + 1} (attempt {len(record.attempts)})"
        times = describe([step.step_time_s for step in _inside(steps, window)])
        return replace(outcome, status="success", reason=reason, window=window, step_time_s=times)
    return outcome


def _with_exact_times(outcome: LogOutcome, steps: list[Step]) -> tuple[LogOutcome, bool]:
    """With the step times of ``metrics.jsonl`` if it has all of the window, and whether it does."""
    window = outcome.window
    if not outcome.step_time_s or not window:
        return outcome, False
    inside = _inside(steps, window)
    if len(inside) != window.last - window.first + 1 or any(step.profiled for step in inside):
        return outcome, False
    times = tuple(step.step_time_s for step in inside)
    return replace(outcome, step_times_s=times, step_time_s=describe(times)), True
