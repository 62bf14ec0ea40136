# SPDX-License-Identifier: Apache-2.0
"""One run in the form in which it is judged and compared, whichever program trained it.

It is known by its record, by a log, or by the JSON document of the comparison of engines in ``benchmarks``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from llmb.analysis.copies import digest_of
from llmb.catalogue.records import Recipe, Window
from llmb.errors import UsageError
from llmb.input_files import read_text_file
from llmb.metrics.group_difference import KnownSpread, known_spread
from llmb.metrics.statistics import Statistics, describe
from llmb.programs.conclude import stored_result
from llmb.runs.drift import faults_of
from llmb.runs.folder import RunFolder
from llmb.runs.identity import RunIdentity, Value
from llmb.runs.record import RunRecord, SubmittedJob, read_job, read_record, seconds_of
from llmb.runs.record_file import BrokenRecord
from llmb.runs.recorded_identity import conditions_of, identity_of
from llmb.runs.steps import read_steps
from llmb.verdict.conditions import Faults


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedRun:
    """A run that ended. One without a record is known by its log alone: ``record`` and ``recipe`` may be None."""

    id: str
    """Short; what commands accept and print."""
    path: Path
    """Its run folder, or its log if it has no record."""
    identity: RunIdentity
    conditions: Mapping[str, Value] = field(default_factory=dict)
    """What may differ between repeats, under dotted keys: software, hardware, nodes, steps, seed."""
    label: str | None = None
    campaign: str | None = None
    started_s: float | None = None
    """Seconds since 1970."""
    status: str
    reason: str | None = None
    window: Window | None = None
    step_times_s: tuple[float, ...] = ()
    """Step times of the window's steps, in order, without profiled ones; empty unless the run has statistics."""
    step_time_s: Statistics | None = None
    nodes: tuple[str, ...] = ()
    faults: Faults = field(default_factory=dict)
    """What is known to have disturbed it."""
    recipe: Recipe | None = None
    record: RunRecord | None = None
    source: str | None = None
    """The run's own id, or what its log has of it: equal for copies. None if only ``path`` is known."""
    content: str | None = None
    """Equal for copies that were not changed."""

    @property
    def counted_as(self) -> str:
        """Equal for what counts as one run."""
        return self.source or str(self.path)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A run that was found and not used."""

    run: str
    reason: str


@dataclass(frozen=True, slots=True)
class FoundRuns:
    """What a selection stands for."""

    title: str
    runs: tuple[AnalyzedRun, ...]
    left_out: tuple[LeftOut, ...] = ()


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
    record = read_record(folder)
    try:
        job = read_job(folder)
    except (OSError, BrokenRecord):
        job = None  # the run is what its record says; only its campaign is not known
    return RecordedRun(folder, record, job)


def analyzed(run: RecordedRun) -> AnalyzedRun:
    """A run that has ended, with its figures. Raises BrokenRecord or OSError if they cannot be read."""
    record = run.record
    result = stored_result(run.folder, record)
    window = result.window or record.plan.window
    kept = result.step_time_s or None
    times = step_times(run.folder, window) if kept else ()
    return AnalyzedRun(
        id=run.id,
        path=run.folder.path,
        identity=identity_of(record),
        conditions=conditions_of(record),
        label=run.label,
        campaign=run.campaign,
        started_s=run.started_s,
        status=result.status,
        reason=result.flaw,
        window=window,
        step_times_s=times,
        step_time_s=describe(times) if times else kept,
        nodes=record.environment.nodes if record.environment else (),
        faults=faults_of(record, result),
        recipe=record.plan.recipe,
        record=record,
        source=record.run_id,
        content=digest_of(identity_of(record).key, result.status, result.steps, window, times or kept),
    )


def step_times(folder: RunFolder, window: Window) -> tuple[float, ...]:
    """In order, of the window's steps of which nothing was recorded; empty if the steps are in a log alone."""
    steps = read_steps(folder.steps)
    return tuple(one.step_time_s for one in steps if window.first <= one.step <= window.last and not one.profiled)


