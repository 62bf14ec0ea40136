# SPDX-License-Identifier: Apache-2.0
"""Reads runs from run folders, logs or comparisons of engines, and measures them in their own window or another.

The figures of a run with a readable record come from its steps or, if its program writes none, from the program's
result. Its log also serves to check the record and, if the run has no figures, to show how far it got.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from llmb.base.errors import UsageError
from llmb.base.input_files import open_regular, read_text_file
from llmb.base.missing import Missing
from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics, describe
from llmb.catalogue.records import Window
from llmb.catalogue.throughput import why_too_fast
from llmb.catalogue.window import DEFAULT_RULE, resolve_window, rule_of_document
from llmb.launch.programs.conclude import stored_run
from llmb.launch.programs.port import End, find_program
from llmb.readers.anomalies import Anomalies, find_anomalies
from llmb.readers.logs.configuration import ARGUMENTS
from llmb.readers.logs.log_files import NCCL, LogFiles, ParsedFile, find_logs, parse_file, parse_logs
from llmb.readers.logs.outcome import FINISHED, LOG_WARNING, LogOutcome, Status, steps_span
from llmb.readers.logs.reader import PlainText
from llmb.readers.nccl.nccl_network import Network, beginning, read_network
from llmb.readers.samples.host import usable_cores
from llmb.runs.analyzed_run import AnalyzedRun, ExcludedRun, RunSet, log_fields, without_figures
from llmb.runs.conclusion import (
    figures_of,
    measured_packing,
    no_measurement,
    split_window_reason,
    statistics_of_window,
    why_contradicting,
    window_began,
    with_steady_window,
)
from llmb.runs.conditions import RunIdentity, Value, conditions_of, faults_of, identity_of
from llmb.runs.folder import BrokenRecord, RunFolder, log_name
from llmb.runs.plan import Plan
from llmb.runs.record import ENGINE, RunRecord, SubmittedJob, read_job_if_whole, read_record, seconds_of, short_id
from llmb.runs.result import ERROR_AT_END
from llmb.runs.steps import Step, read_steps
from llmb.verdict.copies import digest_of

NO_RUN = ("not_training_log", "unreadable")
FIGURES = ("mfu_pct", "tokens_per_s_per_gpu", "days_per_1t_tokens")
FIRST_STEPS = 16
"""Number of first steps whose times identify a run."""
_AROUND_EXPERIMENT = re.compile(
    r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?|(?:[_-]?\d+)*\.(?:out|log)(?:\.gz)?$"
)
"""Parts of a log's file name to ignore: the account, and the numbers of the job, its start or its repeat."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run's record and job, without its steps and log."""

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
        return tuple(job.job_id for job in (self.job, *self.job.earlier)) if self.job else ()

    @property
    def has_ended(self) -> bool:
        return self.record.status not in ("queued", "running")


def read_folder(folder: RunFolder) -> RecordedRun:
    """Read a run's record and job; raise BrokenRecord if the record is damaged, OSError if it cannot be read."""
    return RecordedRun(folder, read_record(folder), read_job_if_whole(folder))


def recorded_run(run: RecordedRun) -> AnalyzedRun:
    """Return an ended run with its figures; raise BrokenRecord or OSError if they cannot be read."""
    record = run.record
    result, steps = stored_run(run.folder, record)
    window, stats = result.window or record.plan.window, result.step_time_s or None
    times = _times_of([step for step in steps if step.step in window]) if stats else ()
    base = _described(run, steps)
    return replace(
        base,
        status=result.status,
        reason=result.flaw,
        window=window,
        step_times_s=times,
        step_time_s=describe(times) if times else stats,
        figures=("exact" if times else "rounded") if stats else None,
        **_figure_fields({name: getattr(result, name) for name in FIGURES} if stats else {}),
        faults=faults_of(record, result),
        content=digest_of(base.identity.key, result.status, result.steps, window, times or stats, base.first_times_s),
    )


def _described(run: RecordedRun, steps: Sequence[Step]) -> AnalyzedRun:
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
        first_times_s=tuple(step.step_time_s for step in steps[:FIRST_STEPS]),
        nodes=record.environment.nodes if record.environment else (),
        network=(record.result and record.result.network) or None,
        recipe=record.plan.recipe,
        record=record,
        source=record.run_id,
    )


def _times_of(steps: Sequence[Step]) -> tuple[float, ...]:
    return tuple(step.step_time_s for step in steps if not step.profiled)


