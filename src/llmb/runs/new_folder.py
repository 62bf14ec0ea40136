# SPDX-License-Identifier: Apache-2.0
"""A folder that nobody sees before it is whole."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmb.errors import EnvironmentProblem, UsageError
from llmb.runs.checkpoint import PARTIAL


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target``, which takes that name when the block ends, and is removed where the block fails.

    What an earlier attempt at the same target left behind, because it was killed, is removed first. Raises UsageError
    where ``target`` is taken, EnvironmentProblem where nothing can be written.
    """
    check_free(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.iterdir():
            if left.name.startswith(f".{target.name}.") and left.name.endswith(PARTIAL):
                shutil.rmtree(left)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
        partial.mkdir()
        try:
            yield partial
            for folder in partial.glob("**/"):
                flush_folder(folder)
            partial.rename(target)
            flush_folder(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        advice = "free some space, or give a folder on another disk"
        raise EnvironmentProblem(f"cannot write: {error.strerror}", where=str(target), do=advice) from error


def check_free(target: Path) -> None:
    """Raises UsageError where ``target`` is there already; an empty folder is taken over."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError("this is there already", where=str(target), do="give a new folder, or remove this one")


def flush_folder(path: Path) -> None:
    """Puts the names in a folder on disk; the files' content is flushed by who wrote it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
