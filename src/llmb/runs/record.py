# SPDX-License-Identifier: Apache-2.0
"""``run.json``: everything that decided a run, and what came of it."""

from datetime import UTC, datetime
from typing import Any, Literal

from llmb import __version__
from llmb.catalogue.records import Record
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import Plan

SCHEMA_VERSION = 1
Status = Literal["running", "success", "failed", "invalid"]


class RunRecord(Record):
    """The content of ``run.json``. ``environment`` is what the workers saw; null until they wrote it."""

    schema_version: int = SCHEMA_VERSION
    status: Status
    reason: str | None = None
    exit_code: int | None = None
    llmb_version: str = __version__
    started_at: str
    ended_at: str | None = None
    command: tuple[str, ...]
    plan: Plan
    conventions: dict[str, str]
    environment: dict[str, Any] | None = None
    result: dict[str, Any] | None = None


CONVENTIONS = {
    "steps": "numbered from 0",
    "std": "sample standard deviation (n - 1)",
    "ci95": "95 % confidence interval of the mean, Student's t",
    "TFLOPS_per_GPU in the log": "full",
    "peak_memory on a CPU": "largest resident set of the process",
}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_record(plan: Plan, command: tuple[str, ...]) -> RunRecord:
    return RunRecord(status="running", started_at=now(), command=command, plan=plan, conventions=CONVENTIONS)


def write_record(folder: RunFolder, record: RunRecord) -> None:
    write_atomically(folder.record, record.model_dump_json(indent=2) + "\n")


def read_record(folder: RunFolder) -> RunRecord:
    return RunRecord.model_validate_json(folder.record.read_text())
