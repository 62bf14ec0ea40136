# SPDX-License-Identifier: Apache-2.0
"""The state of a job in Slurm's words, out of Slurm's texts. Pure."""

import re

from llmb.catalogue.records import Record

UNKNOWN = "UNKNOWN"
# States in which a job waits, runs, or is put back; every other one is an end.
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
_FIELD = re.compile(r"(?:^|\s)([A-Za-z:/]+)=(\S*)")


class JobState(Record):
    """Exit code and signal are of the batch script; null where they are not known."""

    job_id: str
    state: str = UNKNOWN
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    nodes: str | None = None
    restarts: int = 0

    @property
    def ended(self) -> bool:
        return self.state not in LIVE and self.state != UNKNOWN


def parse_scontrol(text: str, job_id: str) -> JobState:
    """From ``scontrol -o show job``; of an array the line of the very task, else the first."""
    lines = [dict(_FIELD.findall(line)) for line in text.splitlines() if "JobId=" in line]
    fields = next((line for line in lines if job_id in _names(line)), lines[0] if lines else {})
    code, signal = _exit(fields.get("ExitCode", ""))
    state = fields.get("JobState", UNKNOWN)
    ended = state not in LIVE
    return JobState(
        job_id=job_id,
        state=state,
        exit_code=code if ended else None,
        signal=signal if ended else None,
        reason=_known(fields.get("Reason")),
        nodes=_known(fields.get("NodeList")),
        restarts=int(fields.get("Restarts") or 0),
    )


def parse_sacct(text: str, job_id: str) -> JobState:
    """From ``sacct -X -n -P``, the last line that is there; unknown where there is none."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 4]
    if not rows:
        return JobState(job_id=job_id)
    _, state, exit_text, nodes, restarts = rows[-1][:5]
    code, signal = _exit(exit_text)
    # Such as "CANCELLED by 1000".
    name = state.split()[0] if state.split() else UNKNOWN
    ended = name not in LIVE
    return JobState(
        job_id=job_id,
        state=name,
        exit_code=code if ended else None,
        signal=signal if ended else None,
        nodes=_known(nodes),
        restarts=int(restarts) if restarts.isdigit() else 0,
    )


def _names(fields: dict[str, str]) -> set[str]:
    own = {fields.get("JobId", "")}
    if "ArrayJobId" in fields:
        own.add(f"{fields['ArrayJobId']}_{fields.get('ArrayTaskId', '')}")
    return own


def _exit(text: str) -> tuple[int | None, int | None]:
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (None, None)


def _known(text: str | None) -> str | None:
    return None if text in (None, "", "None", "(null)", "None assigned") else text
