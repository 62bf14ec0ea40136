# SPDX-License-Identifier: Apache-2.0
"""Kills the processes of a cluster when whoever started it is gone, killed perhaps.

``python slurm_reaper.py ROOT``: ROOT is the cluster's folder; standard input ends when the starting process does.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STEP_DAEMON = "slurmstepd"
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "mariadbd", "munged", STEP_DAEMON)


def processes_of(root: Path) -> Iterator[Path]:
    """The daemons of a cluster, below /proc. A step daemon holds its node's log open, its command line may say less."""
    for proc in Path("/proc").iterdir():
        try:
            if proc.name.isdigit() and (proc / "comm").read_text().strip() in DAEMONS and _is_below(root, proc):
                yield proc
        except OSError:
            continue  # it ended while we looked, or is somebody else's


def _is_below(root: Path, proc: Path) -> bool:
    named = (proc / "cmdline").read_text().split("\0")
    return any(str(root) in name for name in (*named, *_open_files(proc)))


def _open_files(proc: Path) -> Iterator[str]:
    for handle in (proc / "fd").iterdir():
        with suppress(FileNotFoundError):  # a daemon opens and closes connections while we look
            yield str(handle.readlink())


def kill_processes_of(root: Path) -> None:
    """With the tasks that step daemons lead, each in a group of its own."""
    for proc in list(processes_of(root)):
        try:
            is_step = (proc / "comm").read_text().strip() == STEP_DAEMON
            children = (proc / "task" / proc.name / "children").read_text().split() if is_step else []
            os.kill(int(proc.name), signal.SIGKILL)
        except OSError:
            continue
        for child in children:
            try:
                os.killpg(int(child), signal.SIGKILL)
            except OSError:
                continue


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    kill_processes_of(Path(sys.argv[1]))
