# SPDX-License-Identifier: Apache-2.0
"""This machine: its name, the CPU cores that this process may use, and the kinds of device that it trains on."""

import os
import socket
from typing import Literal

Device = Literal["cpu", "cuda"]


def host_name() -> str:
    """The scheduler's name for this node, which its commands accept, else the hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