LAYOUT = ("mbs", "gbs", "seq_len", "layers")
SAME = ("workload", "size", "dtype", "gpu_type", "vocab_size", "experts")
LLMB = "llmb"
"""What the document calls the engine that its options are for."""


class EngineCase(BaseModel):
    """One engine, model, dtype, batch and round; fields that are not compared are not read.

    variant: what llmb does otherwise than it is used. outdated: why the result is not one of the present code.
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
    """A comparison of engines (docs/how-to/compare-engines.md). Version 1 has neither variants nor outdated cases."""

    schema_version: Literal[1, 2]
    kind: Literal["engine-comparison"]
    settings: dict[str, Any]
    environment: dict[str, Any]
    cases: tuple[EngineCase, ...]


def runs_of_engines(path: Path, title: str) -> FoundRuns:
    """One run for each case and round. Raises UsageError if the file is not such a document."""
    text = read_text_file(path)
    try:
        document = EngineDocument.model_validate_json(text)
    except ValidationError as error:
        do = "give the file that 'python -m benchmarks.engine --out FILE' wrote, or a folder of runs or logs"
        raise UsageError("this JSON file is not a comparison of engines", where=str(path), do=do) from error
    return FoundRuns(title, tuple(_engine_run(path, document, case) for case in document.cases))


def _engine_run(path: Path, document: EngineDocument, case: EngineCase) -> AnalyzedRun:
    done = case.status == "done" and case.outdated is None and bool(case.step_times_s)
    return AnalyzedRun(
        id=case.name,
        path=Path(f"{path.absolute()}#{case.name}"),
        identity=RunIdentity(configuration=_engine_configuration(document, case)),
        conditions=_engine_conditions(document, case),
        started_s=document.environment.get("started_unix_s"),
        status="success" if done else "outdated" if case.outdated else case.status,
        reason=None if done else case.outdated or case.reason,
        step_times_s=case.step_times_s if done else (),
        step_time_s=describe(case.step_times_s) if done else None,
    )


def _engine_configuration(document: EngineDocument, case: EngineCase) -> dict[str, Value]:
    values = case.model_dump()
    own = {"arguments.llmb_options": document.settings.get("llmb_options")} if case.engine == LLMB else {}
    if case.variant:
        own["arguments.variant"] = case.variant
    return {
        "program": case.engine,
        **{key: values[key] for key in SAME},
        **{f"layout.{key}": values[key] for key in LAYOUT},
        "layout.gpus": 1,
        "compiled": document.settings.get("compiled"),
        **own,
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


def measured(found: FoundRuns) -> FoundRuns:
    """Without the runs that failed, are invalid, or whose steps do not tell how fast they are."""
    kept = tuple(run for run in found.runs if why_left_out(run) is None)
    dropped = [LeftOut(run.id, reason) for run in found.runs if (reason := why_left_out(run))]
    return FoundRuns(found.title, kept, (*found.left_out, *dropped))


def why_left_out(run: AnalyzedRun) -> str | None:
    """None for a run that is a measurement."""
    flaw = flaw_of(run)
    return (
        f"{run.status.replace('_', ' ')}: {flaw}"
        if flaw and run.reason and run.status not in ("success", "cancelled")
        else flaw
    )


def flaw_of(run: AnalyzedRun) -> str | None:
    """What is wrong with a run; its status if no reason is known, or the reason alone does not show it."""
    if run.status == "cancelled" and run.reason:
        return f"cancelled: {run.reason}"
    if run.status != "success":
        return run.reason or run.status.replace("_", " ")
    return run.reason or (None if run.step_time_s else "its steps have no statistics")


def grouped(runs: Iterable[AnalyzedRun]) -> list[list[AnalyzedRun]]:
    """Repeats together, by the order of the first of each."""
    groups: dict[str, list[AnalyzedRun]] = {}
    for run in runs:
        groups.setdefault(run.identity.key, []).append(run)
    return list(groups.values())


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