def in_other_window(run: AnalyzedRun, rule: str) -> AnalyzedRun:
    """Return a successful run as if its plan had the window ``rule``; return other and pretended runs unchanged."""
    record, folder = run.record, RunFolder(run.path)
    assert record, "it has a folder"
    if run.status != "success" or record.plan.recipe.pretended_rank is not None:
        return run
    try:
        window = planned_window(record.plan, rule)
    except UsageError as error:
        return _measured(run, None, (), Missing(error.what))
    plan = record.plan.model_copy(update={"window": window})
    planned = record.model_copy(update={"plan": plan, "status": "running", "result": None})
    if steps := read_steps(folder.steps):
        return _in_window_of_steps(run, planned, steps)
    result = find_program(record.program).result(folder, planned, End(0))
    return _measured(run, result.window or window, (), result.step_time_s, result.flaw)


def planned_window(plan: Plan, rule: str) -> Window:
    documented = plan.recipe.documented_window
    actual = rule_of_document(rule, documented) if plan.documented_software else rule
    return resolve_window(actual, plan.steps, plan.first_step, documented)


def _in_window_of_steps(run: AnalyzedRun, record: RunRecord, steps: Sequence[Step]) -> AnalyzedRun:
    """Measure the run from its steps in the window of ``record``; the rule ``auto`` is resolved with the steps."""
    if contradiction := why_contradicting(record, steps):
        return _measured(run, record.plan.window, (), Missing(contradiction)).invalid(contradiction)
    record, unsteady = with_steady_window(record, steps)
    plan = record.plan
    inside = [step for step in steps if step.step in plan.window]
    times = statistics_of_window(plan, inside, unsteady or split_window_reason(record))
    flaw = no_measurement(plan, window_began(record)) if times else None
    return _measured(run, plan.window, [step for step in inside if not step.profiled], times, flaw)


def _measured(
    run: AnalyzedRun, window: Window | None, steps: Sequence[Step], times: Statistics | Missing, flaw: str | None = None
) -> AnalyzedRun:
    assert run.record, "it has a folder"
    plan, stats = run.record.plan, times or None
    figures = figures_of(plan, stats.mean, measured_packing(plan, steps)) if stats else {}
    outcome = replace(
        run,
        window=window,
        step_times_s=_times_of(steps) if stats else (),
        step_time_s=stats,
        figures=("exact" if steps else "rounded") if stats else None,
        reason=times.reason if isinstance(times, Missing) else flaw,
        **_figure_fields(figures),
    )
    why = why_too_fast(figures["tflops_per_gpu"], figures["peak_tflops"]) if figures else None
    return outcome.invalid(why) if why else outcome


def _figure_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields.get(name) for name in FIGURES} | {"mfu_pct": fields.get("mfu_pct") or {}}


def parsed_run(path: Path, rule: str) -> AnalyzedRun:
    """Parse a log file and return its run, measured in the window ``rule``."""
    return run_of_log(parse_file(path, rule), rule)


def run_of_log(file: ParsedFile, rule: str = DEFAULT_RULE) -> AnalyzedRun:
    """Return the run of a parsed log; use only the log if it is not a run folder's, or the record cannot be read."""
    parts = file.path.absolute().parts
    folder = RunFolder(file.path.absolute().parent) if parts[-1] == log_name(parts[-2:][0]) else None
    if not folder or not folder.record.is_file():
        return logged_run(file, _anomalies(file.outcome))
    try:
        run = _run_with_log(read_folder(folder), file, rule)
        return replace(run, anomalies=_anomalies(run.outcome))
    except OSError as error:
        unread = error.strerror or "it cannot be read"
    except BrokenRecord as error:
        unread = error.what
    return replace(logged_run(file, _anomalies(file.outcome)), id=short_id(str(folder.path)), unread_record=unread)


def _run_with_log(recorded: RecordedRun, file: ParsedFile, rule: str) -> AnalyzedRun:
    record, log = recorded.record, _in_planned_window(file, recorded.record, rule)
    steps = read_steps(recorded.folder.steps)
    if record.status == "success" and record.program == ENGINE and not steps:
        raise BrokenRecord(f"there are no steps in {recorded.folder.steps}")
    run = _described(recorded, steps)
    contradiction = why_contradicting(record, steps, log_gpus=log.gpus, log_gbs=log.gbs)
    if contradiction and (log.status in FINISHED or record.status == "success"):
        outcome = without_figures(log, contradiction)
    elif record.status != "success" or log.status == "invalid" or record.plan.recipe.pretended_rank is not None:
        outcome = _as_recorded(log, record)
    else:
        ended = recorded_run(recorded)
        run = ended if rule == DEFAULT_RULE else in_other_window(ended, rule)
        outcome = _as_measured(log, run, steps)
    content = digest_of(outcome.digest, [(step.step, step.step_time_s) for step in steps])
    return replace(run, content=content).with_outcome(replace(file, outcome=outcome))


def _in_planned_window(file: ParsedFile, record: RunRecord, rule: str) -> LogOutcome:
    """Return the log's outcome in the window that the record contains, unless ``rule`` requests another."""
    read, window = file.outcome.window, record.window
    if rule != DEFAULT_RULE or read is None or read == window:
        return file.outcome
    again = parse_file(file.path, f"{window.first}-{window.last}").outcome
    return replace(again, window=window) if again.window else again


