# SPDX-License-Identifier: Apache-2.0
"""Writes and reads files in several processes at once.

Each file loses its name as soon as it is open: the file system frees it when its process ends, however that ends.
"""

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from threading import BrokenBarrierError
from typing import NamedTuple

from llmb.bench.disk import DiskJob, DiskTiming
from llmb.bench.jobs import BenchProgress
from llmb.runs.parent_death import end_with_parent

BLOCK = 8 * 2**20
PATIENCE_S = 3600.0
Span = tuple[float, float]
"""Start and end on the clock that all processes of a machine share."""


def open_unnamed(folder: Path, rank: int, *, direct: bool) -> tuple[int, bool]:
    """A new file for writing and reading, and whether it is direct. Raises OSError."""
    path = folder / f"{os.getpid()}_{rank}"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    wanted = getattr(os, "O_DIRECT", 0) if direct else 0
    try:
        handle = os.open(path, flags | wanted, 0o600)
    except OSError:
        path.unlink(missing_ok=True)  # it may have been made before the flag was rejected
        if not wanted:
            raise
        handle, wanted = os.open(path, flags, 0o600), 0
    path.unlink()
    return handle, bool(wanted)


class DiskFile:
    """The file of one process, and a block of data that does not compress."""

    def __init__(self, job: DiskJob, rank: int) -> None:
        self.size = job.size_bytes
        self.past = job.cache == "past"
        self.handle, self.direct = open_unnamed(Path(job.folder), rank, direct=self.past)
        self.block = mmap.mmap(-1, BLOCK)  # its address is aligned, as direct access needs
        self.block.write(os.urandom(BLOCK))

    def write(self) -> None:
        """All of it, until it is on the disk. Raises OSError."""
        os.lseek(self.handle, 0, os.SEEK_SET)
        with memoryview(self.block) as data:
            left = self.size
            while left:
                left -= os.write(self.handle, data[: min(BLOCK, left)])
        os.fsync(self.handle)

    def drop_cache(self) -> None:
        if self.past and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self) -> None:
        """All of it. Raises OSError."""
        os.lseek(self.handle, 0, os.SEEK_SET)
        left = self.size
        with memoryview(self.block) as data:
            while left:
                got = os.readv(self.handle, [data[: min(BLOCK, left)]])
                if not got:
                    raise OSError(f"the file ends {left} bytes early")
                left -= got


def work(job: DiskJob, rank: int, barrier: Barrier, answer: Connection) -> None:
    """One process. Sends the number of each repetition that begins, then its spans or why it failed."""
    end_with_parent()
    try:
        file = DiskFile(job, rank)
        spans: list[tuple[Span, Span]] = []
        for number in range(job.repeats):
            answer.send(number)
            written = _timed(file.write, barrier)
            file.drop_cache()
            spans.append((written, _timed(file.read, barrier)))
        answer.send(Done(file.direct, spans))
    except OSError as error:
        answer.send(error.strerror or str(error))
        barrier.abort()
    except BrokenBarrierError:
        answer.send(None)  # another process says why


class Done(NamedTuple):
    """What a process measured: the spans of each write and read."""

    direct: bool
    spans: list[tuple[Span, Span]]


def _timed(call: Callable[[], None], barrier: Barrier) -> Span:
    barrier.wait(PATIENCE_S)
    began = time.monotonic()
    call()
    return began, time.monotonic()


def run(job: DiskJob, say: Callable[[BenchProgress], None]) -> DiskTiming:
    """Raises RuntimeError with the first process's reason if one failed."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(job.ranks)
    answers: list[Connection] = []
    processes: list[SpawnProcess] = []
    for rank in range(job.ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(job, rank, barrier, theirs))
        process.start()
        theirs.close()
        answers.append(ours)
        processes.append(process)
    ends = _ends_of(answers, processes, job, say)
    for process in processes:
        process.join()
    done = [end for end in ends if isinstance(end, Done)]
    if len(done) < job.ranks:
        raise RuntimeError(next((end for end in ends if isinstance(end, str)), "a process was killed"))
    spans = [[end.spans[number] for end in done] for number in range(job.repeats)]
    write_s, read_s = (tuple(_length([pair[way] for pair in same]) for same in spans) for way in (0, 1))
    return DiskTiming(write_s=write_s, read_s=read_s, direct=all(end.direct for end in done))


def _ends_of(
    answers: list[Connection], processes: list[SpawnProcess], job: DiskJob, say: Callable[[BenchProgress], None]
) -> "list[Done | str | None]":
    """What each process sent last; None if it was killed, or if another one failed."""
    ends: list[Done | str | None] = [None] * job.ranks
    left = {answer: rank for rank, answer in enumerate(answers)}
    while left:
        answer = wait(list(left))[0]
        assert isinstance(answer, Connection)
        try:
            told = answer.recv()
        except EOFError:
            for process in processes:
                process.kill()  # the others would wait for it
            told = None
        if not isinstance(told, int):
            ends[left.pop(answer)] = told
        elif left[answer] == 0:
            say(BenchProgress(name=f"{job.ranks} x {job.size_bytes:,} bytes", number=told, total=job.repeats))
    return ends


def _length(spans: list[Span]) -> float:
    """From the first start to the last end."""
    return max(end for _, end in spans) - min(start for start, _ in spans)
