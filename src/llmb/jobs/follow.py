# SPDX-License-Identifier: Apache-2.0
"""Reads and follows the logs of jobs, and updates the jobs meanwhile."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from llmb.base.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.jobs.conclude_ended import Say, conclude_job
from llmb.jobs.job import LIVE, Job, row_of_record
from llmb.jobs.refresh import TIME_OUT_S, refresh
from llmb.jobs.states import decide, read_folder, read_run
from llmb.jobs.store import Store
from llmb.jobs.wait import last_try
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.runs.folder import NotWritable, RunFolder
from llmb.runs.record import read_record, unreadable_record

Write = Callable[[bytes], object]
Ask = Callable[[Job], Job]
CHUNK_BYTES = 1 << 16
LOOK_EVERY_S = 0.2
ASK_EVERY_S = 5.0


def job_log(job: Job, lines: int | None) -> Iterator[bytes]:
    """Yield the whole log, or its last ``lines`` lines, in chunks; raise UsageError if there is no log."""
    path = log_of(job)
    if path is None:
        why = f": {job.reason}" if job.reason else ""
        do = "pass --follow to wait for it" if job.live else None
        raise UsageError(f"the job has no log; it is {job.state}{why}", where=job.run_dir, do=do)
    with path.open("rb") as stream:
        stream.seek(0 if lines is None else start_of_last(stream, lines))
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def log_of(job: Job) -> Path | None:
    """Return the path of the workers' log, or else of the batch script's output; None if both are empty or missing."""
    folder = job.folder
    return next((path for path in (folder.log, folder.batch_output) if path.exists() and path.stat().st_size), None)


def start_of_last(stream: BinaryIO, lines: int) -> int:
    """Return the byte offset at which the last ``lines`` lines begin."""
    last = deque(stream, maxlen=lines)
    return stream.seek(0, 2) - sum(map(len, last))


def follow_log(
    job: Job, ask: Ask, write: Write, lines: int | None, look: Callable[[Job], object] = lambda _: None
) -> Job:
    """Write the log of ``job``, or of a retry that ``ask`` returns instead, as it grows; return the job that has ended.

    ``ask`` updates the job every few seconds; ``look`` is called with the job in each iteration.
    """
    reader: _Follower | None = None
    queried_s = -math.inf
    while True:
        now = time.monotonic()
        if job.live and now - queried_s > ASK_EVERY_S:
            queried_s = now
            job = ask(job)
        reader = _next_reader(reader, job, lines)
        wrote = reader.copy(write) if reader else False
        look(job)
        if not job.live and not wrote:
            return job
        if not wrote:
            time.sleep(LOOK_EVERY_S)


class _Follower:
    def __init__(self, path: Path, lines: int | None) -> None:
        self.path = path
        with path.open("rb") as stream:
            self.offset = 0 if lines is None else start_of_last(stream, lines)

    def copy(self, write: Write) -> bool:
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            chunk = stream.read(CHUNK_BYTES)
        write(chunk)
        self.offset += len(chunk)
        return bool(chunk)


def _next_reader(reader: _Follower | None, job: Job, lines: int | None) -> _Follower | None:
    path = log_of(job)
    if path is None or (reader and reader.path == path):
        return reader
    return _Follower(path, lines if reader is None else None)


def asker(store: Store, install: Path, say: Say) -> Ask:
    """Return a function that updates a job, and returns the job or its last retry.

    If a scheduler does not respond and the run's record has a final status, the job has that status.
    """

    def ask(job: Job) -> Job:
        try:
            now = current(store, install, job, say)
        except (InfrastructureError, EnvironmentProblem) as error:
            say(error.what)
            now, record = store.by_key(job.key) or job, read_run(job)
            return now if record is None or record.status in LIVE else replace(now, status=record.status)
        last = last_try(store, now.key)
        return now if last.key == now.key else last  # a read-only history still has the old row

    return ask


def job_of_folder(folder: RunFolder) -> Job:
    """Build a job from the record of a run that is in no history; raise UsageError if the record is unreadable."""
    try:
        record = read_record(folder)
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
    return Job(
        **row_of_record(record),
        key="",
        scheduler="local",
        run_dir=str(folder.path),
        experiment=folder.name,
        submitted_s=0.0,
        state=record.status,
        status=record.status,
        reason=record.reason,
    )


def current(store: Store, install: Path, job: Job, say: Say) -> Job:
    """Update all jobs, and conclude the run of ``job`` if it has ended; if the history is read-only, update only the
    returned status. Raise InfrastructureError if a scheduler does not answer, EnvironmentProblem if it is missing here.
    """
    try:
        refresh(store, install)
    except NotWritable:
        return _ended(job)
    return conclude_job(store, store.by_key(job.key) or job, say)


def _ended(job: Job) -> Job:
    state = find_scheduler(job.scheduler).states([job], TIME_OUT_S).states.get(job.key)
    if state is None or state.end_pending or state.phase in ("queued", "running", "unrecognized"):
        return job
    return replace(job, status=decide(job, state, read_folder(job.run_dir), time.time()).status)
