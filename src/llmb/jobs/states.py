# SPDX-License-Identifier: Apache-2.0
"""What became of a job: from what its scheduler says, and what the job left in its run folder. Pure.

The scheduler tells how the job ended, the folder how the run did: a run whose every step is done is a success although
the job was ended, and one whose loss is not a number is none although the job is called completed.
"""

from dataclasses import dataclass

from llmb.jobs.job import LOST, NOT_SUBMITTED, SUBMITTING, Change, Job, Status
from llmb.schedulers.lookup import all_schedulers
from llmb.schedulers.port import FROM_OUTSIDE, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What a run folder says of its run."""

    begun: bool = False
    """The batch script has started."""
    job_id: str | None = None
    """The job that wrote the mark of its end."""
    restarts: int = 0
    exit_code: int | None = None
    """Of the batch script; null while it runs, and where it was killed."""
    signal: str | None = None
    """The signal that it was ended by, if it could still write that."""
    ended_s: float | None = None
    run_status: str | None = None
    """``status`` of run.json."""
    run_reason: str | None = None
    run_of: tuple[str, int] | None = None
    """The job, and its restarts, that the run was in for the last time."""
    steps: int = 0
    """Steps done."""
    planned: int | None = None
    done: bool = False
    """Every step is done, and the last checkpoint is there where one is wanted."""

    def belongs_to(self, job: Job, restarts: int) -> bool:
        """Whether the mark is of this job's latest start: an older one says nothing of it.

        A task of an array has an id of its own within the job, and a folder of its own.
        """
        same = self.job_id == job.job_id or job.array_index is not None
        return self.exit_code is not None and same and self.restarts >= restarts


COMPLETED, FAILED = "COMPLETED", "FAILED"
OWN_WORDS = frozenset([COMPLETED, FAILED, LOST, SUBMITTING, NOT_SUBMITTED])
"""States that need no scheduler."""


def known_states() -> frozenset[str]:
    """All that a job's state may be."""
    return OWN_WORDS.union(*(scheduler.words for scheduler in all_schedulers()))


def decide(job: Job, seen: JobState, left: Left, now_s: float) -> Change:
    """What to write down of ``job``, where its scheduler was asked at ``now_s`` and answered ``seen``.

    Of a job that the scheduler does not know (any more) its folder alone tells what became of it.
    """
    if seen.phase == "unknown":
        return _forgotten(job, left, now_s)
    if not seen.ended:
        return _change(job, seen, now_s, "queued" if seen.phase == "queued" else "running", _live_reason(seen))
    status, reason = _ended(job, seen, left)
    return _change(job, seen, now_s, status, reason)


def _change(job: Job, seen: JobState, now_s: float, status: Status, reason: str | None) -> Change:
    over = status not in ("queued", "running")
    return Change(
        key=job.key,
        state=seen.state,
        status=status,
        reason=reason,
        checked_s=now_s,
        exit_code=seen.exit_code if over else None,
        signal=(seen.signal or None) if over else None,
        nodes=seen.nodes or job.nodes,
        restarts=max(seen.restarts, job.restarts),
        started_s=seen.started_s,
        ended_s=seen.ended_s if over else None,
    )


def _live_reason(seen: JobState) -> str | None:
    again = f"starts again (restart {seen.restarts})" if seen.restarts and seen.phase == "queued" else None
    return ": ".join(filter(None, (again, seen.meaning))) or None


def _ended(job: Job, seen: JobState, left: Left) -> tuple[Status, str | None]:
    if left.run_status == "invalid":
        return "invalid", left.run_reason
    if seen.phase == "completed":
        return _completed(left)
    meaning = seen.meaning or seen.state
    if seen.phase in FROM_OUTSIDE and left.done:
        return "success", f"{meaning}, after its last step"
    if seen.phase == "cancelled":
        return "cancelled", f"{meaning}{_progress(left)}"
    own = left.belongs_to(job, seen.restarts) or left.run_of == (job.job_id, seen.restarts)
    if seen.phase == "failed" and left.run_status == "failed" and own:
        return "failed", left.run_reason or meaning  # names the rank, and has the steps already
    return "failed", f"{meaning}{_progress(left)}"


def _completed(left: Left) -> tuple[Status, str | None]:
    """The scheduler's word holds for a run of which the folder says nothing, but one that failed did not succeed."""
    if left.run_status == "failed":
        return "failed", left.run_reason
    if left.planned is not None and not left.done and left.run_status != "success":
        return "failed", f"the job completed, but the run did not{_progress(left)}"
    return "success", None


def _progress(left: Left) -> str:
    return f", after {left.steps} of {left.planned} steps" if left.planned is not None else ""


def _forgotten(job: Job, left: Left, now_s: float) -> Change:
    """No job that still waits or runs is forgotten: it has ended, and its folder may know how."""
    if left.belongs_to(job, job.restarts):
        state, status, reason = _marked(left)
    elif left.done and left.begun:
        state, status, reason = LOST, "success", "every step is done, but nobody knows how the job ended"
    elif left.begun:
        state, status = LOST, "failed"
        mark = "it left no mark of its end: killed, or lost with its node"
        reason = f"its scheduler has forgotten it, and {mark}{_progress(left)}"
    else:
        state, status = LOST, "failed"
        reason = "its scheduler has forgotten it, and it never began: most likely cancelled while it waited"
    return Change(
        key=job.key,
        state=state,
        status=status,
        reason=reason,
        checked_s=now_s,
        exit_code=left.exit_code if left.belongs_to(job, job.restarts) else None,
        nodes=job.nodes,
        restarts=max(job.restarts, left.restarts),
        started_s=job.started_s,
        ended_s=left.ended_s,
    )


def _marked(left: Left) -> tuple[str, Status, str | None]:
    if left.run_status == "invalid":
        return COMPLETED if left.exit_code == 0 else FAILED, "invalid", left.run_reason
    if left.signal:
        if left.done:
            return LOST, "success", f"ended by {left.signal}, after its last step"
        return LOST, "failed", f"ended by {left.signal}{_progress(left)}: cancelled, preempted or out of time"
    if left.exit_code == 0:
        status, reason = _completed(left)
        return COMPLETED, status, reason
    reason = left.run_reason if left.run_status == "failed" else None
    return FAILED, "failed", reason or f"the batch script ended with exit code {left.exit_code}{_progress(left)}"
