# SPDX-License-Identifier: Apache-2.0
"""Decides the state of a job from the scheduler's answer and the content of the job's folder.

The scheduler reports how the job ended; the folder, how the run ended. A run that completed all steps is a success even
if the job was killed, and a run whose loss is not finite is invalid even if the job completed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from llmb.jobs.job import ANSWERED, LIVE, LOST, NOT_SUBMITTED, SUBMITTING, Job, Status
from llmb.jobs.task import task_outcome
from llmb.launch.programs.port import StepProgress, find_program
from llmb.launch.scheduler_lookup import all_schedulers
from llmb.launch.scheduler_port import FROM_OUTSIDE, JobState
from llmb.runs.failure import last_lines
from llmb.runs.folder import RunFolder, tail
from llmb.runs.record import JobEnd, RunRecord, read_job_end, read_record
from llmb.runs.steps import read_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderState:
    """The state of a job according to its folder."""

    begun: bool = False
    """True if the batch script has started."""
    end: JobEnd | None = None
    """How the batch script ended; None while it runs, and if it was killed."""
    run_status: Status | None = None
    """The ``status`` in run.json, or a task's; None if it is unknown."""
    unread: str = "there is no record of it"
    """The reason why the run's status cannot be read."""
    gone: bool = False
    """True if the folder no longer exists."""
    run_reason: str | None = None
    run_of: tuple[str, int] | None = None
    """The id of the last job that started the run, and the number of its restarts."""
    steps: int = 0
    """The number of steps done."""
    planned: int | None = None
    complete: bool = False
    """True if every step is done, and no requested checkpoint is found to be missing; or if a task succeeded."""

    def end_of(self, job: Job, restarts: int) -> JobEnd | None:
        """Return the recorded end if it belongs to this start of the job, else None."""
        end = self.end
        return end if end and end.job_id == job.job_id and end.restarts >= restarts else None


COMPLETED, FAILED = "COMPLETED", "FAILED"
COMMON_STATES = frozenset([COMPLETED, FAILED, LOST, SUBMITTING, NOT_SUBMITTED])
"""States that jobs of every scheduler may have."""


def job_states() -> frozenset[str]:
    """Return all states that a job may have."""
    return COMMON_STATES.union(*(scheduler.words for scheduler in all_schedulers()))


def decide(job: Job, state: JobState, folder: FolderState, now_s: float) -> Job:
    """Return ``job`` updated with the scheduler's answer ``state`` at ``now_s``.

    If the scheduler no longer knows the job, its result follows from ``folder`` alone.
    """
    if state.phase == "unknown":
        return _forgotten(job, folder, now_s)
    if state.phase == "unrecognized":
        return _changed(job, state, now_s, job.status, state.meaning)
    if not state.ended:
        return _changed(job, state, now_s, "queued" if state.phase == "queued" else "running", _live_reason(state))
    status, reason = _ended(job, state, folder)
    return _changed(job, state, now_s, status, reason)


def _changed(job: Job, state: JobState, now_s: float, status: Status, reason: str | None) -> Job:
    answer: dict[str, Any] = {name: getattr(state, name) for name in ANSWERED}
    answer |= {"nodes": state.nodes or job.nodes, "restarts": max(state.restarts, job.restarts)}
    answer["signal"] = state.signal or None
    if status in LIVE:
        answer |= {"exit_code": None, "signal": None, "ended_s": None}
    answer |= dict.fromkeys(("fault", "bad_nodes", "step_time_s", "verdict"))
    return replace(job, **answer, status=status, reason=reason, checked_s=now_s)


def _live_reason(state: JobState) -> str | None:
    again = f"starts again (restart {state.restarts})" if state.restarts and state.phase == "queued" else None
    return ": ".join(filter(None, (again, state.meaning))) or None


def _ended(job: Job, state: JobState, folder: FolderState) -> tuple[Status, str | None]:
    if folder.run_status == "invalid":
        return "invalid", folder.run_reason
    if state.phase == "completed":
        return _completed(folder)
    meaning = state.meaning or state.state
    if folder.complete and (state.phase in FROM_OUTSIDE or folder.run_status not in ("failed", "cancelled")):
        return "success", f"{meaning}, after its last step"
    if state.phase == "cancelled":
        return "cancelled", f"{meaning}{_progress(folder)}"
    is_this = folder.end_of(job, state.restarts) is not None or folder.run_of == (job.job_id, state.restarts)
    if state.phase == "failed" and folder.run_status == "failed" and is_this:
        return "failed", folder.run_reason or meaning  # it names the rank and includes the number of steps
    return "failed", f"{meaning}{_progress(folder)}"


def _completed(folder: FolderState) -> tuple[Status, str | None]:
    if folder.run_status is None:
        return "invalid", f"the job completed, but the result of the run is unknown: {folder.unread}"
    if folder.run_status in ("failed", "cancelled"):
        return folder.run_status, folder.run_reason
    if folder.planned is not None and not folder.complete and folder.run_status != "success":
        return "failed", f"the job completed, but the run did not{_progress(folder)}"
    return "success", None


