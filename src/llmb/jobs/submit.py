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

from llmb.errors import EnvironmentProblem, UsageError
from llmb.jobs.job import Job
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order, Prepared, Queued, prepare, removed_if_refused, send, write_job
from llmb.jobs.store import Store
from llmb.runs.folder import RunFolder
from llmb.runs.identity import identity_of_plan
from llmb.runs.latest_link import link_latest
from llmb.runs.plan import Plan
from llmb.runs.record import read_job
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
) -> list[Queued]:
    """Queues ``order`` under ``key``: one job, or those of an array, whose keys have the index behind.

    Raises KeyTaken if that was done before; UsageError and EnvironmentProblem if it is rejected, and then it is not in
    the history; InfrastructureError if the scheduler does not answer: the job may be queued, and the next refresh finds
    out.
    """
    with submission_lock(order.site.install) as descriptor:
        prepared = prepare(order)
        jobs = {
            folder: new_job(
                prepared,
                index,
                order.plan,
                key if index is None else f"{key}.{index}",
                campaign,
                order.choices.label,
                order.framework.arguments,
            )
            for index, folder in prepared.folders.items()
        }
        with removed_if_refused(prepared, order.plan):
            store.add(jobs.values())
            queued = hand_over(store, prepared, jobs, environ, descriptor)
    link_latest(order.site.install, queued[-1].folder)
    return queued


def hand_over(
    store: Store,
    prepared: Prepared,
    jobs: Mapping[RunFolder, Job],
    environ: Mapping[str, str],
    descriptor: int,
) -> list[Queued]:
    """Submits jobs that are in the history, and writes their ids."""
    try:
        queued = send(prepared, environ, [descriptor])
    except (UsageError, EnvironmentProblem):
        store.withdraw(job.key for job in jobs.values())
        raise
    known = [with_handle(run, jobs[run.folder]) for run in queued]
    store.submitted({jobs[run.folder].key: run.job.job_id for run in known})
    for run in known:
        write_job(run)
    return known


def with_handle(run: Queued, job: Job) -> Queued:
    """The record of a job, and of those that it retries, in the run folder, to rebuild the history from."""
    before = read_job(run.folder)
    earlier = (*before.earlier, before.model_copy(update={"earlier": ()})) if before else ()
    own = {"key": job.key, "campaign": job.campaign, "retries": job.retries, "retry_of": job.retry_of}
    handle = {**own, "earlier": earlier}
    return Queued(run.folder, run.job.model_copy(update=handle))


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
    recipe, folder, spec = plan.recipe, prepared.folders[index], prepared.spec
    return Job(
        key=key,
        scheduler=spec.scheduler,
        run_dir=str(folder.path),
        array_index=index,
        base_dir=None if folder == prepared.base else str(prepared.base.path),
        experiment=folder.name,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        scale=recipe.scale,
        campaign=campaign,
        label=label,
        identity=identity_of_plan(plan, spec.program, arguments or {}).key,
        submitted_s=time.time(),
        retries=spec.retries,
        proxy=recipe.proxy_text,
        data=plan.origin.data.short,
        origin=plan.origin.text,
    )
