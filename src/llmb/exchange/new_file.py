# SPDX-License-Identifier: Apache-2.0
"""Files that appear when they are complete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.runs.folder import check_regular


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to; the file replaces ``path`` at the end, and is removed after an error.

    Raises EnvironmentProblem if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        check_regular(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        what, do = f"cannot write: {error.strerror or error}", "free some space there, or name another place"
        raise EnvironmentProblem(what, where=str(path), do=do) from error
    finally:
        with suppress(OSError):
            partial.unlink()
