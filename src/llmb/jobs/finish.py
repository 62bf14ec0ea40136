# SPDX-License-Identifier: Apache-2.0
"""Writes the result of a job's run: the job itself, or, if it could not, whoever refreshes the history.

``python -m llmb.jobs.finish RUN_FOLDER EXIT_CODE SIGNAL`` is what a job calls after its workers ended; SIGNAL is empty
if there was none.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from llmb.jobspec.spec import read_spec
from llmb.programs.conclude import conclude_run, stored_result
from llmb.programs.port import End
from llmb.reference_suite.documented_paths import add_documented_trace, link_as_documented
from llmb.runs.folder import RunFolder
from llmb.runs.record import BegunJob, RunRecord, read_job, read_job_end, read_record, source_fields
from llmb.runs.result import Result
from llmb.schedulers.lookup import find_scheduler
from llmb.schedulers.port import JobState

KILLED = 137


def finish_job(folder: RunFolder, exit_code: int, signal: str = "") -> Result:
    """Writes the result of a job whose workers ended; ``signal`` is empty if there was none."""
    record = read_record(folder)
    spec = read_spec(folder)
    cause = find_scheduler(spec.scheduler).cause(signal) if signal else None
    result = conclude_run(folder, record, End(exit_code, cause))
    link_as_documented(folder, spec, record)
    add_documented_trace(folder, record.plan)
    return result


def conclude_job(folder: RunFolder, state: JobState, scheduler_title: str) -> Result:
    """The result that the job wrote; without one, the result that follows from its files and its state.

    A job that a signal ended could not know who sent it: where the scheduler says that it was cancelled, the run was.
    """
    record, end = read_record(folder), read_job_end(folder)
    if end and record.job and end.job_id != record.job.job_id:
        end = None  # of a second job, which was rejected
    cancelled = state.phase == "cancelled"
    known = record.status not in ("queued", "running")
    if known and not (cancelled and record.status == "failed" and end and end.signal):
        return stored_result(folder, record)
    if end and state.phase in ("unknown", "completed", "failed"):
        return finish_job(folder, end.exit_code, end.signal)
    cause: str | None = f"{scheduler_title} ({state.state})"
    code = end.exit_code if end else state.exit_code or KILLED
    if folder.launch_output.exists():  # no script of llmb has written how it began and ended
        record = _begun_as(record, state, folder)
        if state.phase in ("completed", "failed"):
            cause, code = None, state.exit_code or 0 if state.phase == "completed" else code
    return conclude_run(folder, record, End(code, cause, cancelled=cancelled))


def _begun_as(record: RunRecord, state: JobState, folder: RunFolder) -> RunRecord:
    """With the job that the scheduler reports, of which nothing in it has written."""
    handle = read_job(folder)
    if handle is None or state.started_s is None:
        return record
    job = BegunJob(scheduler=handle.scheduler, job_id=handle.job_id, nodes=state.nodes or "", restarts=state.restarts)
    started_at = datetime.fromtimestamp(state.started_s, UTC).isoformat(timespec="seconds")
    return record.model_copy(update={"job": job, "started_at": started_at, **source_fields()})


if __name__ == "__main__":
    finish_job(RunFolder(Path(sys.argv[1])), int(sys.argv[2]), sys.argv[3])
