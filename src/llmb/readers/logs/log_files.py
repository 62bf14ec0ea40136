# SPDX-License-Identifier: Apache-2.0
"""Finds the logs in a directory and reads one of them, or many in parallel."""

import math
import multiprocessing
import os
import re
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import TypeVar

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.base.input_files import check_reachable, not_regular, open_file
from llmb.base.shown_text import counted
from llmb.catalogue.window import DEFAULT_RULE
from llmb.readers.logs.configuration import document_of_log
from llmb.readers.logs.outcome import LogOutcome, Status, judge_log
from llmb.readers.logs.reader import read_log

LOG_NAMES, OTHER_NAME = (".out", ".out.gz"), ".log"
NCCL = b" NCCL INFO "
_NAMES: tuple[tuple["re.Pattern[str]", Status, str], ...] = (
    (
        re.compile(r"^sbatch_"),
        "not_training_log",
        "output of the batch script; the run's own log is in the same folder",
    ),
    (re.compile(r"^vboost"), "not_training_log", "output of a helper job"),
    (re.compile(r"nccltrace"), "traced", "tracing slows a run down"),
    (re.compile(r"nsys_analysis"), "not_training_log", "analysis of a profile"),
    (re.compile(r"_(nsys|torchprofile)(_|\.|$)"), "profiled", "profiling slows a run down"),
    (
        re.compile(r"prepare_squad_dataset_exp|import_ckpt_exp"),
        "not_training_log",
        "preparation of a dataset or a checkpoint",
    ),
)
"""Patterns for the names of files that are not read, with the resulting status and reason; the first match counts."""


@dataclass(frozen=True, slots=True)
class ParsedFile:
    path: Path
    outcome: LogOutcome
    may_name_network: bool = True
    """False if the text certainly has no ``NCCL INFO`` lines."""


@dataclass(frozen=True, slots=True)
class LogFiles:
    """The files that were found: ``logs`` are to be read, largest first; ``refused`` already have an outcome."""

    logs: tuple[Path, ...]
    total_bytes: int
    refused: tuple[ParsedFile, ...]
    unread: int = 0
    """Number of files with names that end in ``.log``, which are not read."""


def find_logs(root: Path) -> LogFiles:
    """Find the logs below ``root``, or ``root`` itself if it is a file. Raise UsageError if there is none."""
    check_reachable(root)
    if root.is_file():
        return LogFiles((root,), root.stat().st_size, ())
    if root.exists() and not root.is_dir():
        raise UsageError(f"'{root}' {not_regular(root.stat().st_mode)}, not a regular file", do="pass a log file")
    if not root.exists():
        raise UsageError(f"no such file or directory: '{root}'", do="pass a log file or the directory with the logs")
    refused: list[ParsedFile] = []
    sizes: dict[Path, int] = {}
    names = _walk(root, refused)
    unread = sum(name.endswith(OTHER_NAME) for name in names)
    for name, status in _once(name for name in names if not name.endswith(OTHER_NAME)):
        path = Path(name)
        size = _size_or_refusal(path, status)
        if isinstance(size, LogOutcome):
            refused.append(ParsedFile(path, size))
        else:
            sizes[path] = size
    if not sizes and not refused:
        raise UsageError(
            f"no '*.out' file in or below '{root}'" + (f"; {counted(unread, '*.log file')} not read" if unread else ""),
            do="pass a directory with *.out files or, except to 'llmb parse --compat', the path of a log",
        )
    return LogFiles(_largest_first(sizes), sum(sizes.values()), tuple(refused), unread)


def find_all_logs(roots: Sequence[Path]) -> LogFiles:
    """Find the logs in ``roots``, folders or files, which may overlap. Raise UsageError like ``find_logs``."""
    roots_files = [find_logs(root) for root in roots]
    if len(roots_files) == 1:
        return roots_files[0]
    logs = {path.resolve(): path for one in roots_files for path in one.logs}
    refused = {file.path.absolute(): file for one in roots_files for file in one.refused}
    sizes = {path: _size(path) for path in logs.values()}
    unread = sum(one.unread for one in roots_files)
    return LogFiles(_largest_first(sizes), sum(sizes.values()), tuple(refused.values()), unread)


