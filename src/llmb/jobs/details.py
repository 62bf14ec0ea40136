# SPDX-License-Identifier: Apache-2.0
"""Details of a job that are in its run folder, not in its row of the history."""

from dataclasses import dataclass
from pathlib import Path

from llmb.jobs.job import Job
from llmb.runs.failure import last_lines
from llmb.runs.folder import RunFolder
from llmb.runs.log_tail import tail
from llmb.runs.record import Attempt, read_record

MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class JobDetails:
    """``last_lines`` are from a failed run's log, up to the failure, or from its batch script's output."""

    attempts: tuple[Attempt, ...] = ()
    last_lines: tuple[str, ...] = ()


def read_details(job: Job) -> JobDetails:
    """The details that can be read."""
    folder = RunFolder(Path(job.run_dir))
    try:
        attempts = () if job.prepares else read_record(folder).attempts
        lines = last_lines(tail(folder.log) or tail(folder.batch_output), MOST_LINES) if job.status == "failed" else []
    except (OSError, ValueError):
        return JobDetails()
    return JobDetails(attempts, tuple(lines))
