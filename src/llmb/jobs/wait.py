# SPDX-License-Identifier: Apache-2.0
"""Waits for jobs to end, and resubmits jobs after infrastructure failures, excluding the nodes at fault.

A retry uses the same run folder and resumes from the last checkpoint, if there is one.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from llmb.base.errors import (
    EnvironmentProblem,
    InfrastructureError,
    InvalidRun,
    LlmbError,
    RunFailed,
    UsageError,
    UserInterrupt,
)
from llmb.base.trust import check_owner
from llmb.jobs.conclude_ended import Say, conclude_job
from llmb.jobs.history import open_history
from llmb.jobs.job import CHANGING, Job
from llmb.jobs.order import Prepared
from llmb.jobs.refresh import faults_of, refresh, worth_a_retry
from llmb.jobs.store import KeyExists, Store
from llmb.jobs.submit import hand_over, submission_lock
from llmb.launch.jobspec.spec import read_spec
from llmb.launch.programs.port import NewSteps, find_program
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.record import read_record, write_record
from llmb.runs.steps import StepNews

LONGEST_AGO_S = 86400.0
"""A job that failed more than this number of seconds ago is not retried."""
_NUMBER = re.compile(r"(.*)#(\d+)")
SHORTEST_S, LONGEST_S = 1.0, 15.0
"""Limits of the seconds between two queries of a scheduler; the pause increases with the time waited."""
LOOK_EVERY_S = 0.5
PATIENCE_S = 600.0
"""Seconds for which a scheduler may fail to answer."""
WORST_FIRST = (RunFailed.exit_code, InfrastructureError.exit_code, InvalidRun.exit_code, UserInterrupt.exit_code, 0)


def pause_s(waited_s: float) -> float:
    """Return the seconds to wait before the next query, after ``waited_s`` seconds of waiting."""
    return min(max(waited_s / 20, SHORTEST_S), LONGEST_S)


def wait_for(
    store: Store,
    install: Path,
    keys: Sequence[str],
    environ: Mapping[str, str],
    say: Say,
    time_out_s: float | None = None,
    watch: "Watch | None" = None,
) -> list[Job]:
    """Update and retry jobs until the jobs with ``keys`` end, or for ``time_out_s``; return each, or its last retry.

    Raise InfrastructureError if a scheduler does not respond for ten minutes, EnvironmentProblem if it is missing here.
    """
    began = answered_s = time.monotonic()
    while True:
        now = time.monotonic()
        try:
            refresh_and_retry(store, install, environ, say, keys)
            answered_s = now
        except InfrastructureError as error:
            if now - answered_s > PATIENCE_S:
                raise
            say(error.what)
        jobs = [last_try(store, key) for key in keys]
        over = time_out_s is not None and now - began >= time_out_s
        if over or not any(job.live for job in jobs):
            if watch:
                watch.look(jobs[0])
            return jobs
        pause = pause_s(now - began)
        until = time.monotonic() + (pause if time_out_s is None else min(pause, time_out_s - (now - began)))
        while (remaining := until - time.monotonic()) > 0:
            if watch:
                watch.look(jobs[0])
            time.sleep(min(remaining, LOOK_EVERY_S))


def wait_for_one(install: Path, job: Job, environ: Mapping[str, str], say: Say, watch: "Watch") -> Job:
    """Wait until ``job`` or its last retry ends, and return it; raise UserInterrupt on Ctrl-C, and the errors of
    ``wait_for``."""
    with open_history(install, say) as store:
        try:
            (ended,) = wait_for(store, install, [job.key], environ, say, watch=watch)
        except KeyboardInterrupt as error:
            do = f"run 'llmb jobs wait {job.job_id}' to wait again, or 'llmb jobs cancel {job.job_id}' to end the job"
            raise UserInterrupt("stopped waiting; the job continues", where=job.run_dir, do=do) from error
    return ended


class Watch:
    """Reports the state of the first awaited job, and its steps as they complete."""

    def __init__(self, on_job: Callable[[Job], None], on_step: Callable[[StepNews], None]) -> None:
        self.on_job = on_job
        self.on_step = on_step
        self.steps: NewSteps | None = None

    def look(self, job: Job) -> None:
        self.on_job(job)
        if job.kind != "run":
            return
        folder = job.folder
        if self.steps is None:
            try:
                self.steps = find_program(read_record(folder).program).new_steps(folder)
            except (OSError, ValueError):
                return
        for step in self.steps.new():
            self.on_step(step)


def refresh_and_retry(
    store: Store, install: Path, environ: Mapping[str, str], say: Say, concluded: Iterable[str] = ()
) -> None:
    """Update all jobs, conclude the last retries of the jobs with keys ``concluded``, and resubmit jobs after
    infrastructure failures."""
    for line in refresh(store, install):
        say(line)
    for key in concluded:
        conclude_job(store, last_try(store, key), say)
    for line in retry_failed(store, install, environ, time.time()):
        say(line)


def last_try(store: Store, key: str) -> Job:
    """Return the last retry of the job with ``key``, or the job itself if there is none."""
    job = store.by_key(key)
    assert job, f"no job has the key {key}"
    while again := store.next_try(job.key):
        job = again
    return job


def exit_code(jobs: Sequence[Job]) -> int:
    """Return the exit code for the worst outcome of ``jobs``; a job that has not ended counts as invalid."""
    codes = {_exit_code(job, worth_a_retry(faults_of(find_scheduler(job.scheduler)), job.fault)) for job in jobs}
    return next(code for code in WORST_FIRST if code in codes or code == 0)


def _exit_code(job: Job, infrastructure: bool) -> int:
    if job.status == "failed":
        return InfrastructureError.exit_code if infrastructure else RunFailed.exit_code
    by_status = {"success": 0, "cancelled": UserInterrupt.exit_code}
    return by_status.get(job.status, InvalidRun.exit_code)


def retry_failed(store: Store, install: Path, environ: Mapping[str, str], now_s: float) -> Iterator[str]:
    """Resubmit jobs that failed because of the infrastructure and have retries left; yield messages for the user.

    Only one of several clients resubmits a job. A rejected job is retried at the next refresh.
    """
    for job in store.failed_with_retries(now_s - LONGEST_AGO_S):
        if job.retries - job.restarts < 1 or not worth_a_retry(faults_of(find_scheduler(job.scheduler)), job.fault):
            continue
        try:
            again, nodes = _submit_again(store, install, job, environ, now_s)
        except KeyExists:
            continue
        except (LlmbError, OSError, ValueError) as error:
            what = error.what if isinstance(error, LlmbError) else error
            yield f"job {job.job_id} failed ({job.fault}) and could not be resubmitted: {what}"
            continue
        without = f", without {nodes}" if nodes else ""
        yield f"job {job.job_id} failed ({job.fault}); it was resubmitted as {again}{without}"


def repeated(job: Job, now_s: float) -> Job:
    """Return the row of the next attempt at ``job``; restarts by the scheduler count as retries."""
    numbered = _NUMBER.fullmatch(job.key)
    key = f"{numbered[1]}#{int(numbered[2]) + 1}" if numbered else f"{job.key}#2"
    fresh: dict[str, Any] = {item.name: item.default for item in fields(Job) if item.name in ("job_id", *CHANGING)}
    retries = job.retries - job.restarts - 1
    return replace(job, **fresh, key=key, retry_of=job.key, retries=retries, submitted_s=now_s)


def excluded(*nodes: str | None) -> str | None:
    """Join lists of nodes with commas, each list once; return None if all are empty."""
    return ",".join(dict.fromkeys(filter(None, nodes))) or None


def _submit_again(store: Store, install: Path, job: Job, environ: Mapping[str, str], now_s: float) -> tuple[str, str]:
    folder = job.folder
    check_owner(folder.job_spec, install)
    spec = read_spec(folder)
    nodes = excluded(spec.excluded_nodes, *(tried.bad_nodes for tried in _tries(store, job)))
    prepared = Prepared(spec.model_copy(update={"excluded_nodes": nodes}), folder, again=True)
    with submission_lock(install) as descriptor:
        new = repeated(job, now_s)
        store.add([new])
        record = read_record(folder)
        write_record(folder, record.model_copy(update={"status": "queued", "reason": None, "ended_at": None}))
        try:
            queued = hand_over(store, prepared, new, environ, descriptor)
        except (UsageError, EnvironmentProblem):
            write_record(folder, record)
            raise
        return str(queued.job_id), nodes or ""


def _tries(store: Store, job: Job) -> Iterator[Job]:
    tried: Job | None = job
    while tried:
        yield tried
        tried = store.by_key(tried.retry_of) if tried.retry_of else None
