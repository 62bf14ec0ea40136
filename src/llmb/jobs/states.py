# SPDX-License-Identifier: Apache-2.0
"""What became of a job: from what Slurm says, and what the job left in its run folder. Pure.

Slurm tells how the job ended, the folder how the run did: a run whose every step is done is a success although Slurm
ended it, and one whose loss is not a number is none although Slurm calls the job completed.
"""

from dataclasses import dataclass
from pathlib import Path

from llmb.jobs.job import LOST, NOT_SUBMITTED, SUBMITTING, Change, Job, Status
from llmb.launch.slurm.job_state import LIVE, UNKNOWN, JobState
from llmb.runs.folder import RunFolder


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
        same = self.job_id == job.job_id or "_" in (job.job_id or "")
        return self.exit_code is not None and same and self.restarts >= restarts


WAITING = frozenset(
    [
        "PENDING",
        "CONFIGURING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
        "POWER_UP_NODE",
    ]
)
FROM_OUTSIDE = frozenset(["TIMEOUT", "DEADLINE", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "CANCELLED"])
"""Ends that say nothing of the run: it may have been through."""
INFRASTRUCTURE = frozenset(["NODE_FAIL", "PREEMPTED", "BOOT_FAIL"])
"""Ends after which the same job may well get through."""

ENDS = {
    "BOOT_FAIL": "a node could not be booted",
    "CANCELLED": "cancelled",
    "DEADLINE": "ended at its deadline",
    "FAILED": "failed",
    "LAUNCH_FAILED": "the batch script could not be started",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "ended by the kernel for want of host memory",
    "PREEMPTED": "preempted by another job",
    "RECONFIG_FAIL": "a node could not be configured anew",
    "REVOKED": "revoked: another cluster runs it",
    "TIMEOUT": "ended at its time limit",
}
STATES = frozenset([*WAITING, *LIVE, *ENDS, "COMPLETED", LOST, SUBMITTING, NOT_SUBMITTED])
"""All that a job's state may be."""
WAITS = {
    "BeginTime": "may not start yet",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job that it depends on did not end as wanted: it will never start; cancel it",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; 'scontrol release' lets it go",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows, or for nodes that are down",
    "PartitionTimeLimit": "it asks for more time than the partition allows: it will never start",
    "Priority": "jobs of higher priority come first",
    "ReqNodeNotAvail": "a node that it asks for is not available",
    "Reservation": "the reservation has not begun, or is full",
    "Resources": "the nodes are busy",
}


def decide(job: Job, seen: JobState, left: Left, now_s: float) -> Change:
    """What to write down of ``job``, where Slurm was asked at ``now_s`` and answered ``seen``.

    Of a job that Slurm does not know (any more) its folder alone tells what became of it.
    """
    if seen.state == UNKNOWN:
        return _forgotten(job, left, now_s)
    if not seen.ended:
        status: Status = "queued" if seen.state in WAITING else "running"
        return _change(job, seen, now_s, status, _live_reason(seen))
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
    again = f"starts again (restart {seen.restarts})" if seen.restarts and seen.state in WAITING else None
    if seen.state == "SUSPENDED":
        return "suspended by Slurm"
    if seen.state not in WAITING or seen.reason in (None, "", "None"):
        return again
    name = str(seen.reason).strip("()")
    known = next((text for key, text in WAITS.items() if name.partition(",")[0] == key), None)
    words = f"{known} ({name})" if known else name
    return f"{again}: {words}" if again else words


def _ended(job: Job, seen: JobState, left: Left) -> tuple[Status, str | None]:
    if left.run_status == "invalid":
        return "invalid", left.run_reason
    if seen.state == "COMPLETED":
        return _completed(left)
    if seen.state in FROM_OUTSIDE and left.done:
        return "success", f"{ENDS[seen.state]}, after its last step"
    words = _end_words(seen)
    if seen.state in ("CANCELLED", "REVOKED"):
        return "cancelled", f"{words}{_progress(left)}"
    own = left.belongs_to(job, seen.restarts) or left.run_of == (job.job_id, seen.restarts)
    if seen.state == "FAILED" and left.run_status == "failed" and own:
        return "failed", left.run_reason or words  # names the rank, and has the steps already
    return "failed", f"{words}{_progress(left)}"


def _completed(left: Left) -> tuple[Status, str | None]:
    """Slurm's word holds for a run of which the folder says nothing, but a run that failed did not succeed."""
    if left.run_status == "failed":
        return "failed", left.run_reason
    if left.planned is not None and not left.done and left.run_status != "success":
        return "failed", f"the job completed, but the run did not{_progress(left)}"
    return "success", None


def _end_words(seen: JobState) -> str:
    words = ENDS.get(seen.state, f"ended as {seen.state}")
    if seen.state == "CANCELLED" and seen.cancelled_by:
        return f"{words} by user {seen.cancelled_by}"
    if seen.state == "FAILED":
        return _failed_words(seen)
    if seen.state in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL") and seen.nodes:
        return f"{words} ({seen.nodes})"
    return words


def _failed_words(seen: JobState) -> str:
    if seen.reason in ("JobLaunchFailure", "LaunchFailed") or (seen.exit_code == 0 and seen.signal):
        how = f"signal {seen.signal}" if seen.signal else str(seen.reason)
        return f"the batch script was killed or could not be started ({how})"
    if seen.exit_code:
        return f"the batch script ended with exit code {seen.exit_code}"
    return "failed" + (f" ({seen.reason})" if seen.reason not in (None, "", "None") else "")


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
        reason = (
            f"Slurm has forgotten it, and it left no mark of its end: killed, or lost with its node{_progress(left)}"
        )
    else:
        state, status = LOST, "failed"
        reason = "Slurm has forgotten it, and it never began: most likely cancelled while it waited"
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
        return "COMPLETED" if left.exit_code == 0 else "FAILED", "invalid", left.run_reason
    if left.signal:
        if left.done:
            return LOST, "success", f"ended by {left.signal}, after its last step"
        return LOST, "failed", f"ended by {left.signal}{_progress(left)}: cancelled, preempted or out of time"
    if left.exit_code == 0:
        status, reason = _completed(left)
        return "COMPLETED", status, reason
    reason = left.run_reason if left.run_status == "failed" else None
    return "FAILED", "failed", reason or f"the batch script ended with exit code {left.exit_code}{_progress(left)}"


def is_same(job: Job, seen: JobState) -> bool:
    """Whether Slurm's answer is of ``job``: ids begin anew when a controller lost its state.

    A run's batch script is its own; the tasks of an array share the one in the folder without their index.
    """
    if seen.command is None:
        return True
    folder = RunFolder(Path(job.run_dir))
    base, _, index = job.name.rpartition(".")
    shared = [RunFolder(folder.path.parent.with_name(base) / folder.name)] if index.isdigit() else []
    return any(seen.command.endswith(str(one.batch_script)) for one in (folder, *shared))
