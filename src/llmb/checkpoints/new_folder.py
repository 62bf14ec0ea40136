# SPDX-License-Identifier: Apache-2.0
"""Creates a folder that becomes visible only when it is complete."""

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from llmb.checkpoints.checkpoint import PARTIAL, partial_path
from llmb.errors import EnvironmentProblem, UsageError
from llmb.trust import check_links

LOCK = ".lock"


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder next to ``target``, renamed to ``target`` when the block ends, and removed if the block fails.

    Leftovers of an earlier attempt at the same target, which was killed, are removed first. Raises UsageError if
    ``target`` exists or is being written, EnvironmentProblem if writing fails.
    """
    with _as_problems(target), _locked_folder(target) as partial:
        try:
            _remove_others(target, partial)
            yield partial
            _rename(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def resumable_folder(target: Path, is_worth_keeping: Callable[[Path], object]) -> Iterator[Path]:
    """Like ``new_folder``, with what an earlier attempt left; kept on failure if ``is_worth_keeping`` says so."""
    with _as_problems(target), _resumed_folder(target) as partial:
        try:
            _remove_others(target, partial)
            yield partial
            _rename(partial, target)
        finally:
            if partial.exists() and not is_worth_keeping(partial):
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _as_problems(target: Path) -> Iterator[None]:
    check_links(target.parent)
    check_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        advice = "free some space, or give a folder on another disk"
        raise EnvironmentProblem(f"cannot write: {error.strerror}", where=str(target), do=advice) from error


def _rename(partial: Path, target: Path) -> None:
    for folder in partial.glob("**/"):
        flush_folder(folder)
    partial.rename(target)
    (target / LOCK).unlink()  # not before: without it, another process would take this for a leftover
    flush_folder(target.parent)


@contextmanager
def _resumed_folder(target: Path) -> Iterator[Path]:
    """The folder that every attempt at ``target`` uses, locked. Raises UsageError if a process is writing it."""
    partial = partial_path(target)
    partial.mkdir(exist_ok=True)
    try:
        lock = (partial / LOCK).open("w")
    except FileNotFoundError as error:  # whoever held the lock until now may have removed or renamed the folder
        raise _being_written(target) from error
    with lock:
        if not _lock(lock) or not _is_at(lock, partial / LOCK):
            raise _being_written(target)
        yield partial


def _is_at(stream: IO[str], path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat())


@contextmanager
def _locked_folder(target: Path) -> Iterator[Path]:
    """A new folder next to ``target``, with a lock that this process holds until the block ends, or it is killed.

    The folder gets the name by which others find it once it is locked.
    """
    unlocked = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    unlocked.mkdir()
    with (unlocked / LOCK).open("w") as lock:
        _lock(lock)
        yield unlocked.rename(f"{unlocked}{PARTIAL}")


def _remove_others(target: Path, own: Path) -> None:
    """Removes what killed processes left of ``target``. Raises UsageError if a process is writing it, or has."""
    for left in target.parent.iterdir():
        if left == own or not (left.name.startswith(f".{target.name}.") and left.name.endswith(PARTIAL)):
            continue
        try:
            lock = (left / LOCK).open("w")
        except FileNotFoundError:  # just now its process has completed or removed it
            continue
        with lock:
            if not _lock(lock):
                raise _being_written(target)
            if _is_at(lock, left / LOCK):  # else likewise
                shutil.rmtree(left)
    check_free(target)


def _being_written(target: Path) -> UsageError:
    do = "wait for it, end it, or give another folder"
    return UsageError("another llmb is writing to this folder", where=str(target), do=do)


def _lock(stream: IO[str]) -> bool:
    """False if another process holds the lock. On a file system without locks, none does."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def check_free(target: Path) -> None:
    """Raises UsageError if ``target`` exists; an empty folder is used."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError("this already exists", where=str(target), do="give a new folder, or remove this one")


def flush_folder(path: Path) -> None:
    """Flushes the names in a folder to disk; the content of files is flushed by their writers."""
    flush_file(path)


def flush_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
