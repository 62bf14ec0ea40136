# SPDX-License-Identifier: Apache-2.0
"""Reads what a job left in its run folder, as far as it can be read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from llmb.jobs.job import Job
from llmb.jobs.states import FolderState
from llmb.jobs.task import task_outcome
from llmb.programs.lookup import find_program
from llmb.programs.port import StepsDone
from llmb.runs.failure import last_lines, tail
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_job_end, read_record
from llmb.runs.steps import read_steps

Content = TypeVar("Content")
MOST_LINES = 12
MOST_LISTED_BYTES = 1 << 20
"""Some 1,700 steps, which are read within 0.1 s: a list of runs must not wait for more of each."""


def read_folder(run_dir: str) -> FolderState:
    """Missing, damaged and unreadable files count as missing: a job may die at any point."""
    folder = RunFolder(Path(run_dir))
    record, end = _readable(read_record, folder), _readable(read_job_end, folder)
    progress = _read_progress(folder, record) if record else StepsDone(0, done=False)
    task = None if record else _readable(lambda place: task_outcome(place, end), folder)
    outcome = record or task
    return FolderState(
        begun=(record is not None and record.started_at is not None) or end is not None or folder.batch_output.exists(),
        end=end,
        run_status=outcome.status if outcome else None,
        unread=_unread(folder),
        gone=not folder.path.is_dir(),
        run_reason=outcome.reason if outcome else None,
        run_of=(record.job.job_id, record.job.restarts) if record and record.job else None,
        steps=progress.steps,
        planned=record.plan.steps if record else None,
        done=progress.done or (task is not None and task.status == "success"),
    )


def _unread(folder: RunFolder) -> str:
    """Why a record cannot be read, if it cannot."""
    if not folder.path.is_dir():
        return "the run folder is gone"
    if folder.task.exists():
        return f"{folder.job_end.name} is not there"
    return f"{folder.record.name} " + ("cannot be read" if folder.record.exists() else "is gone")


def _read_progress(folder: RunFolder, record: RunRecord) -> StepsDone:
    try:
        return find_program(record.program).progress(folder, record.plan)
    except (OSError, ValueError):
        return StepsDone(0, done=False)


def read_figures(run_dir: str) -> dict[str, Any]:
    """The fields of a job that the run's result has: mean step time in seconds, verdict, and the nodes to be drained
    by what happened on them; None if it has none.
    """
    record = _readable(read_record, RunFolder(Path(run_dir)))
    result = record.result if record else None
    return {
        "step_time_s": result.step_time_s.mean if result and result.step_time_s else None,
        "verdict": result.verdict_name if result else None,
        "bad_nodes": ",".join(result.machine.faulty_nodes) or None if result and result.machine else None,
    }


def read_step_times(job: Job) -> list[float]:
    """In seconds, in order; empty for a run that records no steps, that has too many to list, or cannot be read."""

    def times(folder: RunFolder) -> list[float]:
        if folder.steps.stat().st_size > MOST_LISTED_BYTES:
            return []
        return [step.step_time_s for step in read_steps(folder.steps)]

    return _readable(times, RunFolder(Path(job.run_dir))) or []


def _readable(read: Callable[[RunFolder], Content], folder: RunFolder) -> Content | None:
    try:
        return read(folder)
    except (OSError, ValueError):
        return None


def read_run(job: Job) -> RunRecord | None:
    """The record of a job's run; None for another job, and if it cannot be read."""
    return _readable(read_record, RunFolder(Path(job.run_dir))) if job.kind == "run" else None


def read_last_lines(job: Job) -> list[str]:
    """The log of a failed job up to the failure, or its batch script's output."""
    folder = RunFolder(Path(job.run_dir))
    if job.status != "failed":
        return []
    return _readable(lambda place: last_lines(tail(place.log) or tail(place.batch_output), MOST_LINES), folder) or []
