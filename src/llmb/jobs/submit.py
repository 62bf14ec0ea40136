# SPDX-License-Identifier: Apache-2.0
"""Submits jobs, recording each in the history before the scheduler receives it, so that a client may die at any time.

Under a lock, the row is written, the job is submitted, and its id is written. The submitting program (sbatch) inherits
the lock. The next holder of the lock can therefore rely on no submission being in progress: a job without an id either
has reached the scheduler or never will.
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
"""Seconds that a busy scheduler may take to process a submission."""
PATIENCE_S = 300.0


def new_key() -> str:
    return secrets.token_hex(8)


@contextmanager
def submission_lock(install: Path) -> Iterator[int]:
    """Hold the lock that serializes submissions below ``install``; yield its file descriptor."""
    with file_lock(install / STATE_FOLDER / "submit.lock", PATIENCE_S, "submitting jobs") as descriptor:
        yield descriptor


def submit_order(
    store: Store, order: Order, environ: Mapping[str, str], *, key: str, campaign: str | None = None
) -> Job:
    """Queue ``order`` under ``key``.

    Raise KeyExists if the key was used before, UsageError or EnvironmentProblem if the job is rejected, which removes
    it from the history, and InfrastructureError if the scheduler does not answer. In this case, the job may be queued;
    the next refresh resolves that.
    """
    with submission_lock(order.site.install) as descriptor:
        prepared = prepare(order)
        with removed_if_refused(prepared.folder, order.plan):
            queued = _add(store, prepared, new_job(prepared, key, campaign), environ, descriptor)
    link_latest(order.site.install, prepared.folder)
    return queued


def submit_task(store: Store, order: TaskOrder, environ: Mapping[str, str], folder: RunFolder | None = None) -> Job:
    """Queue a job that trains nothing, in ``folder`` or a new folder; raises the same errors as ``submit_order``."""
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
    """Turn Ctrl-C into UserInterrupt, and warn in it and in InfrastructureError that the job may have been queued."""
    do = "run 'llmb jobs refresh', then check 'llmb jobs list' before submitting it again"
    try:
        yield
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.what}; the job may have been queued anyway", do=do) from error
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; the job may have been queued anyway", do=do) from error


def hand_over(store: Store, prepared: Prepared, job: Job, environ: Mapping[str, str], descriptor: int) -> Job:
    """Submit a job that is in the history, and return it with its id; remove a rejected job from the history."""
    try:
        handle = send(prepared, environ, [descriptor])
    except (UsageError, EnvironmentProblem):
        store.withdraw([job.key])
        raise
    store.submitted({job.key: handle.job_id}, handle.cluster)
    record_handle(prepared.folder, handle, job)
    return store.by_key(job.key) or job


def record_handle(folder: RunFolder, handle: SubmittedJob, job: Job) -> None:
    """Write ``handle``, with the handles of the run's earlier jobs, from which the history can be rebuilt.

    Raise EnvironmentProblem if the file cannot be written, and the errors of ``read_job``.
    """
    before = read_job(folder)
    earlier = (*before.earlier, before.model_copy(update={"earlier": ()})) if before else ()
    fields = {"key": job.key, "campaign": job.campaign, "retries": job.retries, "retry_of": job.retry_of}
    with writing(folder.path):
        text = handle.model_copy(update={**fields, "earlier": earlier}).model_dump_json(indent=2)
        write_atomically(folder.job, text + "\n")


def new_job(prepared: Prepared, key: str, campaign: str | None = None) -> Job:
    """Return the history's row for a job that is about to be submitted."""
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
    """Find the ids of jobs whose submission to ``scheduler`` was interrupted, or record that they were not submitted.

    Yield messages for the user. Raise InfrastructureError or EnvironmentProblem if the scheduler cannot be queried.
    """
    if not _unresolved(store, scheduler):
        return
    # While the lock is held, no submission is in progress, so a job that the scheduler does not know never reached it.
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
