# SPDX-License-Identifier: Apache-2.0
"""Reads jobs from the run folders, to rebuild the history."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from llmb.jobs.job import Job
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, SubmittedJob, read_job, read_record

PATTERN = "workloads/*/experiments/*/*/*/job.json"


def jobs_of_folders(install: Path) -> Iterator[Job]:
    """The jobs of every submitted run folder, in the state in which they were queued."""
    for path in sorted(install.glob(PATTERN)):
        folder = RunFolder(path.parent)
        try:
            submitted, record = read_job(folder), read_record(folder)
        except (OSError, ValueError):
            continue  # one unreadable folder must not lose the others
        for one in (*submitted.earlier, submitted) if submitted else ():
            yield _job(folder, record, one.in_folder(folder))


def _job(folder: RunFolder, record: RunRecord, submitted: SubmittedJob) -> Job:
    recipe = record.plan.recipe
    return Job(
        key=submitted.key or folder.path.parent.name,
        scheduler=submitted.scheduler,
        cluster=submitted.cluster,
        job_id=submitted.job_id,
        run_dir=str(folder.path),
        array_index=submitted.array_index,
        base_dir=submitted.base_dir,
        experiment=folder.name,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        scale=recipe.scale,
        campaign=submitted.campaign,
        submitted_s=datetime.fromisoformat(submitted.submitted_at).timestamp(),
        state="PENDING",
        reason="as of its submission: the history was rebuilt from the run folders",
        retries=submitted.retries,
        retry_of=submitted.retry_of,
        proxy=recipe.proxy_text,
    )
