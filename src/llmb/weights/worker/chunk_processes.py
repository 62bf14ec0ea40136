# SPDX-License-Identifier: Apache-2.0
"""Runs the writing of files in several processes; a single one is this process itself."""

import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

import torch

from llmb.checkpoints.import_journal import FinishedFile
from llmb.errors import RunFailed, UsageError
from llmb.runs.parent_death import end_with_parent
from llmb.weights.worker.chunks import WeightFile

FEWER = "run the same command again, with fewer processes if memory is short: files that are finished are kept"
PARENT_GONE = 1

OnFinished = Callable[[FinishedFile], None]
OnBytes = Callable[[int], None]


class WriteFile(Protocol):
    """Writes one file, and calls ``on_bytes`` with the bytes of each of its chunks."""

    def __call__(self, file: WeightFile, on_bytes: OnBytes) -> FinishedFile: ...


@dataclass(slots=True)
class Worker:
    """A writing process, and the file that it writes."""

    process: SpawnProcess
    pipe: Connection
    file: WeightFile | None = None

    def give(self, files: deque[WeightFile]) -> None:
        self.file = files.popleft() if files else None
        if self.file:
            with suppress(OSError):  # of a process that was killed, the end of the pipe is read next
                self.pipe.send(self.file)


def write_in_processes(
    write: WriteFile, files: Sequence[WeightFile], processes: int, on_finished: OnFinished, on_bytes: OnBytes
) -> None:
    """Writes ``files`` and reports each as it is finished; ``on_bytes`` is called with the bytes of each chunk.

    Raises the first error of a process once the others have finished the files that they are writing, and RunFailed if
    a process was killed.
    """
    processes = min(processes, len(files))
    if processes < 2:
        for file in files:
            on_finished(write(file, on_bytes))
        return
    workers = [_start(write) for _ in range(processes)]
    try:
        _write_all(workers, deque(files), on_finished, on_bytes)
    finally:
        for worker in workers:
            worker.pipe.close()  # the process ends with it
            worker.process.join()


def _write_all(workers: list[Worker], left: deque[WeightFile], on_finished: OnFinished, on_bytes: OnBytes) -> None:
    for worker in workers:
        worker.give(left)
    by_pipe = {worker.pipe: worker for worker in workers}
    first_error: Exception | None = None
    while busy := [worker.pipe for worker in workers if worker.file]:
        for pipe in wait(busy):
            worker = by_pipe[pipe]  # type: ignore[index]
            said = _said(worker)
            if isinstance(said, int):
                on_bytes(said)
                continue
            if isinstance(said, FinishedFile):
                on_finished(said)
            else:
                first_error = first_error or said
                left.clear()
            worker.give(left)
    if first_error:
        raise first_error


def _said(worker: Worker) -> int | FinishedFile | Exception:
    try:
        said: int | FinishedFile | Exception = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        code = worker.process.exitcode or 0
        ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        name = worker.file.name if worker.file else ""
        return RunFailed(f"the process that was writing {name} {ending}", do=FEWER)
    return said


def _start(write: WriteFile) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(write, theirs, os.getpid()))
    process.start()
    theirs.close()  # so that a pipe ends with its process
    return Worker(process, ours)


def _work(write: WriteFile, pipe: Connection, parent: int) -> None:
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(PARENT_GONE)  # it ended before the kernel was asked
    torch.set_num_threads(1)  # the processes share the cores
    with suppress(EOFError):
        while True:
            file = pipe.recv()
            try:
                pipe.send(write(file, pipe.send))
            except (UsageError, OSError) as error:
                pipe.send(error)
