# SPDX-License-Identifier: Apache-2.0
"""Submits jobs that are in the history before the scheduler receives them, so that a client may die at any time.

One submission at a time: the row is written, the job submitted, its id written. The program that submits (sbatch)
inherits the lock on this. So the next holder of the lock knows that no submission is in progress: each row without an
id has reached the scheduler already, or never will.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UsageError, UserInterrupt
from llmb.base.trust import STATE_FOLDER
from llmb.jobs.job import Job
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order, Prepared, prepare, removed_if_refused, send
from llmb.jobs.store import Store
from llmb.jobs.task import TaskOrder
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.experiment import stamped_folder
from llmb.runs.folder import RunFolder, link_latest, write_atomically, writing
from llmb.runs.record import SubmittedJob, now, read_job, read_record, write_record

LOOK_BACK_S = 86400.0
SETTLED_S = 5.0
"""A busy scheduler may take this long to process a submission."""
PATIENCE_S = 300.0


def new_key() -> str:
    return secrets.token_hex(8)


@contextmanager
def submission_lock(install: Path) -> Iterator[int]:
    """Hold a lock that keeps other submissions below ``install`` from being in progress."""
    with file_lock(install / STATE_FOLDER / "submit.lock", PATIENCE_S, "submitting jobs") as descriptor:
        yield descriptor


def submit_order(
    store: Store, order: Order, environ: Mapping[str, str], *, key: str, campaign: str | None = None
) -> Job:
    """Queue ``order`` under ``key``.

    Raises KeyExists if that was done before; UsageError and EnvironmentProblem if it is rejected, and then it is not in
    the history; InfrastructureError if the scheduler does not answer: the job may be queued, and the next refresh finds
    out.
    """
    with submission_lock(order.site.install) as descriptor:
        prepared = prepare(order)
        with removed_if_refused(prepared.folder, order.plan):
            queued = _add(store, prepared, new_job(prepared, key, campaign), environ, descriptor)
    link_latest(order.site.install, prepared.folder)
    return queued


def submit_task(store: Store, order: TaskOrder, environ: Mapping[str, str], folder: RunFolder | None = None) -> Job:
    """Queue a job that trains nothing, in ``folder`` or in a new one below the order's. Raises as ``submit_order``."""
    with submission_lock(order.site.install) as descriptor:
        target = folder or stamped_folder(order.parent, order.name)
        with removed_if_refused(target):
            prepared = order.write(target)
            return _add(store, prepared, new_job(prepared, new_key()), environ, descriptor)


def _add(store: Store, prepared: Prepared, job: Job, environ: Mapping[str, str], descriptor: int) -> Job:
    store.add([job])
    return hand_over(store, prepared, job, environ, descriptor)


@contextmanager
def unanswered_is_explained() -> Iterator[None]:
    """Run a submission; if the scheduler does not answer, the error warns that a rerun could queue the job twice."""
    do = "run 'llmb jobs refresh' and 'llmb jobs list' before submitting it again"
    try:
        yield
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.what}; the job may have been queued anyway", do=do) from error
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; the job may have been queued anyway", do=do) from error


def hand_over(store: Store, prepared: Prepared, job: Job, environ: Mapping[str, str], descriptor: int) -> Job:
    """Submit a job that is in the history, and write its id."""
    try:
        handle = send(prepared, environ, [descriptor])
    except (UsageError, EnvironmentProblem):
        store.withdraw([job.key])
        raise
    store.submitted({job.key: handle.job_id}, handle.cluster)
    record_handle(prepared.folder, handle, job)
    return store.by_key(job.key) or job


def record_handle(folder: RunFolder, handle: SubmittedJob, job: Job) -> None:
    """Write ``handle``, and those of the jobs that it retries: the history is rebuilt from it.

    Raises EnvironmentProblem.
    """
    before = read_job(folder)
    earlier = (*before.earlier, before.model_copy(update={"earlier": ()})) if before else ()
    fields = {"key": job.key, "campaign": job.campaign, "retries": job.retries, "retry_of": job.retry_of}
    with writing(folder.path):
        text = handle.model_copy(update={**fields, "earlier": earlier}).model_dump_json(indent=2)
        write_atomically(folder.job, text + "\n")


def new_job(prepared: Prepared, key: str, campaign: str | None = None) -> Job:
    """Return the row for a job that is about to be submitted."""
    return Job(
        **prepared.row,
        key=key,
        scheduler=prepared.spec.scheduler,
        run_dir=str(prepared.folder.path),
        experiment=prepared.folder.name,
        campaign=campaign,
        submitted_s=time.time(),
        retries=prepared.spec.retries,
    )


def resolve_submissions(store: Store, install: Path, scheduler: str, time_out_s: float) -> Iterator[str]:
    """Find the id of every submission to ``scheduler`` that has none, or record that it was not submitted.

    Yields messages for the user. Raises InfrastructureError if the scheduler does not answer.
    """
    if not _unresolved(store, scheduler):
        return
    # While the lock is held no submission is in progress: a job that is unknown now stays unknown.
    with submission_lock(install):
        unresolved = _unresolved(store, scheduler)
        claimed = store.job_ids()
        now_s = time.time()
        # The clock may have been wrong when a job was submitted.
        times = [job.submitted_s if job.submitted_s <= now_s else now_s - LOOK_BACK_S for job in unresolved]
        since_s = min(times, default=0.0)
        ids = find_scheduler(scheduler).find(unresolved, since_s, claimed, time_out_s) if unresolved else {}
        claimed |= set(ids.values())
        for job in unresolved:
            job_id = ids.get(job.key) or _begun_as(job, claimed)
            if job_id:
                claimed.add(job_id)
                store.submitted({job.key: job_id})
                _write_handle(job, job_id)
            elif abs(time.time() - job.submitted_s) > SETTLED_S:
                title = find_scheduler(scheduler).title
                store.not_submitted(job.key, f"its submission was interrupted before it reached {title}")
                _end_record(job, f"it never reached {title}")
                yield f"a submission was interrupted before it reached {title}: {job.run_dir}"


def _unresolved(store: Store, scheduler: str) -> list[Job]:
    return [job for job in store.unresolved() if job.scheduler == scheduler]


def _begun_as(job: Job, claimed: set[str]) -> str | None:
    """Return the id that the job in the folder recorded; None if it belongs to an earlier attempt."""
    try:
        begun = read_record(job.folder).job
    except (OSError, ValueError):
        return None
    return begun.job_id if begun and begun.job_id not in claimed else None


def _write_handle(job: Job, job_id: str) -> None:
    folder = job.folder
    if folder.path.is_dir():
        record_handle(folder, SubmittedJob(scheduler=job.scheduler, job_id=job_id, submitted_at=now()), job)


def _end_record(job: Job, reason: str) -> None:
    folder = job.folder
    try:
        record = read_record(folder)
        if record.status == "queued":
            end = {"status": "failed", "reason": reason, "exit_code": InfrastructureError.exit_code, "ended_at": now()}
            write_record(folder, record.model_copy(update=end))
    except (OSError, ValueError):
        return
