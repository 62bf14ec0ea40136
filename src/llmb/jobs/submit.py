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
from dataclasses import replace
from pathlib import Path

from llmb.errors import EnvironmentProblem, InfrastructureError, UsageError, UserInterrupt
from llmb.jobs.job import Job
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order, Prepared, prepare, removed_if_refused, send, write_job
from llmb.jobs.rebuild import row_of_plan
from llmb.jobs.store import Store
from llmb.jobs.task import TaskOrder
from llmb.runs.claim import stamped_folder
from llmb.runs.folder import RunFolder
from llmb.runs.identity import identity_of_plan
from llmb.runs.latest_link import link_latest
from llmb.runs.plan import Plan
from llmb.runs.record import SubmittedJob, read_job
from llmb.trust import STATE_FOLDER

PATIENCE_S = 300.0


def new_key() -> str:
    return secrets.token_hex(8)


@contextmanager
def submission_lock(install: Path) -> Iterator[int]:
    """While it is held, no other submission below ``install`` is in progress."""
    with file_lock(install / STATE_FOLDER / "submit.lock", PATIENCE_S, "submitting jobs") as descriptor:
        yield descriptor


def submit_order(
    store: Store, order: Order, environ: Mapping[str, str], *, key: str, campaign: str | None = None
) -> list[Job]:
    """Queues ``order`` under ``key``: one job, or those of an array, whose keys have the index behind.

    Raises KeyTaken if that was done before; UsageError and EnvironmentProblem if it is rejected, and then it is not in
    the history; InfrastructureError if the scheduler does not answer: the job may be queued, and the next refresh finds
    out.
    """
    with submission_lock(order.site.install) as descriptor:
        prepared = prepare(order)
        jobs = {
            index: new_job(
                prepared,
                index,
                order.plan,
                key if index is None else f"{key}.{index}",
                campaign,
                order.choices.label,
                order.framework.arguments,
            )
            for index in prepared.folders
        }
        with removed_if_refused(prepared.all_folders, order.plan):
            store.add(jobs.values())
            queued = hand_over(store, prepared, jobs, environ, descriptor)
    link_latest(order.site.install, RunFolder(Path(queued[-1].run_dir)))
    return queued


def submit_task(store: Store, order: TaskOrder, environ: Mapping[str, str], folder: RunFolder | None = None) -> Job:
    """Queues a job that trains nothing, in ``folder`` or in a new one below the order's. Raises as ``submit_order``."""
    with submission_lock(order.site.install) as descriptor:
        own = folder or stamped_folder(order.parent, order.name)
        with removed_if_refused([own]):
            prepared = Prepared(order.write(own), own, {None: own})
            job = replace(_row(prepared, None, new_key()), **order.task.row())
            store.add([job])
            (queued,) = hand_over(store, prepared, {None: job}, environ, descriptor)
    return queued


@contextmanager
def unanswered_is_explained() -> Iterator[None]:
    """Without an answer, rerunning a command that submits could queue a job twice: its error says so."""
    do = "'llmb jobs refresh' finds out, and 'llmb jobs list' then shows it; do not resubmit it before"
    try:
        yield
    except InfrastructureError as error:
        raise InfrastructureError(f"{error.what}; the job may be queued all the same", do=do) from error
    except KeyboardInterrupt as error:
        raise UserInterrupt("interrupted; the job may be queued all the same", do=do) from error


def hand_over(
    store: Store,
    prepared: Prepared,
    jobs: Mapping[int | None, Job],
    environ: Mapping[str, str],
    descriptor: int,
) -> list[Job]:
    """Submits jobs that are in the history, and writes their ids."""
    try:
        handles = send(prepared, environ, [descriptor])
    except (UsageError, EnvironmentProblem):
        store.withdraw(job.key for job in jobs.values())
        raise
    cluster = next(iter(handles.values())).cluster
    store.submitted({jobs[index].key: handle.job_id for index, handle in handles.items()}, cluster)
    for index, handle in handles.items():
        record_handle(prepared.folders[index], handle, jobs[index])
    return [job for one in jobs.values() if (job := store.by_key(one.key))]


def record_handle(folder: RunFolder, handle: SubmittedJob, job: Job) -> None:
    """Writes ``handle``, and those of the jobs that it retries: the history is rebuilt from it.

    Raises EnvironmentProblem.
    """
    before = read_job(folder)
    earlier = (*before.earlier, before.model_copy(update={"earlier": ()})) if before else ()
    own = {"key": job.key, "campaign": job.campaign, "retries": job.retries, "retry_of": job.retry_of}
    write_job(folder, handle.model_copy(update={**own, "earlier": earlier}))


def new_job(
    prepared: Prepared,
    index: int | None,
    plan: Plan,
    key: str,
    campaign: str | None,
    label: str | None = None,
    arguments: Mapping[str, str] | None = None,
) -> Job:
    """The row of one run of a job that is about to be submitted."""
    identity = identity_of_plan(plan, prepared.spec.program, arguments or {}).key
    job = replace(_row(prepared, index, key), **row_of_plan(plan))
    return replace(job, campaign=campaign, label=label, identity=identity)


def _row(prepared: Prepared, index: int | None, key: str) -> Job:
    """The fields that every job has; what it does is missing."""
    folder, spec = prepared.folders[index], prepared.spec
    return Job(
        key=key,
        scheduler=spec.scheduler,
        run_dir=str(folder.path),
        array_index=index,
        base_dir=None if folder == prepared.base else str(prepared.base.path),
        experiment=folder.name,
        workload="",
        size="",
        dtype="",
        gpu_type="",
        scale=spec.placement.processes,
        submitted_s=time.time(),
        retries=spec.retries,
    )