def _progress(folder: FolderState) -> str:
    return f", after {folder.steps} of {folder.planned} steps" if folder.planned is not None else ""


def _forgotten(job: Job, folder: FolderState, now_s: float) -> Job:
    """Conclude a job from its folder; it has ended, because schedulers never forget live jobs."""
    end = folder.end_of(job, job.restarts)
    if end:
        state, status, reason = _marked(folder, end)
    elif folder.complete and folder.begun:
        state, status, reason = LOST, "success", "every step is done, but how the job ended is unknown"
    elif folder.begun:
        state, status = LOST, "failed"
        mark = "it did not record its end: killed, or lost with its node"
        reason = f"its scheduler has forgotten it, and {mark}{_progress(folder)}"
    elif folder.gone:
        state, status, reason = LOST, "failed", f"its scheduler has forgotten it, and {folder.unread}"
    else:
        state, status = LOST, "failed"
        reason = "its scheduler has forgotten it, and it never started: most likely cancelled while it was pending"
    news = JobState(
        job_id=str(job.job_id),
        state=state,
        exit_code=end.exit_code if end else None,
        restarts=folder.end.restarts if folder.end else 0,
        started_s=job.started_s,
        ended_s=folder.end.ended_s if folder.end else None,
    )
    return _changed(job, news, now_s, status, reason)


def _marked(folder: FolderState, end: JobEnd) -> tuple[str, Status, str | None]:
    if folder.run_status == "invalid":
        return COMPLETED if end.exit_code == 0 else FAILED, "invalid", folder.run_reason
    if folder.run_status == "cancelled":
        return LOST, "cancelled", folder.run_reason
    if end.signal:
        if folder.complete:
            return LOST, "success", f"ended by {end.signal}, after its last step"
        return LOST, "failed", f"ended by {end.signal}{_progress(folder)}: cancelled, preempted or out of time"
    if end.exit_code == 0:
        status, reason = _completed(folder)
        return COMPLETED, status, reason
    if folder.complete and folder.run_status not in ("failed", "cancelled"):
        return FAILED, "success", f"exit code {end.exit_code}, after its last step"
    reason = folder.run_reason if folder.run_status == "failed" else None
    return FAILED, "failed", reason or f"the batch script ended with exit code {end.exit_code}{_progress(folder)}"


Content = TypeVar("Content")
MOST_LINES = 12
MOST_LISTED_BYTES = 1 << 20
"""Size limit of a listed run's file of steps: about 1,700 steps, which are read within 0.1 s."""


def read_folder(run_dir: str) -> FolderState:
    """Read a job's folder. Damaged and unreadable files count as missing, because a job may die at any point."""
    folder = RunFolder(Path(run_dir))
    record, end = _readable(read_record, folder), _readable(read_job_end, folder)
    progress = StepProgress(0, complete=False)
    if record:
        program, plan = record.program, record.plan
        progress = _readable(lambda place: find_program(program).progress(place, plan), folder) or progress
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
        complete=progress.complete or (task is not None and task.status == "success"),
    )


def _unread(folder: RunFolder) -> str:
    if not folder.path.is_dir():
        return "the run folder is gone"
    if folder.task.exists():
        return f"{folder.job_end.name} is missing"
    return f"{folder.record.name} " + ("cannot be read" if folder.record.exists() else "is gone")


def read_figures(run_dir: str) -> dict[str, Any]:
    """Read the fields of a job that come from its run's result: mean step time in seconds, verdict, and nodes at fault;
    each is None if the result does not contain it.
    """
    record = _readable(read_record, RunFolder(Path(run_dir)))
    result = record.result if record else None
    return {
        "step_time_s": result.step_time_s.mean if result and result.step_time_s else None,
        "verdict": result.verdict_name if result else None,
        "bad_nodes": ",".join(result.machine.faulty_nodes) or None if result and result.machine else None,
    }


def read_step_times(job: Job) -> list[float]:
    """Return step times in seconds, in order; an empty list if there are too many, or they cannot be read."""

    def times(folder: RunFolder) -> list[float]:
        if folder.steps.stat().st_size > MOST_LISTED_BYTES:
            return []
        return [step.step_time_s for step in read_steps(folder.steps)]

    return _readable(times, job.folder) or []


def _readable(read: Callable[[RunFolder], Content], folder: RunFolder) -> Content | None:
    try:
        return read(folder)
    except (OSError, ValueError):
        return None


def read_run(job: Job) -> RunRecord | None:
    """Read the record of a job's run; return None if the job is not a run or the record cannot be read."""
    return _readable(read_record, job.folder) if job.kind == "run" else None


def read_last_lines(job: Job) -> list[str]:
    """Return the last lines of a failed job's log, or else of its batch output; an empty list for other jobs."""
    folder = job.folder
    if job.status != "failed":
        return []
    return _readable(lambda place: last_lines(tail(place.log) or tail(place.batch_output), MOST_LINES), folder) or []
