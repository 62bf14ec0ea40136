# SPDX-License-Identifier: Apache-2.0
"""Starts a program that does not outlive the process that started it, even if it is stopped and cannot end by itself.

``python -m llmb.runs.parent_death PARENT COMMAND...`` becomes COMMAND; PARENT is the id of the starting process. On
Linux the kernel then kills it when the parent ends. This is done in the new process: code between fork and exec could
deadlock if the parent has threads.
"""

import ctypes
import os
import signal
import sys

PARENT_DEATH = "llmb.runs.parent_death"
PR_SET_PDEATHSIG = 1
GONE = 1


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends. Kept by exec, but not by fork."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    end_with_parent()
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        sys.exit(GONE)  # it ended before the kernel was asked
    os.execvp(command[0], command)  # noqa: S606 (a list, never a shell)


if __name__ == "__main__":
    main()
