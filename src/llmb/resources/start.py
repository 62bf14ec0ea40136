# SPDX-License-Identifier: Apache-2.0
"""Starts and ends the process that samples a node."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SAMPLER = "llmb.resources.sampler"
OF_RANKS = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"})
"""Variables that who looks for the processes of a run's ranks goes by: a sampler is none."""
LAST_SAMPLE_S = 5.0
"""How long the last sample may take; without persistence mode a GPU's driver is slow."""
KILLED_S = 5.0
"""How long one that is killed may take to be gone."""


class Sampler:
    """A sampler that runs. It ends with the process that started it, if ``end`` is not called."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def end(self) -> None:
        """Waits for the last sample."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            self.process.stdin.write(b"\n")  # a process that was forked meanwhile may hold the pipe open
        self.process.stdin.close()
        try:
            self.process.wait(LAST_SAMPLE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that waits for a driver ends later
                self.process.wait(KILLED_S)


def start_sampler(file: Path, node: str, interval_s: float, device: str) -> Sampler | None:
    """None if no process can be started, which the run does without."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", SAMPLER, str(file), node, str(interval_s), device, str(os.getpid())],
            env={name: value for name, value in os.environ.items() if name not in OF_RANKS},
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return Sampler(process)
