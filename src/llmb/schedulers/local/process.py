# SPDX-License-Identifier: Apache-2.0
"""Identifies the process of a job, so that a later one with the same pid is never mistaken for it."""

import os
import socket
from pathlib import Path

from llmb.runs.record import Process
from llmb.tools import ask_program

BOOT = Path("/proc/sys/kernel/random/boot_id")
PS_LIMIT_S = 30
START_FIELD = 19
"""Of /proc/<pid>/stat behind the name: ticks since the boot."""


def this_process() -> Process:
    pid = os.getpid()
    return Process(host=socket.gethostname(), pid=pid, started=started(pid) or "")


def is_here(process: Process) -> bool:
    return process.host == socket.gethostname()


def is_alive(process: Process) -> bool:
    """Of a process of this machine."""
    return started(process.pid) == process.started


def started(pid: int) -> str | None:
    """When a process of this machine was started; None for one that is not there, or has ended."""
    stat = Path(f"/proc/{pid}/stat")
    if not Path("/proc/self/stat").exists():
        listing = ["ps", "-o", "lstart=", "-p", str(pid)]
        return ask_program(listing, PS_LIMIT_S).text.strip() or None
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return None
    boot = BOOT.read_text().strip() if BOOT.exists() else ""
    return None if fields[0] in ("Z", "X") else f"{fields[START_FIELD]} {boot}"
