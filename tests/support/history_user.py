# SPDX-License-Identifier: Apache-2.0
"""Uses the history of an install root as commands do: ``history_user.py keep ROOT KEY``, ``history_user.py read ROOT``.

``as_user`` does the same as another user of this machine.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from job_rows import job_row

import llmb.jobs.history  # noqa: F401 (another user may not be able to read what would be imported later)
from llmb.base.errors import LlmbError
from llmb.jobs.history import open_history, read_history


def keep(root: Path, key: str) -> str:
    """Adds a job as a command does that queues one; the error, if there is one."""
    try:
        with open_history(root, print) as store:
            store.add([job_row(key, run_dir=f"/runs/e/e_{key}/e")])
    except LlmbError as error:
        return f"{type(error).__name__}: {error.what}"
    return ""


def read(root: Path) -> str:
    """The keys of all jobs as a command sees them that lists jobs."""
    with read_history(root, print) as store:
        return " ".join(job.key for job in store.jobs())


def as_user(user: int, groups: Sequence[int], umask: int, action: Callable[[], str]) -> str:
    """What ``action`` returns when ``user`` calls it; it cannot import anything. Needs root."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "the child failed"
        try:
            os.setgroups(groups)
            os.setgid(user)
            os.setuid(user)
            os.umask(umask)
            text = action()
        except BaseException as error:  # noqa: BLE001 (a child of a test must end here, and say why)
            text = repr(error)
        finally:
            os.write(there, text.encode())
            os._exit(0)
    os.close(there)
    with os.fdopen(here, "rb") as stream:
        text = stream.read().decode()
    os.waitpid(pid, 0)
    return text


if __name__ == "__main__":
    command, folder, *keys = sys.argv[1:]
    print(read(Path(folder)) if command == "read" else keep(Path(folder), *keys))
