# SPDX-License-Identifier: Apache-2.0
"""Finds out what became of jobs: a handful of questions to Slurm for all of them, then a look into run folders."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.errors import InfrastructureError
from llmb.jobs.faults import find_fault, read_faults
from llmb.jobs.hostlist import matching
from llmb.jobs.job import Change, Job
from llmb.jobs.left import read_left, read_step_time
from llmb.jobs.resolve import resolve_submissions
from llmb.jobs.states import Left, decide, is_same
from llmb.jobs.store import Store
from llmb.launch.slurm.client import TIME_OUT_S
from llmb.launch.slurm.follow import conclude_job
from llmb.launch.slurm.job_state import UNKNOWN, JobState
from llmb.launch.slurm.queries import accounted_states, controller_states
from llmb.runs.finish import tail
from llmb.runs.folder import RunFolder

PUT_BACK_S = 3600.0
"""For so long after its end a job is asked for again: somebody may have put it back into the queue."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a look at the jobs found."""

    changed: tuple[Job, ...]
    """Jobs whose state or status is another one now, as they are now."""
    warnings: tuple[str, ...]


def refresh(store: Store, install: Path, time_out_s: float = TIME_OUT_S) -> Refreshed:
    """Brings every job that may have changed up to date.

    Raises InfrastructureError where the controller does not answer, EnvironmentProblem where there is no Slurm here; in
    both cases nothing is changed.
    """
    asked_s = time.time()
    warnings = list(resolve_submissions(store, install, time_out_s))
    jobs = store.changeable(asked_s - PUT_BACK_S)
    seen, more = ask(jobs, time_out_s)
    before = {job.key: job for job in jobs}
    changes = [change for job in jobs if job.key in seen and (change := look(job, seen[job.key], asked_s))]
    store.apply(changes)
    different = [change.key for change in changes if _differs(before[change.key], change)]
    return Refreshed(tuple(job for key in different if (job := store.by_key(key))), (*warnings, *more))


def ask(jobs: Sequence[Job], time_out_s: float) -> tuple[dict[str, JobState], list[str]]:
    """What Slurm says, by key: the controller, and of live jobs that it forgot, the accounts.

    Jobs of which nobody could be asked are missing. A job that has ended is asked for at the controller alone.
    """
    ids = list(dict.fromkeys(job.job_id for job in jobs if job.job_id))
    answers = controller_states(ids, time_out_s) if ids else {}
    known = {job.key: answers[str(job.job_id)] for job in jobs if job.job_id in answers}
    known = {job.key: known[job.key] for job in jobs if job.key in known and is_same(job, known[job.key])}
    forgotten = [job for job in jobs if job.live and job.job_id and job.key not in known]
    if not forgotten:
        return known, []
    try:
        accounts = accounted_states([str(job.job_id) for job in forgotten], time_out_s)
    except InfrastructureError as error:
        marked = [job for job in forgotten if _marked(job, job.restarts)]
        return known | {job.key: JobState(job_id=str(job.job_id)) for job in marked}, [error.what]
    for job in forgotten:
        found = accounts.get(str(job.job_id))
        if found is None or not is_same(job, found):
            known[job.key] = JobState(job_id=str(job.job_id))
        elif found.ended:
            known[job.key] = found
        elif _marked(job, max(found.restarts, job.restarts)):
            # The controller forgets only what has ended: these accounts lag behind.
            known[job.key] = JobState(job_id=str(job.job_id))
    return known, []


def _marked(job: Job, restarts: int) -> bool:
    """Whether its folder says as much as the accounts would; a job without a mark stays as it is until they do."""
    return read_left(job.run_dir).belongs_to(job, restarts)


def look(job: Job, seen: JobState, asked_s: float) -> Change | None:
    """What to write down; null where nothing can have changed. The record of a run that ended is concluded."""
    if not job.live and seen.ended and seen.restarts <= job.restarts:
        return None
    if seen.state != UNKNOWN and not seen.ended:
        return decide(job, seen, Left(), asked_s)
    left = read_left(job.run_dir)
    if left.run_status in ("queued", "running") and conclude(job, seen):
        left = read_left(job.run_dir)
    return with_fault(job, decide(job, seen, left, asked_s))


def conclude(job: Job, seen: JobState) -> bool:
    """Writes the run's result, which the job could not do itself; false where its folder does not let it."""
    try:
        conclude_job(RunFolder(Path(job.run_dir)), seen)
    except (OSError, ValueError):
        return False
    return True


def with_fault(job: Job, change: Change) -> Change:
    """The same with what the run measured, or with what it failed by, and the nodes to blame for it."""
    if change.status != "failed":
        return replace(change, step_time_s=read_step_time(job.run_dir) if change.status == "success" else None)
    fault = find_fault(read_faults(), change.state, _log(job))
    if fault is None:
        return change
    nodes = ",".join(matching(change.nodes, fault.nodes))
    return replace(change, fault=fault.name, bad_nodes=nodes or None)


def _log(job: Job) -> str:
    folder = RunFolder(Path(job.run_dir))
    try:
        return tail(folder.log) + tail(folder.batch_output)
    except OSError:
        return ""


def _differs(job: Job, change: Change) -> bool:
    return (job.state, job.status, job.restarts) != (change.state, change.status, change.restarts)
