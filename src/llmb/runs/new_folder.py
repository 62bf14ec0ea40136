# SPDX-License-Identifier: Apache-2.0
"""Creates a folder that becomes visible only when it is complete."""

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
    """A folder next to ``target``, renamed to ``target`` when the block ends, and removed if the block fails.

    Leftovers of an earlier attempt at the same target, which was killed, are removed first. Raises UsageError if
    ``target`` exists, EnvironmentProblem if writing fails.
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
    """Raises UsageError if ``target`` exists; an empty folder is used."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError("this already exists", where=str(target), do="give a new folder, or remove this one")


def flush_folder(path: Path) -> None:
    """Flushes the names in a folder to disk; the content of files is flushed by their writers."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
