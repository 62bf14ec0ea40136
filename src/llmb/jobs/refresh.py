# SPDX-License-Identifier: Apache-2.0
"""Updates the states of jobs from a few queries to schedulers and from the run folders.

If a job failed, it also finds the cause, whether the infrastructure is to blame, and the nodes at fault.
"""

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, InfrastructureError, LlmbError
from llmb.catalogue.data_files import read_file
from llmb.jobs.job import Job
from llmb.jobs.states import FAILED, FolderState, decide, read_figures, read_folder
from llmb.jobs.store import Store
from llmb.jobs.submit import resolve_submissions
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.scheduler_port import INFRASTRUCTURE, FaultTable, JobState, Phase, Scheduler
from llmb.runs.failure import failed_host
from llmb.runs.folder import tail
from llmb.runs.record import LOCAL

TABLE = Path(__file__).parent / "data" / "faults.yaml"
TIME_OUT_S = 60.0
"""Time limit of one query in seconds."""
SETTLE_S = 10.0
REQUEUE_S = 3600.0
"""Seconds for which an ended job is still queried, because it may have been requeued."""
NOT_CONCLUDED = "not concluded"
"""Part of the reason of an ended job whose run has no result yet."""


@dataclass(frozen=True, slots=True)
class Fault:
    """The cause of a job's failure, and the nodes at fault, if known."""

    name: str
    nodes: tuple[str, ...] = ()


def read_faults(path: Path = TABLE) -> FaultTable:
    """Read the patterns that apply to every log; raise CatalogueError if the file violates its schema."""
    return read_file(path, FaultTable)


@cache
def faults_of(scheduler: Scheduler) -> FaultTable:
    """Return the patterns that apply to every log, and patterns for the scheduler's own messages."""
    return FaultTable(faults=(*read_faults().faults, *scheduler.fault_patterns()))


def find_fault(table: FaultTable, phase: Phase, log: str) -> Fault | None:
    """Find the cause of a job's failure from its phase and the end of its log; return None if it is unknown.

    The phase takes precedence, because messages of processes that die with their node are misleading. Nodes that the
    scheduler found dead are not listed, because they are already down.
    """
    if phase in INFRASTRUCTURE:
        return Fault(phase)
    if phase == "out_of_memory":
        return Fault("host_out_of_memory")
    if phase != "failed":
        return None
    for entry in table.faults:
        match = re.search(entry.pattern, log, re.IGNORECASE)
        if match:
            return Fault(entry.fault, _nodes(match, log) if entry.kind == "infrastructure" else ())
    return None


def worth_a_retry(table: FaultTable, fault: str | None) -> bool:
    """Return True if ``fault`` is an infrastructure failure, after which the job may succeed if it is retried."""
    if fault in INFRASTRUCTURE:
        return True
    return any(entry.fault == fault and entry.kind == "infrastructure" for entry in table.faults)


def _nodes(match: re.Match[str], log: str) -> tuple[str, ...]:
    texts = [text for name, text in match.groupdict().items() if text]
    host = failed_host(log)
    return tuple(texts) or ((host,) if host else ())


def refresh(store: Store, install: Path, time_out_s: float = TIME_OUT_S) -> list[str]:
    """Update every job that may have changed, and return warnings.

    Raise NotWritable if the history is read-only. After updating the jobs of all other schedulers, raise
    InfrastructureError if one does not answer, EnvironmentProblem if it is not installed here.
    """
    query_s, query = time.time(), store.next_query()
    jobs = store.changeable(query_s - REQUEUE_S)
    unresolved = {job.scheduler for job in store.unresolved()}
    names = dict.fromkeys([LOCAL, *unresolved, *(job.scheduler for job in jobs)])
    warnings: list[str] = []
    problem: LlmbError | None = None
    for name in names:
        group = [job for job in jobs if job.scheduler == name]
        try:
            if name in unresolved:
                warnings += resolve_submissions(store, install, name, time_out_s)
                group = [job for job in store.changeable(query_s - REQUEUE_S) if job.scheduler == name]
            if group:
                answers = find_scheduler(name).states(group, time_out_s)
                warnings += answers.warnings
                _apply(store, group, answers.states, query_s, query)
        except (InfrastructureError, EnvironmentProblem) as error:
            problem = problem or error
    if problem:
        raise problem
    return warnings


def refresh_job(store: Store, job: Job) -> None:
    query_s, query = time.time(), store.next_query()
    answers = find_scheduler(job.scheduler).states([job], TIME_OUT_S)
    _apply(store, [job], answers.states, query_s, query)


def _apply(store: Store, jobs: Sequence[Job], states: Mapping[str, JobState], query_s: float, query: int) -> None:
    store.apply([now for job in jobs if job.key in states and (now := look(job, states[job.key], query_s))], query)


def look(job: Job, state: JobState, query_s: float) -> Job | None:
    """Return ``job`` updated from ``state`` and its folder; None if its end is already recorded or not yet known."""
    if not job.live and (state.phase == "unrecognized" or (state.ended and state.restarts <= job.restarts)):
        return None
    if state.phase in ("queued", "running", "unrecognized"):
        return decide(job, state, FolderState(), query_s)
    folder = read_folder(job.run_dir)
    marked = folder.end_of(job, max(state.restarts, job.restarts)) is not None
    if state.end_pending and not marked:
        return None  # unchanged until the scheduler or the folder reports how it ended
    just_ended = state.phase != "killed" and state.ended_s is not None and abs(query_s - state.ended_s) < SETTLE_S
    if folder.run_status in (None, "running") and not marked and just_ended:
        return None  # files of other nodes may be visible here with a delay
    ended = with_outcome(decide(job, state, folder, query_s), state.phase)
    if folder.run_status not in ("queued", "running"):
        return ended
    remedy = f"{NOT_CONCLUDED}; run 'llmb result {job.id}'"
    return replace(ended, reason="; ".join(filter(None, (ended.reason, remedy))))


def with_outcome(job: Job, phase: Phase) -> Job:
    """Return the ended ``job`` with its run's results if it succeeded, or the cause and nodes at fault if it failed."""
    figures = read_figures(job.run_dir) if job.kind == "run" else {}
    if job.status != "failed":
        return replace(job, **figures) if job.status == "success" else job
    scheduler = find_scheduler(job.scheduler)
    job = replace(job, bad_nodes=figures.get("bad_nodes"))
    fault = find_fault(faults_of(scheduler), "failed" if job.state == FAILED else phase, _log(job))
    if fault is None:
        return job
    hosts = matching(scheduler.host_names(job.nodes), fault.nodes)
    nodes = dict.fromkeys(filter(None, (*(job.bad_nodes or "").split(","), *hosts)))
    return replace(job, fault=fault.name, bad_nodes=",".join(nodes) or None)


def matching(listed: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Return the nodes in ``listed`` that ``names`` contains, possibly with a domain."""
    return tuple(dict.fromkeys(host for name in names for host in (name, name.split(".")[0]) if host in listed))


def _log(job: Job) -> str:
    folder = job.folder
    try:
        return tail(folder.log) + tail(folder.batch_output)
    except OSError:
        return ""
