# SPDX-License-Identifier: Apache-2.0
"""What the launcher does about processes that are stopped (SIGSTOP, a debugger): they cannot end by themselves."""

import socket
import subprocess
import time
from pathlib import Path

from llmb.processes.families import BETWEEN_S, family
from llmb.runs.stall import STALL

LONGEST_BETWEEN_S = 30.0
MARGIN_S = 10.0
"""How much longer workers may be stopped than their parent: the others report more about it, if there are others."""


class StoppedFamily:
    """Notices that ``process`` or a descendant has been stopped for longer than ``limit_s``; 0 is no limit."""

    def __init__(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        self.process = process
        self.limit_s = limit_s
        self.between_s = min(max(limit_s / 10, BETWEEN_S), LONGEST_BETWEEN_S)
        self.looked = time.monotonic()
        self.since: dict[int, float] = {}

    def line(self) -> str | None:
        """What to log, once it is too long."""
        now = time.monotonic()
        if not self.limit_s or now - self.looked < self.between_s:
            return None
        self.looked = now
        stopped = [pid for pid, state in family(self.process.pid).items() if state.startswith("T")]
        self.since = {pid: self.since.get(pid, now) for pid in stopped}
        for pid, since in self.since.items():
            limit_s = self.limit_s + (0 if pid == self.process.pid else MARGIN_S)
            if now - since > limit_s:
                who = "the process that starts the workers" if pid == self.process.pid else _rank(pid)
                seconds = f"{now - since:.0f} s (process {pid})"
                return f"{STALL}{who} on {socket.gethostname()} has been stopped for {seconds}"
        return None


def _rank(pid: int) -> str:
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except OSError:
        variables = []
    return next((f"rank {item[5:]}" for item in variables if item.startswith("RANK=")), "a worker")
