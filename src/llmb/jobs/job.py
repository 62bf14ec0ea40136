# SPDX-License-Identifier: Apache-2.0
"""One job of the history, and the words for what becomes of it."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from llmb.runs.folder import RunFolder

if TYPE_CHECKING:
    from llmb.schedulers.port import AskedJob

Status = Literal["queued", "running", "success", "failed", "invalid", "cancelled"]
LIVE: tuple[Status, ...] = ("queued", "running")

# A scheduler's words for the states of a job are taken as they are. These three are of llmb:
SUBMITTING = "SUBMITTING"
"""Written before the scheduler is asked: the job may have reached it or not."""
NOT_SUBMITTED = "NOT_SUBMITTED"
"""The scheduler does not know it and never did."""
LOST = "LOST"
"""It was submitted, and nobody knows any more how it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A row of the history. Times are seconds since 1970."""

    key: str
    """Given before the job is submitted: the same is never submitted twice."""
    scheduler: str = "slurm"
    cluster: str | None = None
    """Where the scheduler serves several."""
    job_id: str | None = None
    run_dir: str
    array_index: int | None = None
    """Of a run of an array."""
    base_dir: str | None = None
    """The folder whose script runs; None for the run's own."""
    experiment: str
    workload: str
    size: str
    dtype: str
    gpu_type: str
    scale: int
    campaign: str | None = None
    submitted_s: float
    state: str = SUBMITTING
    """The scheduler's word for the job."""
    status: Status = "queued"
    """What became of the run: one whose every step is done may be ended, and a job that is called done may be bad."""
    reason: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    nodes: str | None = None
    """The scheduler's list of nodes, such as ``node[1-4]``."""
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    checked_s: float | None = None
    """When the scheduler was last asked; what stands here was true then."""
    retries: int = 0
    """How often it may be submitted again after failures that are not its own."""
    retry_of: str | None = None
    """The key of the job that this one repeats."""
    fault: str | None = None
    """What it failed by, as far as that is known: a name of faults.yaml, or how the job ended."""
    bad_nodes: str | None = None
    """Nodes at fault, with commas between them."""
    step_time_s: float | None = None
    """Mean over the window, of a success."""

    @property
    def asked(self) -> "AskedJob":
        """As its scheduler is asked for it."""
        from llmb.schedulers.port import AskedJob  # not needed to list jobs

        base = RunFolder(Path(self.base_dir or self.run_dir))
        return AskedJob(key=self.key, job_id=self.job_id, base=base, array_index=self.array_index, live=self.live)

    @property
    def live(self) -> bool:
        return self.status in LIVE

    @property
    def name(self) -> str:
        """The name of the run's own folder, ``<experiment>_<seconds>``."""
        return Path(self.run_dir).parent.name

    def document(self) -> dict[str, Any]:
        """Plain values for JSON; the keys are a contract."""
        return {"job_id": self.job_id, "name": self.name, **{k: v for k, v in asdict(self).items() if k != "job_id"}}


COLUMNS = tuple(item.name for item in fields(Job))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a look at a job found, as of ``checked_s``."""

    key: str
    state: str
    status: Status
    reason: str | None
    checked_s: float
    exit_code: int | None = None
    signal: int | None = None
    nodes: str | None = None
    restarts: int = 0
    started_s: float | None = None
    ended_s: float | None = None
    fault: str | None = None
    bad_nodes: str | None = None
    step_time_s: float | None = None


def stale(jobs: Iterable[Job], now_s: float, older_than_s: float) -> bool:
    """Whether one of ``jobs`` may have changed since Slurm was asked for it."""
    return any(job.live and now_s - (job.checked_s or 0) > older_than_s for job in jobs if job.state != SUBMITTING)
