# SPDX-License-Identifier: Apache-2.0
"""Submits jobs that the history knows of before the scheduler does, so that a client may die at any moment.

One submission at a time: the row is written, the job handed over, its id written down. The lock that this happens under
is held by the program that submits, too. Whoever gets it next knows that of every row without an id the scheduler has
been told, or will never be.
"""

import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from llmb.errors import EnvironmentProblem, UsageError
from llmb.jobs.history import FOLDER
from llmb.jobs.job import Job
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order, Prepared, Queued, prepare, removed_if_refused, send, write_job
from llmb.jobs.store import Store
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_job

PATIENCE_S = 300.0


def new_key() -> str:
    return secrets.token_hex(8)


@contextmanager
def submission_lock(install: Path) -> Iterator[int]:
    """Nobody else submits below ``install`` meanwhile, and nobody's submission is under way."""
    with file_lock(install / FOLDER / "submit.lock", PATIENCE_S, "submitting jobs") as descriptor:
        yield descriptor


def submit_order(
    store: Store, order: Order, environ: Mapping[str, str], *, key: str, campaign: str | None = None
) -> list[Queued]:
    """Queues ``order`` under ``key``: one job, or those of an array, whose keys have the index behind.

    Raises KeyTaken where that was done before; UsageError and EnvironmentProblem where it is refused, and the history
    then knows nothing of it; InfrastructureError where nobody answers: the job may be queued, and the next
    refresh finds out.
    """
    with submission_lock(order.site.install) as descriptor:
        prepared = prepare(order)
        jobs = {
            folder: new_job(prepared, index, order.plan, key if index is None else f"{key}.{index}", campaign)
            for index, folder in prepared.folders.items()
        }
        with removed_if_refused(prepared):
            store.add(jobs.values())
            return hand_over(store, prepared, jobs, environ, descriptor)


def hand_over(
    store: Store,
    prepared: Prepared,
    jobs: Mapping[RunFolder, Job],
    environ: Mapping[str, str],
    descriptor: int,
) -> list[Queued]:
    """Hands jobs over that the history has, and writes down their ids."""
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
    """What the run folder keeps of a job and of those that it repeats, so that the history can be made again."""
    before = read_job(run.folder)
    earlier = (*before.earlier, before.model_copy(update={"earlier": ()})) if before else ()
    own = {"key": job.key, "campaign": job.campaign, "retries": job.retries, "retry_of": job.retry_of}
    handle = {**own, "earlier": earlier}
    return Queued(run.folder, run.job.model_copy(update=handle))


def new_job(prepared: Prepared, index: int | None, plan: Plan, key: str, campaign: str | None) -> Job:
    """The row of one run of a job that is handed over next."""
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
        submitted_s=time.time(),
        retries=spec.retries,
    )
