# SPDX-License-Identifier: Apache-2.0
"""Decides the state of a job from its scheduler's answer and the files in its run folder. Pure.

The scheduler reports how the job ended, the folder how the run did: a run with all steps done is a success even if the
job was killed, and a run whose loss is not a number is invalid even if the job completed.
"""

from dataclasses import dataclass

from llmb.jobs.job import LOST, NOT_SUBMITTED, SUBMITTING, Change, Job, Status
from llmb.schedulers.lookup import all_schedulers
from llmb.schedulers.port import FROM_OUTSIDE, JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The state of a run according to its folder."""

    begun: bool = False
    """The batch script has started."""
    job_id: str | None = None
    """The job that recorded its end."""
    restarts: int = 0
    exit_code: int | None = None
    """Of the batch script; None while it runs, and if it was killed."""
    signal: str | None = None
    """The signal that ended it, if it could still record that."""
    ended_s: float | None = None
    run_status: str | None = None
    """``status`` of run.json; None if it cannot be read."""
    unread: str = "there is no record of it"
    """Why that is so."""
    run_reason: str | None = None
    run_of: tuple[str, int] | None = None
    """The last job that ran it, and that job's restarts."""
    steps: int = 0
    """Steps done."""
    planned: int | None = None
    done: bool = False
    """Every step is done, and the last checkpoint exists if one was requested."""

    def belongs_to(self, job: Job, restarts: int) -> bool:
        """Whether the recorded end is that of this job's latest start: an older one is irrelevant.

        A task of an array has its own id within the job, and its own folder.
        """
        same = self.job_id == job.job_id or job.array_index is not None
        return self.exit_code is not None and same and self.restarts >= restarts


COMPLETED, FAILED = "COMPLETED", "FAILED"
OWN_WORDS = frozenset([COMPLETED, FAILED, LOST, SUBMITTING, NOT_SUBMITTED])
"""States that need no scheduler."""


def known_states() -> frozenset[str]:
    """All states that a job may have."""
    return OWN_WORDS.union(*(scheduler.words for scheduler in all_schedulers()))


def decide(job: Job, seen: JobState, left: Left, now_s: float) -> Change:
    """The change of ``job`` if its scheduler was queried at ``now_s`` and answered ``seen``.

    The result of a job that the scheduler does not know (any more) follows from its folder alone.
    """
    if seen.phase == "unknown":
        return _forgotten(job, left, now_s)
    if seen.phase == "unrecognized":
        return _change(job, seen, now_s, job.status, seen.meaning)
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
    if left.done and (seen.phase in FROM_OUTSIDE or left.run_status == "success"):
        return "success", f"{meaning}, after its last step"
    if seen.phase == "cancelled":
        return "cancelled", f"{meaning}{_progress(left)}"
    own = left.belongs_to(job, seen.restarts) or left.run_of == (job.job_id, seen.restarts)
    if seen.phase == "failed" and left.run_status == "failed" and own:
        return "failed", left.run_reason or meaning  # names the rank, and has the steps already
    return "failed", f"{meaning}{_progress(left)}"


def _completed(left: Left) -> tuple[Status, str | None]:
    """A run is a success only if its record says so: the scheduler knows the job, not the run."""
    if left.run_status is None:
        return "invalid", f"the job completed, but the result of the run is not known: {left.unread}"
    if left.run_status == "failed":
        return "failed", left.run_reason
    if left.planned is not None and not left.done and left.run_status != "success":
        return "failed", f"the job completed, but the run did not{_progress(left)}"
    return "success", None


def _progress(left: Left) -> str:
    return f", after {left.steps} of {left.planned} steps" if left.planned is not None else ""


def _forgotten(job: Job, left: Left, now_s: float) -> Change:
    """Schedulers forget no pending or running job: it has ended, and its folder may contain how."""
    if left.belongs_to(job, job.restarts):
        state, status, reason = _marked(left)
    elif left.done and left.begun:
        state, status, reason = LOST, "success", "every step is done, but how the job ended is unknown"
    elif left.begun:
        state, status = LOST, "failed"
        mark = "it did not record its end: killed, or lost with its node"
        reason = f"its scheduler has forgotten it, and {mark}{_progress(left)}"
    else:
        state, status = LOST, "failed"
        reason = "its scheduler has forgotten it, and it never started: most likely cancelled while it was pending"
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
    if left.done and left.run_status == "success":
        return FAILED, "success", f"exit code {left.exit_code}, after its last step"
    reason = left.run_reason if left.run_status == "failed" else None
    return FAILED, "failed", reason or f"the batch script ended with exit code {left.exit_code}{_progress(left)}"
