# SPDX-License-Identifier: Apache-2.0
"""Updates the states of jobs: a few queries to schedulers for all jobs, then a look into run folders."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError
from llmb.jobs.conclude import conclude_job
from llmb.jobs.faults import faults_of, find_fault
from llmb.jobs.folder_state import read_figures, read_left
from llmb.jobs.job import Change, Job
from llmb.jobs.resolve import resolve_submissions
from llmb.jobs.states import FAILED, Left, decide
from llmb.jobs.store import Store
from llmb.runs.folder import RunFolder
from llmb.runs.log_tail import tail
from llmb.schedulers.lookup import LOCAL, find_scheduler
from llmb.schedulers.port import JobState, Phase

TIME_OUT_S = 60.0
"""How long one query may take."""
SETTLE_S = 10.0
PUT_BACK_S = 3600.0
"""For this long after its end a job is queried again: it may have been requeued."""


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The result of a refresh."""

    changed: tuple[Job, ...]
    """Jobs whose state or status changed, as they are now."""
    warnings: tuple[str, ...]


def refresh(store: Store, install: Path, time_out_s: float = TIME_OUT_S) -> Refreshed:
    """Brings every job that may have changed up to date.

    Raises InfrastructureError if a scheduler does not answer, EnvironmentProblem if it is not installed here; its jobs
    are then left unchanged, and those of the others are up to date.
    """
    asked_s, query = time.time(), store.next_query()
    jobs = store.changeable(asked_s - PUT_BACK_S)
    unresolved = {job.scheduler for job in store.unresolved()}
    names = dict.fromkeys([LOCAL, *unresolved, *(job.scheduler for job in jobs)])
    changed: list[Job] = []
    warnings: list[str] = []
    problem: LlmbError | None = None
    for name in names:
        own = [job for job in jobs if job.scheduler == name]
        try:
            if name in unresolved:
                warnings += resolve_submissions(store, install, name, time_out_s)
                own = [job for job in store.changeable(asked_s - PUT_BACK_S) if job.scheduler == name]
            if own:
                answers = find_scheduler(name).states([job.asked for job in own], time_out_s)
                warnings += answers.warnings
                changed += _apply(store, own, answers.states, asked_s, query)
        except (InfrastructureError, EnvironmentProblem) as error:
            problem = problem or error
    if problem:
        raise problem
    return Refreshed(tuple(changed), tuple(warnings))


def refresh_job(store: Store, job: Job) -> None:
    """The same for one job."""
    asked_s, query = time.time(), store.next_query()
    answers = find_scheduler(job.scheduler).states([job.asked], TIME_OUT_S)
    list(_apply(store, [job], answers.states, asked_s, query))


def _apply(
    store: Store, jobs: Sequence[Job], seen: Mapping[str, JobState], asked_s: float, query: int
) -> Iterator[Job]:
    """Writes the changes to the history; the jobs whose state or status changed."""
    before = {job.key: job for job in jobs}
    changes = [change for job in jobs if job.key in seen and (change := look(job, seen[job.key], asked_s))]
    store.apply(changes, query)
    for change in changes:
        if _differs(before[change.key], change) and (job := store.by_key(change.key)):
            yield job


def look(job: Job, seen: JobState, asked_s: float) -> Change | None:
    """The change to write; None if nothing can have changed. Concludes the record of a run that ended."""
    if not job.live and (seen.phase == "unrecognized" or (seen.ended and seen.restarts <= job.restarts)):
        return None
    if seen.phase in ("queued", "running", "unrecognized"):
        return decide(job, seen, Left(), asked_s)
    left = read_left(job.run_dir)
    marked = left.belongs_to(job, max(seen.restarts, job.restarts))
    if seen.may_be_told and not marked:
        return None  # unchanged until the scheduler or the folder reports how it ended
    if left.run_status in (None, "running") and not marked and _just_ended(seen, asked_s):
        return None  # files of other nodes may be visible here with a delay
    if left.run_status in ("queued", "running") and conclude(job, seen):
        left = read_left(job.run_dir)
    return with_fault(job, seen, decide(job, seen, left, asked_s))


def _just_ended(seen: JobState, asked_s: float) -> bool:
    return seen.phase != "killed" and seen.ended_s is not None and abs(asked_s - seen.ended_s) < SETTLE_S


def conclude(job: Job, seen: JobState) -> bool:
    """Writes the run's result, which the job did not write itself; false if its folder does not permit that."""
    try:
        conclude_job(RunFolder(Path(job.run_dir)), seen, find_scheduler(job.scheduler).title)
    except (OSError, ValueError):
        return False
    return True


def with_fault(job: Job, seen: JobState, change: Change) -> Change:
    """``change`` with the step time of a success, or the cause of a failure and the nodes at fault."""
    if change.status != "failed":
        return replace(change, **read_figures(job.run_dir)) if change.status == "success" else change
    scheduler = find_scheduler(job.scheduler)
    phase: Phase = "failed" if change.state == FAILED else seen.phase
    fault = find_fault(faults_of(scheduler), phase, _log(job))
    if fault is None:
        return change
    nodes = ",".join(matching(scheduler.host_names(change.nodes), fault.nodes))
    return replace(change, fault=fault.name, bad_nodes=nodes or None)


def matching(listed: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``listed`` that are in ``names``, which may include the domain."""
    return tuple(dict.fromkeys(host for name in names for host in (name, name.split(".")[0]) if host in listed))


def _log(job: Job) -> str:
    folder = RunFolder(Path(job.run_dir))
    try:
        return tail(folder.log) + tail(folder.batch_output)
    except OSError:
        return ""


def _differs(job: Job, change: Change) -> bool:
    return (job.state, job.status, job.restarts) != (change.state, change.status, change.restarts)
