# SPDX-License-Identifier: Apache-2.0
"""Jobs that train nothing: they prepare a dataset or a checkpoint, measure nodes, or check a node.

They have no plan, steps or result; their outcome is their exit code and the files that they write.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmb.base.record import Record
from llmb.base.trust import STATE_FOLDER, WORKLOADS
from llmb.jobs.order import JobOrder, mounted_folders, on_site
from llmb.launch.jobspec.job_options import ContainerSettings, StartMode
from llmb.launch.jobspec.spec import JobSpec, Placement, Word
from llmb.runs.folder import RunFolder, read_stored, tail, write_atomically
from llmb.runs.record import JobEnd

PREPARATIONS = "preparations"
"""Name of the folder of preparations below a workload's folder."""
BENCHMARKS = Path(STATE_FOLDER) / "bench_jobs"
CHECKS = Path(STATE_FOLDER) / "health"
FOLDERS = (f"{WORKLOADS}/*/{PREPARATIONS}/*/*", f"{BENCHMARKS}/*/*", f"{CHECKS}/*/.jobs/*/*")
"""Patterns of the folders of jobs that train nothing, relative to the install root."""
ERROR = "llmb: error: "
"""The beginning of a failed command's error message."""
STARTER = "srun: "
"""The prefix of lines from srun, which follow the command's own message."""
TaskKind = Literal["preparation", "benchmark", "check"]


class TaskRecord(Record):
    """The content of ``task.json``."""

    schema_version: Literal[1] = 1
    kind: TaskKind
    subject: str
    """``dataset`` or ``checkpoint``, ``collectives``, ``pairwise`` or ``gpus``, or the node that is checked."""
    workload: str = ""
    """The workload of a preparation, with the model's size in ``size``; both are empty for other tasks."""
    size: str = ""
    gpus: bool
    gpu_type: str | None
    """``cpu`` for a job without GPUs; None for GPUs of an unknown type."""
    scale: int
    """The number of GPUs, or of processes in a job without GPUs."""

    def row(self) -> dict[str, Any]:
        """Return the fields of the history's row that describe the job."""
        fields = self.model_dump(exclude={"schema_version", "gpus"})
        return {**fields, "gpu_type": self.gpu_type or "GPU", "dtype": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrder(JobOrder):
    """A job that trains nothing and can be queued."""

    task: TaskRecord
    name: str
    parent: Path
    """The folder below which the job's folder is created."""
    title: str
    placement: Placement
    time_limit_min: int
    work: tuple[Word, ...]
    finish: tuple[Word, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    """The contents of files that the job's program reads, by file name."""
    start: StartMode | Literal["once", "rounds"] = "once"
    node: str | None = None
    """The node on which the job has to run; None for any node."""
    cpus: int | None = None
    secrets: tuple[str, ...] = ()
    """Names of environment variables with secrets that the job needs."""
    sources: tuple[str, ...] = ()
    """Files and folders that the job reads."""
    in_container: bool = True
    measured: bool = False
    """True if the job uses the settings that affect a run's speed: network, boost, bindings."""

    def place(self) -> tuple[Path, str]:
        return self.parent, self.name

    def spec(self, folder: RunFolder) -> JobSpec:
        task, site, options = self.task, self.site, self.options
        variables = {"LLMB_INSTALL": str(site.install), "PYTHONUNBUFFERED": "1"}
        mounts = [str(site.install), *self.sources]
        spec = JobSpec(
            scheduler=self.scheduler.name,
            program=task.kind,
            title=self.title,
            name=folder.name,
            placement=self.placement,
            gpus=task.gpus,
            node=self.node,
            time_limit_min=self.time_limit_min,
            start=self.start,
            cpus=self.cpus,
            secrets=self.secrets,
            gpu_type=task.gpu_type,
            python=options.python,
            container=mounted_folders(site.config.container, mounts) if self.in_container else ContainerSettings(),
            work=self.work,
            finish=self.finish,
            log=folder.log.name,
        )
        return on_site(spec, site, options, workload=task.workload, own=variables, measured=self.measured)

    def record(self, folder: RunFolder, spec: JobSpec) -> dict[str, Any]:  # noqa: ARG002 (as of all jobs)
        for name, text in self.files.items():
            write_atomically(folder.path / name, text)
        write_atomically(folder.task, self.task.model_dump_json(indent=2) + "\n")
        return self.task.row()


def read_task(folder: RunFolder) -> TaskRecord:
    """Read the record of a task; raise OSError if it cannot be read, ValueError if it is not a valid record."""
    return read_stored(folder.task, TaskRecord)


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """The outcome of a task that ended on its own."""

    status: Literal["success", "failed"]
    reason: str | None = None
    """The last error message in the log of a failed task, or else the last line that is not srun's."""


def task_outcome(folder: RunFolder, end: JobEnd | None) -> TaskOutcome | None:
    """Return a task's outcome; None for a run, or for a task that is running or was killed by a signal."""
    if end is None or end.signal or not folder.task.exists():
        return None
    if end.exit_code == 0:
        return TaskOutcome("success")
    text = tail(folder.log) or tail(folder.batch_output)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(STARTER)]
    errors = [line for line in lines if line.startswith(ERROR)]
    reason = (errors or lines)[-1:]
    return TaskOutcome("failed", reason[0].removeprefix(ERROR) if reason else None)
