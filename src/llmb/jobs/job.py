# SPDX-License-Identifier: Apache-2.0
"""One job of the history, and the terms for its states."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from llmb.runs.conditions import identity_of
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, short_id

Status = Literal["queued", "running", "success", "failed", "invalid", "cancelled"]
Kind = Literal["run", "preparation", "benchmark", "check"]
LIVE: tuple[Status, ...] = ("queued", "running")

# A scheduler's states of a job are used unchanged. These three are llmb's own:
SUBMITTING = "SUBMITTING"
"""Recorded before the job is submitted; the job may or may not have reached the scheduler."""
NOT_SUBMITTED = "NOT_SUBMITTED"
"""The scheduler never received the job."""
LOST = "LOST"
"""The scheduler no longer knows the job, which was ended from outside or did not record its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A row of the history. Times are seconds since 1970."""

    key: str
    """Assigned before the job is submitted; no key is submitted twice."""
    scheduler: str
    cluster: str | None = None
    """The cluster, if the scheduler manages several."""
    job_id: str | None = None
    run_dir: str
    experiment: str
    workload: str
    size: str
    dtype: str
    gpu_type: str
    scale: int
    campaign: str | None = None
    submitted_s: float
    state: str = SUBMITTING
    """The scheduler's state of the job, or a state of llmb's own."""
    status: Status = "queued"
    """The status of the run or task, which may be a success in a killed job, or invalid in a completed one."""
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    nodes: str | None = None
    """The scheduler's list of nodes, such as ``node[1-4]``."""
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    checked_s: float | None = None
    """The time at which the scheduler was last queried about this job."""
    retries: int = 0
    """The number of times that the job may be restarted or resubmitted after infrastructure failures."""
    retry_of: str | None = None
    """The key of the job that this job retries."""
    fault: str | None = None
    """The cause of the job's failure, if known: the name of a fault, or a phase such as ``node_fail``."""
    bad_nodes: str | None = None
    """Nodes at fault, separated by commas."""
    step_time_s: float | None = None
    """Mean step time over the window in seconds, if the run succeeded."""
    proxy: str = ""
    """The mark of a proxy, or of a rank that runs alone; empty for a full run."""
    kind: Kind = "run"
    subject: str = ""
    """The subject of the preparation or measurement, or the node that is checked; empty for a run."""
    data: str = "synthetic"
    """``synthetic``, or the name of the training data."""
    label: str | None = None
    """A label that the user chose, or that is derived from a campaign on this machine."""
    run_id: str | None = None
    """The id of the run, which its retries share; None for jobs that are not runs."""
    identity: str | None = None
    """A key that is equal for repeats; None for jobs that are not runs."""
    verdict: str | None = None
    """The verdict on the run; None if there is none."""
    origin: str | None = None
    """The source of the run's weights and data; None for jobs that are not runs."""

    @property
    def folder(self) -> RunFolder:
        return RunFolder(Path(self.run_dir))

    @property
    def live(self) -> bool:
        return self.status in LIVE

    @property
    def model_name(self) -> str:
        return " ".join(filter(None, (self.workload, self.size, self.proxy)))

    @property
    def title(self) -> str:
        """Return the model, or else the kind of job, followed by a run's dtype or another job's subject."""
        does = self.dtype if self.kind == "run" else self.subject
        return f"{self.model_name or self.kind} {does}"

    @property
    def id(self) -> str:
        """Return the short id that commands print and, for runs, accept."""
        return short_id(self.run_id or self.name)

    @property
    def name(self) -> str:
        """Return the name of the run folder's parent, ``<experiment>_<seconds>``."""
        return Path(self.run_dir).parent.name

    def document(self) -> dict[str, Any]:
        """Return the job as a dictionary for JSON; its keys are part of the public interface."""
        first = {"id": self.id, "job_id": self.job_id, "name": self.name}
        return first | {field.name: getattr(self, field.name) for field in fields(self) if field.name != "job_id"}


def row_of_record(record: RunRecord) -> dict[str, Any]:
    """Return the fields of ``Job`` that describe the run, from its record."""
    plan, recipe = record.plan, record.plan.recipe
    return {
        "label": record.label,
        "run_id": record.run_id,
        "identity": identity_of(record).key,
        "workload": recipe.workload,
        "size": recipe.size,
        "dtype": recipe.dtype,
        "gpu_type": recipe.gpu_type,
        "scale": recipe.scale,
        "proxy": recipe.stand_in,
        "data": plan.origin.data.short,
        "origin": plan.origin.text,
    }


COLUMNS: tuple[str, ...] = tuple(item.name for item in fields(Job))


ANSWERED = ("state", "exit_code", "signal", "nodes", "restarts", "started_s", "ended_s")
"""Columns with values that the scheduler reports."""
CHANGING = (*ANSWERED, "status", "reason", "checked_s", "fault", "bad_nodes", "step_time_s", "verdict")
"""Columns that a query of the scheduler may change."""


def stale(jobs: Iterable[Job], now_s: float, older_than_s: float) -> bool:
    """Return True if a submitted live job in ``jobs`` was last queried more than ``older_than_s`` seconds ago."""
    submitted = [job for job in jobs if job.live and job.state != SUBMITTING]
    # A query time in the future comes from a wrong clock, so that it counts as old.
    return any(abs(now_s - (job.checked_s or 0)) > older_than_s for job in submitted)
