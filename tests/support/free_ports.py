# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that a test starts."""

import itertools
import random
import socket

PORTS = range(21_000, 32_000)
"""Below those that the kernel hands out, and above those of jobs, which add the job's id to 20000: what runs beside the
test takes none of them before the server does."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; chosen by chance, as other processes look for some, too."""
    chance = random.SystemRandom()
    free = (port for port in chance.sample(PORTS, len(PORTS)) if _is_free(port))
    return list(itertools.islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
