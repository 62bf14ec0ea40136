# SPDX-License-Identifier: Apache-2.0
"""Resolves submissions whose client died or got no answer: whether they reached their scheduler."""

import time
from collections.abc import Iterator
from pathlib import Path

from llmb.errors import InfrastructureError
from llmb.jobs.job import Job
from llmb.jobs.store import Store
from llmb.jobs.submit import record_handle, submission_lock
from llmb.runs.folder import RunFolder
from llmb.runs.record import SubmittedJob, now, read_record, write_record
from llmb.schedulers.lookup import find_scheduler

LOOK_BACK_S = 86400.0
SETTLED_S = 5.0
"""A busy scheduler may take this long to process a submission."""


def resolve_submissions(store: Store, install: Path, scheduler: str, time_out_s: float) -> Iterator[str]:
    """Finds the id of every submission to ``scheduler`` that has none, or records that it was not submitted.

    Yields messages for the user. Raises InfrastructureError if the scheduler does not answer.
    """
    if not _unresolved(store, scheduler):
        return
    # While the lock is held no submission is in progress: a job that is unknown now stays unknown.
    with submission_lock(install):
        unresolved = _unresolved(store, scheduler)
        claimed = store.job_ids()
        now_s = time.time()
        since_s = min((_submitted_s(job, now_s) for job in unresolved), default=0.0)
        found = find_scheduler(scheduler).find(unresolved, since_s, claimed, time_out_s) if unresolved else {}
        claimed |= set(found.values())
        for job in unresolved:
            job_id = found.get(job.key) or _begun_as(job, claimed)
            if job_id:
                claimed.add(job_id)
                store.submitted({job.key: job_id})
                _write_handle(job, job_id)
            elif abs(time.time() - job.submitted_s) > SETTLED_S:
                title = find_scheduler(scheduler).title
                store.not_submitted(job.key, f"its submission was interrupted before it reached {title}")
                _end_record(job, f"it never reached {title}")
                yield f"a submission was interrupted before it reached {title}: {job.run_dir}"


def _submitted_s(job: Job, now_s: float) -> float:
    """When ``job`` was submitted at the earliest: the clock may have been wrong then."""
    return job.submitted_s if job.submitted_s <= now_s else now_s - LOOK_BACK_S


def _unresolved(store: Store, scheduler: str) -> list[Job]:
    return [job for job in store.unresolved() if job.scheduler == scheduler]


def _begun_as(job: Job, claimed: set[str]) -> str | None:
    """The id that the job in the folder recorded; None if it is that of an earlier attempt."""
    try:
        begun = read_record(RunFolder(Path(job.run_dir))).job
    except (OSError, ValueError):
        return None
    return begun.job_id if begun and begun.job_id not in claimed else None


def _write_handle(job: Job, job_id: str) -> None:
    folder = RunFolder(Path(job.run_dir))
    if folder.path.is_dir():
        handle = SubmittedJob(
            scheduler=job.scheduler,
            job_id=job_id,
            submitted_at=now(),
            array_index=job.array_index,
            base_dir=job.base_dir,
        )
        record_handle(folder, handle, job)


def _end_record(job: Job, reason: str) -> None:
    folder = RunFolder(Path(job.run_dir))
    try:
        record = read_record(folder)
        if record.status == "queued":
            end = {"status": "failed", "reason": reason, "exit_code": InfrastructureError.exit_code, "ended_at": now()}
            write_record(folder, record.model_copy(update=end))
    except (OSError, ValueError):
        return
