# SPDX-License-Identifier: Apache-2.0
"""Finds out whether submissions reached Slurm whose client died, or to whom Slurm did not answer."""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmb.jobs.job import Job
from llmb.jobs.states import is_same
from llmb.jobs.store import Store
from llmb.jobs.submit import submission_lock, with_handle
from llmb.launch.slurm.job_state import JobState
from llmb.launch.slurm.queries import own_accounts, own_jobs
from llmb.launch.slurm.submission import Queued, write_job
from llmb.runs.folder import RunFolder
from llmb.runs.record import SubmittedJob, now, read_record, write_record

SETTLED_S = 5.0
"""A controller that is busy may still have a submission in hand for so long."""


def resolve_submissions(store: Store, install: Path, time_out_s: float) -> Iterator[str]:
    """Gives every submission without an id the id that Slurm has for it, or writes down that there is none.

    Yields what people should know. Raises InfrastructureError where Slurm does not answer.
    """
    if not store.unresolved():
        return
    # With the lock nobody's sbatch is under way: what Slurm does not know now it will not know later.
    with submission_lock(install):
        unresolved = store.unresolved()
        states = [*own_jobs(time_out_s), *own_accounts(min(job.submitted_s for job in unresolved), time_out_s)]
        claimed = store.job_ids()
        for job in unresolved:
            job_id = find_submission(job, states, claimed) or _begun_as(job, claimed)
            if job_id:
                claimed.add(job_id)
                store.submitted({job.key: job_id})
                _write_handle(job, job_id)
            elif time.time() - job.submitted_s > SETTLED_S:
                store.not_submitted(job.key, "its submission was interrupted before it reached Slurm")
                _end_record(job)
                yield f"a submission was interrupted before it reached Slurm: {job.run_dir}"


def find_submission(job: Job, states: Iterable[JobState], claimed: set[str]) -> str | None:
    """The id of the job in Slurm that runs the batch script of ``job`` and belongs to no other. Pure."""
    for state in states:
        index = state.job_id.partition("_")[2]
        own_task = job.name.endswith(f".{index}") if index else True
        if state.command and own_task and is_same(job, state) and state.job_id not in claimed:
            return state.job_id
    return None


def _begun_as(job: Job, claimed: set[str]) -> str | None:
    """What the batch script says that ran in the folder; of a run that was tried before, that is an older job."""
    try:
        begun = read_record(RunFolder(Path(job.run_dir))).job
    except (OSError, ValueError):
        return None
    return begun.job_id if begun and begun.job_id not in claimed else None


def _write_handle(job: Job, job_id: str) -> None:
    folder = RunFolder(Path(job.run_dir))
    if folder.path.is_dir():
        write_job(with_handle(Queued(folder, SubmittedJob(job_id=job_id, submitted_at=now())), job))


def _end_record(job: Job) -> None:
    folder = RunFolder(Path(job.run_dir))
    try:
        record = read_record(folder)
        if record.status == "queued":
            write_record(folder, record.model_copy(update={"status": "failed", "reason": "it never reached Slurm"}))
    except (OSError, ValueError):
        return