def _as_recorded(log: LogOutcome, record: RunRecord) -> LogOutcome:
    """Correct the log's outcome with facts of the record: whether the run is still running, and how it ended."""
    if log.status == "not_training_log":
        reason = record.reason or record.plan.recipe.pretended_text
        why = f": {reason}" if reason else ""
        return replace(log, status="no_data", reason=f"no step line; the recorded status is {record.status}{why}")
    if record.status == "invalid":
        return without_figures(log, record.reason or "the recorded status is invalid")
    if record.status in ("failed", "cancelled"):
        why = f"the recorded status is {record.status}: {record.reason}"
        if log.status in FINISHED:
            return replace(without_figures(log, why), status="incomplete")
        return replace(log, reason=why) if log.status in ("no_data", "incomplete") else log
    if log.status == "incomplete" and record.status in ("queued", "running"):
        progress = "the log has no step" if log.max_step is None else f"the log's last step is {log.max_step}"
        reason = f"the run has not ended, according to its record; {progress}"
        return replace(log, reason=reason)
    return log


def _as_measured(log: LogOutcome, run: AnalyzedRun, steps: Sequence[Step]) -> LogOutcome:
    """Correct the log's outcome with the run's figures, so that it agrees with ``llmb result`` and ``llmb judge``."""
    assert run.record, "it has a folder"
    plan, window, attempts = run.record.plan, run.window, len(run.record.attempts)
    if not run.step_time_s or not window:
        slowed: Status = "traced" if plan.nccl_trace else "profiled"
        recorded = window is not None and any(map(plan.slows_down, range(window.first, window.last + 1)))
        status: Status = "invalid" if run.status == "invalid" else slowed if recorded else "too_few_steps"
        return replace(without_figures(log, run.reason or ""), status=status)
    times = run.step_times_s or (log.step_times_s if log.window == window else ())
    exact = replace(log, step_times_s=times, step_time_s=run.step_time_s)
    if log.status == "success" and log.window == window:
        return exact
    reason = f"{steps_span(window.first, window.last)} of {plan.last_step + 1}"
    reason += f" (attempt {attempts})" if attempts > 1 else ""
    result = replace(exact, status="success", reason=reason, window=window, tflops_per_gpu=None)
    if log.steps or not steps:
        return result
    result = replace(result, steps=len(steps), attempts=max(attempts, 1), max_step=steps[-1].step)
    return replace(result, loss_first=steps[0].loss, loss_last=steps[-1].loss)


def logged_run(file: ParsedFile, anomalies: Anomalies | None = None) -> AnalyzedRun:
    outcome = file.outcome
    network = _network(file.path) if outcome.steps and file.may_name_network else None
    faults = {LOG_WARNING: outcome.warnings, ERROR_AT_END: tuple(filter(None, [outcome.error_at_end]))}
    return AnalyzedRun(
        id=short_id(str(file.path.absolute())),
        path=file.path,
        identity=RunIdentity(configuration={}) if file.outcome.status in NO_RUN else log_identity(file),
        conditions={"fabric": network.fabric} if network else {},
        started_s=_written_s(file.path),
        anomalies=anomalies,
        network=network,
        faults={name: texts for name, texts in faults.items() if texts},
        source=outcome.digest,
        content=outcome.digest,
        **log_fields(file),
    )


def log_identity(file: ParsedFile) -> RunIdentity:
    """Return an identity that is equal for logs of repeats.

    If the log does not show what was trained, its file name is part of the identity, except what ``_AROUND_EXPERIMENT``
    matches, so that unrelated logs do not count as repeats.
    """
    outcome = file.outcome
    values = dict(outcome.configuration)
    if outcome.format:
        values["program"] = outcome.format
    if "workload" not in values and ARGUMENTS not in values:
        values["experiment"] = _AROUND_EXPERIMENT.sub("", file.path.name)
    return RunIdentity(configuration=values)


