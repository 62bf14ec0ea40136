# SPDX-License-Identifier: Apache-2.0
"""Jobs that prepare a dataset or a checkpoint. They have no plan, no steps and no result: their record is this one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.catalogue.records import Record
from llmb.prepared.folders import WORKLOADS
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.log_tail import tail
from llmb.runs.record import JobEnd
from llmb.runs.record_file import read_record_file

PROGRAM = "prepare"
"""In the specification of such a job."""
FOLDER = "preparations"
ERROR = "llmb: error: "
"""What the message of a command that fails begins with."""
STARTER = "srun: "
"""What follows the message, of the program that started the command."""
Part = Literal["dataset", "checkpoint"]


class Preparation(Record):
    """The content of ``preparation.json``."""

    schema_version: Literal[1] = 1
    workload: str
    size: str
    part: Part
    gpu_type: str
    """``cpu`` for a job without GPUs."""
    gpus: int

    @property
    def name(self) -> str:
        return f"prepare_{self.part}_{self.size}"


def preparations(install: Path, workload: str) -> Path:
    """The folder of all jobs that prepare something for ``workload``."""
    return install / WORKLOADS / workload / FOLDER


def write_preparation(folder: RunFolder, preparation: Preparation) -> None:
    write_atomically(folder.preparation, preparation.model_dump_json(indent=2) + "\n")


def read_preparation(folder: RunFolder) -> Preparation:
    """Raises OSError, and ValueError for a file that is no record."""
    return read_record_file(folder.preparation, Preparation)


@dataclass(frozen=True, slots=True)
class PreparationOutcome:
    """How a preparation ended by itself."""

    status: Literal["success", "failed"]
    reason: str | None = None
    """The last line of its log."""


def outcome(folder: RunFolder, end: JobEnd | None) -> PreparationOutcome | None:
    """None for the folder of a run, and for a preparation that lasts or was ended from outside. Raises OSError."""
    if end is None or end.signal or not folder.preparation.exists():
        return None
    if end.exit_code == 0:
        return PreparationOutcome("success")
    text = tail(folder.log) or tail(folder.batch_output)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(STARTER)]
    errors = [line for line in lines if line.startswith(ERROR)]
    reason = (errors or lines)[-1:]
    return PreparationOutcome("failed", reason[0].removeprefix(ERROR) if reason else None)
