# SPDX-License-Identifier: Apache-2.0
"""What the launcher does about processes that are stopped (SIGSTOP, a debugger): they cannot end by themselves."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from llmb.runs.stall import STALL

BETWEEN_S = 0.5


class StoppedChild:
    """Notices that a child of this process has been stopped for longer than ``limit_s``; 0 is no limit."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        self.process = process
        self.limit_s = limit_s
        self.since: float | None = None

    def line(self) -> str | None:
        """What to log, once it is too long."""
        if not self.limit_s or not hasattr(os, "waitid"):  # macOS has no such call
            return None
        status = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            self.since = None
            return None
        self.since = self.since or time.monotonic()
        if time.monotonic() - self.since < self.limit_s:
            return None
        who = f"the process that starts the workers, {self.process.pid} on {socket.gethostname()},"
        return f"{STALL}{who} has been stopped for {self.limit_s:.0f} s"


def wait_for_stopped(process: subprocess.Popen[bytes], family: Callable[[int], list[int]], seconds: float) -> None:
    """Waits for ``process`` while it ends its children. Stopped ones get the signal to end only when they go on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for pid in (process.pid, *family(process.pid)):
            signal_process(pid, signal.SIGCONT)
        try:
            process.wait(BETWEEN_S)
        except subprocess.TimeoutExpired:
            continue
        return


def signal_process(pid: int, number: signal.Signals) -> None:
    """Sends a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
