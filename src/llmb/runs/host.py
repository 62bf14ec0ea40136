# SPDX-License-Identifier: Apache-2.0
"""The name of this machine, and the kinds of device that it trains on."""

import os
import socket
from typing import Literal

Device = Literal["cpu", "cuda"]


def host_name() -> str:
    """The scheduler's name for this node, which its commands accept, else the hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
