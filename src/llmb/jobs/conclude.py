# SPDX-License-Identifier: Apache-2.0
"""Concludes the run of a job that has ended and could not do so itself."""

from llmb.jobs.finish import finish_job
from llmb.programs.conclude import conclude_run, finished_result
from llmb.programs.port import End
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job_end, read_record
from llmb.runs.result import Result
from llmb.schedulers.port import JobState

KILLED = 137


def conclude_job(folder: RunFolder, state: JobState, scheduler_title: str) -> Result:
    """The result that the job wrote; without one, the result that follows from its files and its state."""
    record = read_record(folder)
    if record.status not in ("queued", "running"):
        return finished_result(folder, record)
    end = read_job_end(folder)
    if end and record.job and end.job_id != record.job.job_id:
        end = None  # of a second job, which was rejected
    if end and state.phase in ("unknown", "completed", "failed"):
        return finish_job(folder, end.exit_code, end.signal)
    cause = f"{scheduler_title} ({state.state})"
    return conclude_run(folder, record, End(end.exit_code if end else state.exit_code or KILLED, cause))
