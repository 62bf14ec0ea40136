# SPDX-License-Identifier: Apache-2.0
"""Reads many logs in parallel."""

import gc
import math
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmb.errors import EnvironmentProblem
from llmb.logs.files import FoundFiles, ParsedFile, parse_file

_BATCH_FILES = 64
_BATCHES_PER_WORKER = 8
_WORTH_A_POOL_FILES = 500
_WORTH_A_POOL_BYTES = 1 << 28
_MANY_OBJECTS = 200_000
"""Reading allocates many objects, hardly any of which refer to each other: garbage collection would find nothing."""
SAFE_PATH = "PYTHONSAFEPATH"
Content = TypeVar("Content")


def parse_logs(found: FoundFiles, rule: str, workers: int) -> Iterator[ParsedFile]:
    """Every file of ``found``, in the order in which they finish."""
    yield from found.refused
    yield from read_in_parallel(found, partial(parse_file, rule=rule), workers)


def read_in_parallel(found: FoundFiles, read: "partial[Content]", workers: int) -> Iterator[Content]:
    """What ``read``, which has to be picklable, makes of every log of ``found``, in the order in which they finish."""
    if workers > 1 and _is_worth_a_pool(found):
        yield from _read_in_pool(found.logs, read, workers)
    else:
        yield from map(read, found.logs)


def _is_worth_a_pool(found: FoundFiles) -> bool:
    if len(found.logs) < 2:
        return False
    return len(found.logs) >= _WORTH_A_POOL_FILES or found.total_bytes >= _WORTH_A_POOL_BYTES


def _read_in_pool(paths: Sequence[Path], read: "partial[Content]", workers: int) -> Iterator[Content]:
    # The fork server has no threads. This process has, because of its progress bar, and must not be forked.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, read.func.__module__])
    with _without_working_folder():
        pool = ProcessPoolExecutor(workers, context, initializer=_begin_worker)
    try:
        with _interrupts_held_back(), _without_working_folder():
            batches = [pool.submit(_read_batch, batch, read) for batch in _batches(paths, workers)]
        for done in as_completed(batches):
            yield from done.result()
    except (KeyboardInterrupt, GeneratorExit):
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    except BrokenProcessPool as error:
        raise EnvironmentProblem(
            "a process that read logs was killed, perhaps out of memory", do="use fewer processes: --jobs 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Worker processes start with interrupts ignored: an interrupt could hit them in the middle of an import."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """For the fork server and what tracks its resources: ``python -c`` finds a ``types.py`` beside the logs first."""
    given = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if given is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = given


def _begin_worker() -> None:
    """It ends quietly on an interrupt."""
    gc.set_threshold(_MANY_OBJECTS)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _batches(paths: Sequence[Path], workers: int) -> list[Sequence[Path]]:
    """Batches of similar size: each takes every n-th file of a list that is sorted by size."""
    count = max(_BATCHES_PER_WORKER * workers, math.ceil(len(paths) / _BATCH_FILES))
    return [paths[i::count] for i in range(min(count, len(paths)))]


def _read_batch(paths: Sequence[Path], read: "partial[Content]") -> list[Content]:
    return list(map(read, paths))