def _largest_first(sizes: Mapping[Path, int]) -> tuple[Path, ...]:
    return tuple(sorted(sizes, key=lambda path: (-sizes[path], path.parts)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # the error is reported when the file is read


def _walk(root: Path, refused: list[ParsedFile]) -> list[str]:
    """Return the paths of logs below ``root``; hidden ones may be incomplete copies.

    ``os.walk`` would take twice as long.
    """
    paths, folders = [], [str(root)]
    while folders:
        folder = folders.pop()
        try:
            with os.scandir(folder) as listed:
                entries = [entry for entry in listed if not entry.name.startswith(".")]
        except OSError as error:
            outcome = LogOutcome("unreadable", f"the folder cannot be listed: {error.strerror}")
            refused.append(ParsedFile(Path(error.filename), outcome))
            continue
        paths += [entry.path for entry in entries if entry.name.endswith((*LOG_NAMES, OTHER_NAME))]
        folders += [entry.path for entry in entries if _is_folder(entry)]
    return paths


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:  # on a file system that does not list the types of entries
        return False


def _once(names: Iterable[str]) -> Iterator[tuple[str, os.stat_result | None]]:
    inodes: set[tuple[int, int]] = set()
    for name in sorted(names, key=lambda name: name.split("/")):
        try:
            status = os.lstat(name)
        except OSError:  # such as a file that vanished: reading it reports the error
            yield name, None
            continue
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in inodes:
                continue
            inodes.add((status.st_dev, status.st_ino))
        yield name, status


def _size_or_refusal(path: Path, status: os.stat_result | None) -> int | LogOutcome:
    name = path.name
    for pattern, kind, reason in _NAMES:
        if pattern.search(name):
            return LogOutcome(kind, reason)
    try:
        status = path.stat() if status is None or stat.S_ISLNK(status.st_mode) else status
    except OSError as error:
        barred = isinstance(error, PermissionError)  # then it is unknown whether the path is a link
        why = "it is a dangling link" if not barred and path.is_symlink() else error.strerror
        return LogOutcome("unreadable", f"{why}")
    if stat.S_ISREG(status.st_mode):
        return status.st_size
    return LogOutcome("unreadable", f"it is {'a directory' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}")


def parse_file(path: Path, rule: str) -> ParsedFile:
    """Parse a log; the default rule uses the window of a reference recipe's document."""
    document = document_of_log(path) if rule == DEFAULT_RULE else None
    documented = document.window if document else None
    try:
        with open_file(path) as stream:
            log = read_log(stream, "last" if documented == "last" else rule, path=path, documented=documented)
    except UsageError as error:
        cause = error.__cause__
        why = f"the file cannot be read: {cause.strerror}" if isinstance(cause, OSError) else error.what
        return ParsedFile(path, LogOutcome("unreadable", why))
    except OSError as error:
        return ParsedFile(path, LogOutcome("unreadable", f"the file cannot be read: {error.strerror}"))
    return ParsedFile(path, judge_log(log), not log.is_in_head or NCCL in log.head)


_BATCH_FILES = 64
_BATCHES_PER_WORKER = 8
_WORTH_A_POOL_FILES = 500
_WORTH_A_POOL_BYTES = 1 << 28
Content = TypeVar("Content")


def parse_logs(files: LogFiles, rule: str, workers: int) -> Iterator[ParsedFile]:
    """Yield the outcome of every file of ``files`` as soon as it is available."""
    yield from files.refused
    yield from read_in_parallel(files, partial(parse_file, rule=rule), workers)


def read_in_parallel(files: LogFiles, read: "partial[Content]", workers: int) -> Iterator[Content]:
    """Yield the result of ``read``, which must be picklable, for every log of ``files``, in no particular order."""
    if workers > 1 and _is_worth_a_pool(files):
        yield from _read_in_pool(files.logs, partial(_read_each, read=read), workers)
    else:
        yield from map(read, files.logs)


def _is_worth_a_pool(files: LogFiles) -> bool:
    if len(files.logs) < 2:
        return False
    return len(files.logs) >= _WORTH_A_POOL_FILES or files.total_bytes >= _WORTH_A_POOL_BYTES


def _read_in_pool(paths: Sequence[Path], read: "partial[list[Content]]", workers: int) -> Iterator[Content]:
    tasks = [partial(read, batch) for batch in _batches(paths, workers)]
    try:
        with start_tasks(tasks, workers) as batches:
            for future in as_completed(batches):
                yield from future.result()
    except BrokenProcessPool as error:
        raise EnvironmentProblem(
            "a process that was reading logs was killed, perhaps because no memory was left",
            do="read fewer logs at once or, in 'llmb parse', pass --jobs 1",
        ) from error


def _batches(paths: Sequence[Path], workers: int) -> list[Sequence[Path]]:
    count = max(_BATCHES_PER_WORKER * workers, math.ceil(len(paths) / _BATCH_FILES))
    return [paths[i::count] for i in range(min(count, len(paths)))]


def _read_each(paths: Sequence[Path], read: "partial[Content]") -> list[Content]:
    return list(map(read, paths))


_CONTEXT = multiprocessing.get_context("forkserver")
_SAFE_PATH = "PYTHONSAFEPATH"
Answer = TypeVar("Answer")


@contextmanager
def start_tasks(tasks: Sequence[Callable[[], Answer]], workers: int) -> Iterator[list[Future[Answer]]]:
    """Start picklable tasks, and yield their futures in order; they raise BrokenProcessPool if a worker is killed."""
    with _without_foreign_code():  # creating the pool starts a process that tracks its resources
        pool = ProcessPoolExecutor(workers, _CONTEXT, initializer=_begin_worker)
    try:
        with _without_foreign_code():
            futures = [pool.submit(task) for task in tasks]
        yield futures
    except (KeyboardInterrupt, GeneratorExit):
        for worker in multiprocessing.active_children():
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _without_foreign_code() -> Iterator[None]:
    """Prevent workers from importing modules of the working folder, such as ``types.py``, and rerunning the main
    script.
    """
    main, safe_path = sys.modules["__main__"], os.environ.get(_SAFE_PATH)
    sys.modules["__main__"], os.environ[_SAFE_PATH] = ModuleType("__main__"), "1"
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if safe_path is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = safe_path


def _begin_worker() -> None:
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent, "a worker has one"
    parent.join()
    os._exit(1)