def _written_s(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _anomalies(outcome: LogOutcome) -> Anomalies | None:
    times, window = outcome.step_times_s, outcome.window
    return find_anomalies(times, window.first) if window and len(times) == window.size else None


def _network(path: Path) -> Network | None:
    try:
        with open_regular(path) as stream:
            return read_network((text for text in beginning(PlainText(stream)) if NCCL in text), str(path)) or None
    except OSError:
        return None


def logged_runs(root: Path, recorded: set[Path]) -> RunSet:
    """Return the run of a log, or the runs of all logs below a folder, except logs in the run folders ``recorded``."""
    logs = _logs_outside(root, recorded)
    files = sorted(parse_logs(logs, DEFAULT_RULE, usable_cores()), key=lambda file: file.path)
    runs = tuple(logged_run(file) for file in files if file.outcome.status not in NO_RUN)
    unread = [ExcludedRun(str(file.path), file.outcome.reason) for file in files if file.outcome.status in NO_RUN]
    other = [ExcludedRun(counted(logs.unread, "*.log file"), "specify each by name")] if logs.unread else []
    return RunSet(str(root), runs, (*unread, *other))


def _logs_outside(root: Path, recorded: set[Path]) -> LogFiles:
    if not recorded:
        return find_logs(root)
    files = LogFiles((), 0, ())
    with suppress(UsageError):
        files = find_logs(root)
    logs = tuple(path for path in files.logs if recorded.isdisjoint(path.absolute().parents))
    refused = tuple(file for file in files.refused if recorded.isdisjoint(file.path.absolute().parents))
    return LogFiles(logs, sum(path.stat().st_size for path in logs), refused)


LAYOUT = ("mbs", "gbs", "seq_len", "layers")
SAME = ("workload", "size", "dtype", "gpu_type", "vocab_size", "experts")
LLMB = "llmb"
"""The name of llmb's engine in the document, which records options of this engine only."""


class EngineCase(BaseModel):
    """The result of one engine, model, dtype, batch and round, with the fields that are compared.

    ``variant`` describes unusual options of llmb; ``outdated`` is the reason why the result is not from current code.
    """

    engine: str
    variant: str | None = None
    engine_version: str | None
    model: str
    workload: str
    size: str
    dtype: str
    gpu_type: str
    layers: int
    vocab_size: int
    experts: int | None
    mbs: int
    gbs: int
    seq_len: int
    round: int
    status: Literal["done", "failed", "not_run"]
    reason: str | None = None
    outdated: str | None = None
    step_times_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        parts = (self.engine, self.variant, self.model, self.dtype, f"gbs{self.gbs}", str(self.round))
        return "-".join(part for part in parts if part)


class EngineDocument(BaseModel):
    """A document of a comparison of engines (benchmarks/README.md). Version 1 has no variants or outdated cases."""

    schema_version: Literal[1, 2]
    kind: Literal["engine-comparison"]
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: tuple[EngineCase, ...]


def runs_of_engines(path: Path, title: str) -> RunSet:
    """Return a run for each case; raise UsageError if the file is not a comparison of engines, or cannot be read."""
    text = read_text_file(path)
    try:
        document = EngineDocument.model_validate_json(text)
    except ValidationError as error:
        do = "pass a file written by 'python -m benchmarks.engine --out FILE', or a folder of runs or logs"
        raise UsageError("this JSON file is not a comparison of engines", where=str(path), do=do) from error
    return RunSet(title, tuple(_engine_run(path, document, case) for case in document.cases))


def _engine_run(path: Path, document: EngineDocument, case: EngineCase) -> AnalyzedRun:
    is_complete = case.status == "done" and case.outdated is None and bool(case.step_times_s)
    return AnalyzedRun(
        id=case.name,
        path=Path(f"{path.absolute()}#{case.name}"),
        identity=RunIdentity(configuration=_engine_configuration(document, case)),
        conditions=_engine_conditions(document, case),
        started_s=document.environment.get("started_unix_s"),
        status="success" if is_complete else "outdated" if case.outdated else case.status,
        reason=None if is_complete else case.outdated or case.reason,
        step_times_s=case.step_times_s if is_complete else (),
        step_time_s=describe(case.step_times_s) if is_complete else None,
    )


def _engine_configuration(document: EngineDocument, case: EngineCase) -> dict[str, Value]:
    values = case.model_dump()
    options = {"arguments.llmb_options": document.settings.get("llmb_options")} if case.engine == LLMB else {}
    if case.variant:
        options["arguments.variant"] = case.variant
    return {
        "program": case.engine,
        **{key: values[key] for key in SAME},
        **{f"layout.{key}": values[key] for key in LAYOUT},
        "layout.gpus": 1,
        "compiled": document.settings.get("compiled"),
        **options,
    }


def _engine_conditions(document: EngineDocument, case: EngineCase) -> dict[str, Value]:
    settings, environment = document.settings, document.environment
    gpu = environment.get("gpu_before") or {}
    return {
        f"software.{case.engine}": case.engine_version,
        "software.torch": settings.get("torch"),
        "software.python": environment.get("python"),
        "software.system": environment.get("system"),
        "software.driver": gpu.get("driver_version"),
        "hardware.device": settings.get("device"),
        "hardware.power_limit": gpu.get("power.limit"),
        "hardware.max_sm_clock": gpu.get("clocks.max.sm"),
        "variables.expandable_segments": settings.get("expandable_segments"),
        "seed": settings.get("seed"),
        "steps": settings.get("steps"),
    }
