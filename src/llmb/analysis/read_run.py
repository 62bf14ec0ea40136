# SPDX-License-Identifier: Apache-2.0
"""Reads one run folder, or the log of a run without one, as it is judged and compared."""

from dataclasses import dataclass
from datetime import datetime

from llmb.analysis.records import AnalyzedRun, log_identity
from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.logs.files import ParsedFile
from llmb.logs.outcome import digest_of
from llmb.metrics.statistics import describe
from llmb.programs.conclude import finished_result
from llmb.runs.folder import RunFolder
from llmb.runs.identity import conditions_of, identity_of
from llmb.runs.record import RunRecord, SubmittedJob, read_job, read_record
from llmb.runs.record_file import BrokenRecord
from llmb.runs.result import Result
from llmb.runs.short_id import id_of_name, short_id
from llmb.runs.steps import read_steps


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run folder whose record was read, and nothing else of it."""

    folder: RunFolder
    record: RunRecord
    job: SubmittedJob | None

    @property
    def id(self) -> str:
        return short_id(self.folder.path)

    @property
    def label(self) -> str | None:
        return self.record.label

    @property
    def campaign(self) -> str | None:
        return self.job.campaign if self.job else None

    @property
    def started_s(self) -> float | None:
        at = self.record.started_at or (self.job and self.job.submitted_at)
        return datetime.fromisoformat(at).timestamp() if at else None

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


def analyzed_run(folder: RunFolder) -> AnalyzedRun:
    """The run in a folder. Raises UsageError if it has not ended, BrokenRecord or OSError if it cannot be read."""
    run = read_folder(folder)
    if not run.has_ended:
        do = "'llmb jobs wait' waits for it"
        raise UsageError(f"the run has no result yet: it is {run.record.status}", where=str(folder.path), do=do)
    return analyzed(run)


def analyzed(run: RecordedRun) -> AnalyzedRun:
    """A run that has ended, with its figures. Raises BrokenRecord or OSError if they cannot be read.

    The result is concluded again from the run's files, so that runs of every version are measured in the same way.
    """
    record = run.record
    result = finished_result(run.folder, record)
    window = result.window or record.plan.window
    times = _step_times(run.folder, window) if result.step_time_s else ()
    return AnalyzedRun(
        id=run.id,
        path=run.folder.path,
        identity=identity_of(record),
        conditions=conditions_of(record),
        label=run.label,
        campaign=run.campaign,
        started_s=run.started_s,
        status=result.status,
        reason=_why_no_measurement(result),
        window=window,
        step_times_s=times,
        step_time_s=describe(times) if times else result.step_time_s,
        nodes=record.environment.nodes if record.environment else (),
        disturbing=result.other_work.disturbing if result.other_work else None,
        recipe=record.plan.recipe,
        record=record,
        source=record.run_id,
        content=digest_of(identity_of(record).key, result.status, result.steps, window, times or result.step_time_s),
    )


def analyzed_log(file: ParsedFile) -> AnalyzedRun:
    """The run that a log without a record is of. What it computed is known as far as the log and its path tell."""
    outcome = file.outcome
    return AnalyzedRun(
        id=id_of_name(str(file.path.absolute())),
        path=file.path,
        identity=log_identity(file),
        started_s=file.path.stat().st_mtime,
        status=outcome.status,
        reason=None if outcome.status == "success" else outcome.reason,
        window=outcome.window,
        step_times_s=tuple(outcome.step_times_s),
        step_time_s=outcome.step_time_s,
        source=outcome.digest,
        content=outcome.digest,
    )


def _why_no_measurement(result: Result) -> str | None:
    return result.reason or result.step_time_reason or result.measurement_reason


def _step_times(folder: RunFolder, window: Window) -> tuple[float, ...]:
    """In order, of the window's steps of which nothing was recorded; empty if the steps are in a log alone."""
    steps = read_steps(folder.steps)
    return tuple(one.step_time_s for one in steps if window.first <= one.step <= window.last and not one.profiled)
