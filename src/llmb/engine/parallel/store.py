# SPDX-License-Identifier: Apache-2.0
"""The store through which the ranks of a run find each other, and tell each other that they live.

On one node it is a file that only its user can open. On several, rank 0 listens at the address that the batch script
chose, on that address alone; keys begin with an id of the job, so that ranks of two jobs never take each other's.
"""

import errno
import ipaddress
import os
import resource
import socket
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from llmb.errors import EnvironmentProblem

STORE = "LLMB_STORE"
"""As llmb.processes.ranks sets it."""
STORE_ID = "LLMB_STORE_ID"
PATIENCE = timedelta(minutes=10)
UNTIL_REMOVED = -1
BACKLOG = 4096
"""Connections of ranks that come at once."""
FILES_PER_RANK = 4
"""Open files of the rank that hosts the store: connections of a rank's groups, heartbeat and NCCL, and a spare."""


def host_store() -> Store:
    """This rank's store, which rank 0 keeps for the others."""
    return connect(PATIENCE, hosts=os.environ["RANK"] == "0")


def connect(patience: timedelta, *, hosts: bool = False) -> Store:
    """A connection of its own to the store of the run."""
    file = os.environ.get(STORE)
    if file:
        return FileStore(file, UNTIL_REMOVED)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if hosts:
        check_open_files(int(os.environ["WORLD_SIZE"]))
    listener = listen(address, port).detach() if hosts else None
    store = TCPStore(
        address, port, is_master=hosts, wait_for_workers=False, master_listen_fd=listener, timeout=patience
    )
    return PrefixStore(os.environ.get(STORE_ID, ""), store)


def check_open_files(ranks: int) -> None:
    """Raises EnvironmentProblem where this process may not open as many files as the store of ``ranks`` ranks needs."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < FILES_PER_RANK * ranks:
        what = (
            f"rank 0 of {ranks} may open {limit} files, and needs {FILES_PER_RANK * ranks} for the others' connections"
        )
        do = f"raise the hard limit, {hard}, in /etc/security/limits.conf and slurmd's unit (LimitNOFILE)"
        raise EnvironmentProblem(what, do=do)


def store_host() -> str:
    """For people: what the ranks depend on for their store."""
    if STORE in os.environ:
        return f"the file system of {os.environ[STORE]}"
    return f"rank 0 at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"


def listen(address: str, port: int) -> socket.socket:
    """On ``address`` alone; on all interfaces only where this node does not know it as its own: it is translated, or
    its name means loopback to the node itself, as on Debian. Raises EnvironmentProblem if the port is in use."""
    try:
        family, _, _, _, (host, *_) = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        if _is_loopback(str(host)) and not _is_loopback(address):
            return _on_all(port)
        return socket.create_server((str(host), port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return _on_all(port)
        what = f"rank 0 cannot listen at {address}, port {port}, where the ranks meet: {error.strerror or error}"
        raise EnvironmentProblem(what, do="submit the job again: each chooses a port of its own") from error


def _on_all(port: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
