# SPDX-License-Identifier: Apache-2.0
"""The run of a folder, by its record and its steps: as it ended, and in another window."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.copies import digest_of
from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.metrics.statistics import Statistics, describe
from llmb.metrics.throughput import why_too_fast
from llmb.metrics.window import resolve_window, rule_of_document
from llmb.missing import Missing
from llmb.runs.attempts import cut, window_began, with_steady_window
from llmb.runs.conditions import conditions_of, identity_of
from llmb.runs.contradicting_record import why_contradicting
from llmb.runs.folder import BrokenRecord, RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import RunRecord, SubmittedJob, read_job_if_whole, read_record, seconds_of
from llmb.runs.result import (
    NOT_SUCCESSFUL,
    figures_of,
    measured_packing,
    no_measurement,
    statistics_of_window,
)
from llmb.runs.steps import Step, read_steps

FIGURES = ("mfu_pct", "tokens_per_s_per_gpu", "days_per_1t_tokens")
FIRST_STEPS = 16
"""As many tell a run apart from all others."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run folder whose record was read, and nothing else of it."""

    folder: RunFolder
    record: RunRecord
    job: SubmittedJob | None

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def label(self) -> str | None:
        return self.record.label

    @property
    def campaign(self) -> str | None:
        return self.job.campaign if self.job else None

    @property
    def started_s(self) -> float | None:
        return seconds_of(self.record.started_at or (self.job.submitted_at if self.job else None))

    @property
    def job_ids(self) -> tuple[str, ...]:
        """Ids of all its submissions."""
        return tuple(job.job_id for job in (self.job, *self.job.earlier)) if self.job else ()

    @property
    def has_ended(self) -> bool:
        return self.record.status not in ("queued", "running")


def read_folder(folder: RunFolder) -> RecordedRun:
    """Raises BrokenRecord, or OSError if the record cannot be read."""
    return RecordedRun(folder, read_record(folder), read_job_if_whole(folder))


def recorded_run(run: RecordedRun) -> AnalyzedRun:
    """A run that has ended, with its figures. Raises BrokenRecord or OSError if they cannot be read."""
    from llmb.programs.conclude import stored_run  # takes longer to load than many logs to read
    from llmb.runs.conditions import faults_of

    record = run.record
    result, steps = stored_run(run.folder, record)
    window, kept = result.window or record.plan.window, result.step_time_s or None
    times = times_of([step for step in steps if step.step in window]) if kept else ()
    known, first_s = described(run), first_times(steps)
    return replace(
        known,
        status=result.status,
        reason=result.flaw,
        window=window,
        step_times_s=times,
        first_times_s=first_s,
        step_time_s=describe(times) if times else kept,
        figures=("exact" if times else "rounded") if kept else None,
        **_figure_fields({name: getattr(result, name) for name in FIGURES} if kept else {}),
        faults=faults_of(record, result),
        content=digest_of(known.identity.key, result.status, result.steps, window, times or kept, first_s),
    )


def described(run: RecordedRun) -> AnalyzedRun:
    """As its record describes it, whether it has ended or not, without its figures."""
    record = run.record
    return AnalyzedRun(
        id=run.id,
        path=run.folder.path,
        identity=identity_of(record),
        conditions=conditions_of(record),
        label=run.label,
        campaign=run.campaign,
        started_s=run.started_s,
        status=record.status,
        nodes=record.environment.nodes if record.environment else (),
        network=(record.result and record.result.network) or None,
        recipe=record.plan.recipe,
        record=record,
        source=record.run_id,
    )


def readable_steps(folder: RunFolder) -> list[Step]:
    """Empty for a program that writes its steps to the log alone, and for a file that is damaged."""
    try:
        return read_steps(folder.steps)
    except (OSError, BrokenRecord):
        return []


def first_times(steps: Sequence[Step]) -> Sequence[float]:
    return tuple(step.step_time_s for step in steps[:FIRST_STEPS])


def times_of(steps: Sequence[Step]) -> tuple[float, ...]:
    """Leaves out steps of which something was recorded."""
    return tuple(step.step_time_s for step in steps if not step.profiled)


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """What the steps of a window tell of a run that did all its steps. Profiled ones are left out."""

    window: Window
    steps: tuple[Step, ...]
    step_time_s: Statistics | Missing
    flaw: str | None
    """Why they do not tell how fast the run is; None if they do."""


def measure_window(record: RunRecord, window: Window, steps: Sequence[Step]) -> MeasuredWindow:
    """Measures a window of all ``steps`` of a run, in which that of the rule ``auto`` is found."""
    plan = record.plan.model_copy(update={"window": window})
    asked = record.model_copy(update={"plan": plan, "status": "running", "result": None})
    if contradiction := why_contradicting(asked, steps):
        return MeasuredWindow(window, (), NOT_SUCCESSFUL, contradiction)
    asked, unsteady = with_steady_window(asked, steps)
    found = asked.plan.window
    inside = [step for step in steps if step.step in found]
    times = statistics_of_window(asked.plan, inside, unsteady or cut(asked))
    figures = figures_of(asked.plan, times.mean, measured_packing(plan, inside)) if times else None
    if figures and (why := why_too_fast(figures["tflops_per_gpu"], figures["peak_tflops"])):
        return MeasuredWindow(found, (), NOT_SUCCESSFUL, why)
    flaw = times.reason if isinstance(times, Missing) else no_measurement(asked.plan, window_began(asked))
    return MeasuredWindow(found, tuple(step for step in inside if not step.profiled), times, flaw)


def in_other_window(run: AnalyzedRun, rule: str) -> AnalyzedRun:
    """With the statistics that it would have ended with, had it been planned with the window ``rule``."""
    record, folder = run.record, RunFolder(run.path)
    assert record, "it has a folder"
    if run.status != "success" or record.plan.recipe.pretended_rank is not None:
        return run
    try:
        window = planned_window(record.plan, rule)
    except UsageError as error:
        return _measured(run, None, (), None, error.what)
    if steps := read_steps(folder.steps):
        found = measure_window(record, window, steps)
        return _measured(run, found.window, found.steps, found.step_time_s or None, found.flaw)
    from llmb.programs.lookup import find_program
    from llmb.programs.port import End

    plan = record.plan.model_copy(update={"window": window})
    not_ended = record.model_copy(update={"plan": plan, "status": "running", "result": None})
    result = find_program(record.program).result(folder, not_ended, End(0))
    return _measured(run, result.window or window, (), result.step_time_s or None, result.flaw)


def planned_window(plan: Plan, rule: str) -> Window:
    documented = plan.recipe.documented_window
    wanted = rule_of_document(rule, documented) if plan.documented_software else rule
    return resolve_window(wanted, plan.steps, plan.first_step, documented)


def _measured(
    run: AnalyzedRun, window: Window | None, steps: Sequence[Step], kept: Statistics | None, flaw: str | None
) -> AnalyzedRun:
    assert run.record, "it has a folder"
    return replace(
        run,
        window=window,
        step_times_s=times_of(steps) if kept else (),
        step_time_s=kept,
        reason=flaw,
        **figures_by_steps(run.record.plan, kept, steps),
    )


def figures_by_steps(plan: Plan, step_time_s: Statistics | None, steps: Sequence[Step]) -> dict[str, Any]:
    """Fields with the figures of a step time; ``steps`` are those that it is of, if they are known one by one."""
    packing = measured_packing(plan, steps) if steps else None
    found = figures_of(plan, step_time_s.mean, packing) if step_time_s else {}
    return _figure_fields(found)


def _figure_fields(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in FIGURES} | {"mfu_pct": found.get("mfu_pct") or {}}
