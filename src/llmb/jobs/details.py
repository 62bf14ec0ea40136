# SPDX-License-Identifier: Apache-2.0
"""Details of a job that are in its run folder, not in its row of the history."""

from dataclasses import dataclass
from pathlib import Path

from llmb.jobs.job import Job
from llmb.runs.failure import last_lines
from llmb.runs.folder import RunFolder
from llmb.runs.log_tail import tail
from llmb.runs.record import Attempt, read_record
from llmb.verdict.sentence import headline

MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class JobDetails:
    """``last_lines`` are from a failed run's log, up to the failure, or from its batch script's output."""

    attempts: tuple[Attempt, ...] = ()
    last_lines: tuple[str, ...] = ()
    verdict: str | None = None
    """In one line, as it was when the run ended; None for a run without one."""


def read_details(job: Job) -> JobDetails:
    """The details that can be read."""
    folder = RunFolder(Path(job.run_dir))
    try:
        record = None if job.kind != "run" else read_record(folder)
        lines = last_lines(tail(folder.log) or tail(folder.batch_output), MOST_LINES) if job.status == "failed" else []
    except (OSError, ValueError):
        return JobDetails()
    if record is None:
        return JobDetails(last_lines=tuple(lines))
    verdict = record.result.verdict if record.result else None
    return JobDetails(record.attempts, tuple(lines), headline(verdict) if verdict else None)
