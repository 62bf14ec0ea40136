# SPDX-License-Identifier: Apache-2.0
"""The state of a job in Slurm's terms, parsed from its output. Pure."""

from llmb.catalogue.records import Record
from llmb.schedulers.port import UNKNOWN

# States in which a job waits, runs or is requeued; every other one is final.
LIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "COMPLETING",
        "CONFIGURING",
        "SUSPENDED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "REQUEUE_FED",
        "RESIZING",
        "STAGE_OUT",
        "SIGNALING",
        "STOPPED",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    }
)
# Times are asked for as seconds since 1970. What may hold the separator comes last.
TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
SACCT_FIELDS = "JobID,State,ExitCode,NodeList,Reason,Submit,Start,End,SubmitLine"
SQUEUE_FIELDS = (
    "JobArrayID:|,State:|,exit_code:|,RestartCnt:|,Reason:|,NodeList:|,SubmitTime:|,StartTime:|,EndTime:|,Command:|"
)


class SlurmJob(Record):
    """A job as Slurm reports it; exit code and signal are of the batch script, None where they are not known."""

    job_id: str
    state: str = UNKNOWN
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    nodes: str | None = None
    restarts: int = 0
    command: str | None = None
    """What was submitted; it ends with the path of the batch script, as it was given."""
    submitted_s: float | None = None
    """Seconds since 1970, as all times."""
    started_s: float | None = None
    ended_s: float | None = None
    cancelled_by: str | None = None
    """Id of the user who did that."""


def parse_accounts(text: str) -> dict[str, SlurmJob]:
    """From ``sacct -X -D -n -P`` with SACCT_FIELDS, by job id. Each start of a job has a line; the last one counts.

    After ids were reset, an earlier job with the same id has lines too, which are not starts of this one.
    """
    found: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        if line.count("|") < SACCT_FIELDS.count(","):
            continue
        job_id, state, exit_text, nodes, reason, submitted, started, ended, command = line.split("|", 8)
        name, _, who = state.partition(" by ")  # such as "CANCELLED by 1000"
        code, signal = _exit(exit_text)
        over = name not in LIVE
        before = found.get(job_id)
        found[job_id] = SlurmJob(
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
    return found


def parse_queue(text: str) -> dict[str, SlurmJob]:
    """From ``squeue -h -r -t all`` with SQUEUE_FIELDS, by job id, where a task of an array is ``<job>_<task>``."""
    found: dict[str, SlurmJob] = {}
    for line in text.splitlines():
        if line.count("|") < SQUEUE_FIELDS.count(","):
            continue
        job_id, state, status, restarts, reason, nodes, submitted, started, ended, command = line.split("|", 9)
        code, signal = _wait_status(status)
        over = state not in LIVE
        found[job_id] = SlurmJob(
            job_id=job_id,
            state=state,
            exit_code=code if over else None,
            signal=signal if over else None,
            reason=_known(reason),
            nodes=_known(nodes),
            restarts=int(restarts) if restarts.isdigit() else 0,
            command=command.removesuffix("|") or None,
            submitted_s=_seconds(submitted),
            started_s=None if state == "PENDING" else _seconds(started),  # of a job that waits, when it may start
            ended_s=_seconds(ended) if over else None,
        )
    return found


def _seconds(text: str) -> float | None:
    return float(text) if text.isdigit() else None


def _wait_status(text: str) -> tuple[int | None, int | None]:
    """Squeue gives the status of wait(2) as one number, unlike Slurm's other commands."""
    if ":" in text:
        return _exit(text)
    return (int(text) >> 8, int(text) & 0x7F) if text.isdigit() else (None, None)


def _exit(text: str) -> tuple[int | None, int | None]:
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (None, None)


def _known(text: str | None) -> str | None:
    return None if text in (None, "", "None", "(null)", "None assigned") else text
