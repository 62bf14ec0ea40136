# SPDX-License-Identifier: Apache-2.0
"""What a machine is called."""

import os
import socket


def host_name() -> str:
    """The scheduler's name for this node, which its commands take, else the machine's own."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
