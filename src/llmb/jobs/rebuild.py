# SPDX-License-Identifier: Apache-2.0
"""Reads jobs from the run folders, to rebuild the history."""

from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from llmb.jobs.job import COLUMNS, Job
from llmb.jobs.task import FOLDERS as TASKS
from llmb.jobs.task import read_task
from llmb.prepared.folders import WORKLOADS
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, SubmittedJob, read_job, read_record
from llmb.runs.recorded_identity import identity_of

RUNS = f"{WORKLOADS}/*/experiments/*/*/*"


def jobs_of_folders(install: Path) -> Iterator[Job]:
    """All jobs that were submitted, in the state in which they were queued."""
    yield from _jobs(install, RUNS, lambda folder: row_of_record(read_record(folder)))
    for pattern in TASKS:
        yield from _jobs(install, pattern, lambda folder: read_task(folder).row())


def row_of_record(record: RunRecord) -> dict[str, Any]:
    """The fields of a job that say what it runs."""
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


def _jobs(install: Path, pattern: str, read: Callable[[RunFolder], dict[str, Any]]) -> Iterator[Job]:
    for path in sorted(install.glob(f"{pattern}/job.json")):
        folder = RunFolder(path.parent)
        try:
            submitted, row = read_job(folder), read(folder)
        except (OSError, ValueError):
            continue  # one unreadable folder must not lose the others
        for one in (*submitted.earlier, submitted) if submitted else ():
            yield _job(folder, row, one)


def _job(folder: RunFolder, row: Mapping[str, Any], submitted: SubmittedJob) -> Job:
    return Job(
        **row,
        **{name: getattr(submitted, name) for name in SubmittedJob.model_fields if name in COLUMNS},
        run_dir=str(folder.path),
        experiment=folder.name,
        submitted_s=datetime.fromisoformat(submitted.submitted_at).timestamp(),
        state="PENDING",
        reason="as of its submission: the history was rebuilt from the run folders",
    )
