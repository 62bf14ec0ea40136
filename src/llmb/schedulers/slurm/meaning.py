# SPDX-License-Identifier: Apache-2.0
"""What Slurm's terms for states and reasons mean. Pure."""

from llmb.schedulers.port import UNKNOWN, JobState, Phase
from llmb.schedulers.slurm.job_state import ENDED, SlurmJob

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
RUNNING = frozenset(
    ["RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "STAGE_OUT", "SIGNALING", "STOPPED", "EXPEDITING"]
)
ENDS = {
    "BOOT_FAIL": "a node could not be booted",
    "CANCELLED": "cancelled",
    "DEADLINE": "ended at its deadline",
    "FAILED": "failed",
    "LAUNCH_FAILED": "the batch script could not be started",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "ended by the kernel: out of host memory",
    "PREEMPTED": "preempted by another job",
    "RECONFIG_FAIL": "a node could not be reconfigured",
    "REVOKED": "revoked: another cluster runs it",
    "TIMEOUT": "ended at its time limit",
}
WORDS = frozenset([*WAITING, *RUNNING, *ENDED])
"""Every state that is known; a later Slurm may report others."""
HOLDS = {"SUSPENDED": "suspended by Slurm", "EXPEDITING": "ended; Slurm checks whether to requeue it"}
WAITS = {
    "BeginTime": "may not start yet",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job that it depends on did not end as required: it will never start; cancel it",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; 'scontrol release' lets it go",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "it requests more nodes than the partition allows, or for nodes that are down",
    "PartitionTimeLimit": "it requests more time than the partition allows: it will never start",
    "Priority": "jobs of higher priority come first",
    "ReqNodeNotAvail": "a node that it requests is not available",
    "Reservation": "the reservation has not begun, or is full",
    "Resources": "the nodes are busy",
}


def phase_of(state: str) -> Phase:
    if state in WAITING:
        return "queued"
    if state in RUNNING:
        return "running"
    return "unknown" if state == UNKNOWN else ENDED.get(state, "unrecognized")


def with_meaning(job: SlurmJob) -> JobState:
    """``job`` with its state in terms that apply to every scheduler."""
    phase = phase_of(job.state)
    meaning = None
    if phase == "unrecognized":
        meaning = f"Slurm reports {job.state}, a state that this llmb does not know; it is asked again"
    elif phase in ("queued", "running"):
        meaning = _live_meaning(job)
    elif phase not in ("unknown", "completed"):
        meaning = _end_meaning(job)
    return job.model_copy(update={"phase": phase, "meaning": meaning})


def _live_meaning(job: SlurmJob) -> str | None:
    if job.state in HOLDS:
        return HOLDS[job.state]
    if job.state not in WAITING or job.reason in (None, "", "None"):
        return None
    name = str(job.reason).strip("()")
    known = next((text for key, text in WAITS.items() if name.partition(",")[0] == key), None)
    return f"{known} ({name})" if known else name


def _end_meaning(job: SlurmJob) -> str:
    words = ENDS.get(job.state, f"ended as {job.state}")
    if job.state == "CANCELLED" and job.cancelled_by:
        return f"{words} by user {job.cancelled_by}"
    if job.state == "FAILED":
        return _failed_meaning(job)
    if job.state in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL") and job.nodes:
        return f"{words} ({job.nodes})"
    return words


def _failed_meaning(job: SlurmJob) -> str:
    if job.reason in ("JobLaunchFailure", "LaunchFailed") or (job.exit_code == 0 and job.signal):
        how = f"signal {job.signal}" if job.signal else str(job.reason)
        return f"the batch script was killed or could not be started ({how})"
    if job.exit_code:
        return f"the batch script ended with exit code {job.exit_code}"
    return "failed" + (f" ({job.reason})" if job.reason not in (None, "", "None") else "")
