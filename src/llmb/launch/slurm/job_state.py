# SPDX-License-Identifier: Apache-2.0
"""Parses the states of jobs from Slurm's output, and explains them. Pure."""

from llmb.launch.scheduler_port import UNKNOWN, JobState, Phase

ENDED: dict[str, tuple[Phase, str]] = {
    "BOOT_FAIL": ("boot_fail", "a node could not be booted"),
    "CANCELLED": ("cancelled", "cancelled"),
    "COMPLETED": ("completed", "completed"),
    "DEADLINE": ("timed_out", "ended at its deadline"),
    "FAILED": ("failed", "failed"),
    "LAUNCH_FAILED": ("failed", "the batch script could not be started"),
    "NODE_FAIL": ("node_fail", "a node failed"),
    "OUT_OF_MEMORY": ("out_of_memory", "ended by the kernel: out of host memory"),
    "PREEMPTED": ("preempted", "preempted by another job"),
    "RECONFIG_FAIL": ("failed", "a node could not be reconfigured"),
    "REVOKED": ("cancelled", "revoked: another cluster runs it"),
    "TIMEOUT": ("timed_out", "ended at its time limit"),
}
"""Final states with their phases and meanings. In any other state, a job has not ended."""
# Reasons and submit lines are arbitrary text, so fields end with a character that text does not contain. The field that
# may contain a line break is last. Times are requested as seconds since 1970.
FIELD, RECORD = "\x1f", "\x1e"
TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
SACCT_FIELDS = "JobID,State,ExitCode,NodeList,Reason,Submit,Start,End,SubmitLine"
SQUEUE_FIELDS = (
    "JobArrayID:|,State:|,exit_code:|,RestartCnt:|,Reason:|,NodeList:|,SubmitTime:|,StartTime:|,EndTime:|,Command:"
).replace("|", FIELD) + RECORD


class SlurmJob(JobState):
    """A job as Slurm reports it."""

    reason: str | None = None
    command: str | None = None
    """The script of the job or the command that submitted it; for llmb's own jobs, it ends with the script's path."""
    submitted_s: float | None = None
    cancelled_by: str | None = None
    """Id of the user who cancelled the job."""


def parse_accounts(text: str) -> dict[str, SlurmJob]:
    """Parse the output of ``sacct -X -D -n -P`` with SACCT_FIELDS into jobs by id.

    Each start of a job has a line, and the last one counts. If ids were reset, lines of an earlier job with the same id
    are not counted as restarts.
    """
    jobs: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        if line.count(FIELD) < SACCT_FIELDS.count(","):
            continue  # the rest of a submit line with a line break
        job_id, state, exit_text, nodes, reason, submitted, started, ended, command = line.split(FIELD, 8)
        name, _, who = state.partition(" by ")  # such as "CANCELLED by 1000"
        code, signal = _exit(exit_text)
        over = name in ENDED
        before = jobs.get(job_id)
        jobs[job_id] = SlurmJob(
            job_id=job_id,
            state=name or UNKNOWN,
            exit_code=code if over else None,
            signal=signal if over else None,
            reason=_known(reason),
            nodes=_known(nodes),
            restarts=before.restarts + 1 if before and before.command == (command or None) else 0,
            command=command or None,
            submitted_s=_seconds(submitted),
            started_s=_seconds(started),
            ended_s=_seconds(ended) if over else None,
            cancelled_by=who or None,
        )
    return jobs


def parse_queue(text: str) -> dict[str, SlurmJob]:
    """Parse the output of ``squeue -h -r -t all`` with SQUEUE_FIELDS into jobs by id, ``<job>_<task>`` for arrays."""
    jobs: dict[str, SlurmJob] = {}
    for record in text.split(RECORD):
        if record.count(FIELD) < SQUEUE_FIELDS.count(","):
            continue
        line = record.removeprefix("\n")
        job_id, state, status, restarts, reason, nodes, submitted, started, ended, command = line.split(FIELD, 9)
        code, signal = _wait_status(status)
        over = state in ENDED
        jobs[job_id] = SlurmJob(
            job_id=job_id,
            state=state,
            exit_code=code if over else None,
            signal=signal if over else None,
            reason=_known(reason),
            nodes=_known(nodes),
            restarts=int(restarts) if restarts.isdecimal() else 0,
            command=command or None,
            submitted_s=_seconds(submitted),
            started_s=None if state == "PENDING" else _seconds(started),  # for a waiting job, an estimate
            ended_s=_seconds(ended) if over else None,
        )
    return jobs


def _seconds(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def _wait_status(text: str) -> tuple[int | None, int | None]:
    """Parse exit code and signal from a status of wait(2), which only squeue prints as a single number."""
    if ":" in text:
        return _exit(text)
    return (int(text) >> 8, int(text) & 0x7F) if text.isdecimal() else (None, None)


def _exit(text: str) -> tuple[int | None, int | None]:
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdecimal() and signal.isdecimal() else (None, None)


def _known(text: str | None) -> str | None:
    return None if text in (None, "", "None", "(null)", "None assigned") else text


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
WORDS = frozenset([*WAITING, *RUNNING, *ENDED])
"""All known states; later versions of Slurm may report others."""
HOLDS = {"SUSPENDED": "suspended by Slurm", "EXPEDITING": "ended; Slurm is checking whether to requeue it"}
WAITS = {
    "BeginTime": "may not start yet",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": "the job that it depends on did not end as required, so it will never start; cancel it",
    "BadConstraints": "no node has what it requests, so it will never start; cancel it",
    "JobHeldAdmin": "held by an administrator",
    "JobHeldUser": "held; run 'scontrol release' to release it",
    "JobHoldMaxRequeue": "held, because it was requeued too often; run 'scontrol release' to release it",
    "job_requeued_in_held_state": "requeued and held; run 'scontrol release' to release it",
    "launch_failed_requeued_held": "Slurm could not start the job on a node and holds it; check the node with 'scontrol"
    " show node' or exclude the node, then run 'scontrol release' to release the job",
    "user_env_retrieval_failed_requeued_held": "Slurm cannot read the user's environment on a node, and holds the job;"
    " run 'scontrol release' to release it",
    "PartitionDown": "the partition is down",
    "PartitionNodeLimit": "it requests more nodes than the partition allows, or nodes that are down",
    "PartitionTimeLimit": "it requests more time than the partition allows, so it will never start",
    "Priority": "jobs with higher priority are first",
    "ReqNodeNotAvail": "a node that it requests is not available",
    "Reservation": "the reservation has not begun, or is full",
    "Resources": "the nodes are busy",
}


def phase_of(state: str) -> Phase:
    if state in WAITING:
        return "queued"
    if state in RUNNING:
        return "running"
    if state == UNKNOWN:
        return "unknown"
    return ENDED[state][0] if state in ENDED else "unrecognized"


def with_meaning(job: SlurmJob) -> JobState:
    """Return ``job`` with its state in general terms: the phase, and its meaning for the user."""
    phase = phase_of(job.state)
    meaning = None
    if phase == "unrecognized":
        meaning = f"Slurm reports {job.state}, a state that this version of llmb does not know; querying again"
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
    wait = WAITS.get(name.partition(",")[0].replace(" ", "_"))  # scontrol writes some reasons as words
    return f"{wait} ({name})" if wait else name


def _end_meaning(job: SlurmJob) -> str:
    _, words = ENDED[job.state]
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
