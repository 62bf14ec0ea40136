# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb.base.parent_death PARENT COMMAND...`` becomes COMMAND, which Linux kills when process PARENT ends. A
``preexec_fn`` could deadlock."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PARENT_DEATH = "llmb.base.parent_death"
PR_SET_PDEATHSIG = 1
GONE = 1


def ending_with_this(command: Sequence[str]) -> list[str]:
    """Return ``command`` with a prefix that, on Linux, keeps it from outliving this process."""
    return [sys.executable, "-P", "-m", PARENT_DEATH, str(os.getpid()), *command]


def end_with_parent() -> None:
    """On Linux, have this process killed when the thread that started it ends; exec keeps this, fork does not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return True if a process has ended; on Linux, even if its parent has not yet waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended just now, or this is not Linux
        return sys.platform == "linux"
    return state in "ZX"


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent()
    if has_ended(parent):  # before the request to the kernel
        sys.exit(GONE)
    os.execvp(command[0], command)  # noqa: S606 (a list, never a shell)


if __name__ == "__main__":
    main()
