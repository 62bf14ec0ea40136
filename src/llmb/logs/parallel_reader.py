# SPDX-License-Identifier: Apache-2.0
"""Reads many logs in parallel."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TypeVar

from llmb.errors import EnvironmentProblem
from llmb.logs.files import FoundFiles, ParsedFile, parse_file
from llmb.worker_pool import given_to_workers, load_for_workers

_BATCH_FILES = 64
_BATCHES_PER_WORKER = 8
_WORTH_A_POOL_FILES = 500
_WORTH_A_POOL_BYTES = 1 << 28
Content = TypeVar("Content")


def parse_logs(found: FoundFiles, rule: str, workers: int) -> Iterator[ParsedFile]:
    """Every file of ``found``, in the order in which they finish."""
    yield from found.refused
    yield from read_in_parallel(found, partial(parse_file, rule=rule), workers)


def expect_logs(count: int, read: "partial[list[Content]]", workers: int) -> None:
    """Begins to load what ``read`` needs if so many logs will be read in parallel, and returns at once."""
    if workers > 1 and count >= _WORTH_A_POOL_FILES:
        load_for_workers([__name__, read.func.__module__])


def read_in_parallel(found: FoundFiles, read: "partial[Content]", workers: int) -> Iterator[Content]:
    """What ``read``, which has to be picklable, makes of every log of ``found``, in the order in which they finish."""
    if workers > 1 and _is_worth_a_pool(found):
        load_for_workers([__name__, read.func.__module__])
        yield from _read_in_pool(found.logs, partial(_read_each, read=read), workers)
    else:
        yield from map(read, found.logs)


def read_batches(found: FoundFiles, read: "partial[list[Content]]", workers: int) -> Iterator[Content]:
    """What ``read`` makes of some logs at once, as above."""
    if workers > 1 and _is_worth_a_pool(found):
        load_for_workers([__name__, read.func.__module__])
        yield from _read_in_pool(found.logs, read, workers)
    else:
        for batch in _batches(found.logs, 1):
            yield from read(batch)


def _is_worth_a_pool(found: FoundFiles) -> bool:
    if len(found.logs) < 2:
        return False
    return len(found.logs) >= _WORTH_A_POOL_FILES or found.total_bytes >= _WORTH_A_POOL_BYTES


def _read_in_pool(paths: Sequence[Path], read: "partial[list[Content]]", workers: int) -> Iterator[Content]:
    tasks = [partial(read, batch) for batch in _batches(paths, workers)]
    try:
        with given_to_workers(tasks, workers) as batches:
            for done in as_completed(batches):
                yield from done.result()
    except BrokenProcessPool as error:
        raise EnvironmentProblem(
            "a process that read logs was killed, perhaps out of memory", do="use fewer processes: --jobs 1"
        ) from error


def _batches(paths: Sequence[Path], workers: int) -> list[Sequence[Path]]:
    """Batches of similar size: each takes every n-th file of a list that is sorted by size."""
    count = max(_BATCHES_PER_WORKER * workers, math.ceil(len(paths) / _BATCH_FILES))
    return [paths[i::count] for i in range(min(count, len(paths)))]


def _read_each(paths: Sequence[Path], read: "partial[Content]") -> list[Content]:
    return list(map(read, paths))
