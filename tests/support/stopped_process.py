# SPDX-License-Identifier: Apache-2.0
"""Slows a process of one node and rank of a cluster on this machine, by stopping it for most of the time.

``python stopped_process.py NODE LOCAL_RANK WORDS``: every process whose command has WORDS, until this one is ended.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

STOPPED_S, RUNNING_S, LOOK_S = 0.19, 0.01, 0.5
STARTED_S = 3.0
"""Processor time after which a process has loaded torch, which is not to be slow."""


def matching(node: str, rank: str, words: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            variables = (folder / "environ").read_bytes().split(b"\0")
            own = f"SLURMD_NODENAME={node}".encode() in variables and f"SLURM_LOCALID={rank}".encode() in variables
            if own and words in command and _processor_s(folder) > STARTED_S:
                found.append(int(folder.name))
    return found


def _processor_s(folder: Path) -> float:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


if __name__ == "__main__":
    pids: list[int] = []
    looked_s = 0.0
    while True:
        if time.monotonic() - looked_s > LOOK_S:
            pids, looked_s = matching(*sys.argv[1:]), time.monotonic()
        send(pids, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        send(pids, signal.SIGCONT)
        time.sleep(RUNNING_S)
