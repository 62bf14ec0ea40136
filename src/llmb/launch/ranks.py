# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of this node, and ends them all when one fails.

``python -m llmb.launch.ranks NODES RANKS_PER_NODE COMMAND...`` replaces torch.distributed.run. It does not load torch
or use torch's store, which listens on all interfaces and unpickles data from any client. Ranks on one node
connect through a file that only their user can open; on several nodes, rank 0 listens at MASTER_ADDR and MASTER_PORT.
"""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from llmb.base.processes import ENDING
from llmb.base.scratch import scratch_folder
from llmb.readers.samples.host import host_name, usable_cores

STORE = "LLMB_STORE"
"""Variable with the path of the file through which the ranks of a single node connect."""
GRACE_S = 10.0
"""Seconds that ranks have to end after a request before they are killed."""
TOGETHER_S = 0.5
"""Seconds after the first failure in which other ranks may end on their own."""
MOST_FILES = 65_536
"""The soft limit of open files to set, if the hard limit allows; a higher limit slows programs that close all files."""
BIND = "llmb.launch.bind"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
FAILED = 1
Process = subprocess.Popen[bytes]


def words(nodes: int | str, per_node: int) -> tuple[str, ...]:
    """Return the words that start this module, to put between an interpreter and the ranks' command."""
    return ("-P", "-m", "llmb.launch.ranks", nodes if isinstance(nodes, str) else str(nodes), str(per_node))


def bind_words(arguments: tuple[str, str] | None) -> tuple[str, ...]:
    """Return the words before a rank's command that bind the rank to cores and memory; none without ``arguments``."""
    return (sys.executable, "-P", "-m", BIND, *arguments) if arguments else ()


def variables(nodes: int, per_node: int, local_rank: int, store: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a rank's environment for torch.distributed; on a single node, the default is the loopback interface."""
    node = int(environ["SLURM_NODEID"]) if nodes > 1 else 0
    words = {
        # By default, the compiler of each rank starts processes for all cores of the node.
        "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, usable_cores() // per_node)),
        **environ,
        "RANK": str(node * per_node + local_rank),
        "WORLD_SIZE": str(nodes * per_node),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(node),
    }
    if nodes > 1:
        return words
    return {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": f"={LOOPBACK}",
        **words,
        "MASTER_ADDR": "127.0.0.1",
        STORE: store,
    }


def allow_open_files() -> None:
    """Raise the soft limit of open files, often 1,024, because the number of sockets grows with the ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def run(nodes: int, per_node: int, command: Sequence[str], store: str) -> int:
    """Run the ranks of this node; return 0 if all succeeded, 1 if any failed, or 128 + a received signal's number."""
    arrivals = _arrivals()
    ranks = {}
    for local_rank in range(per_node):
        environ = variables(nodes, per_node, local_rank, store, os.environ)
        # Each rank has a session of its own, so that its child processes end with it.
        process = subprocess.Popen(command, env=environ, start_new_session=True)
        ranks[process] = int(environ["RANK"])
    code = _wait(ranks, arrivals)
    _end([rank for rank in ranks if rank.poll() is None], arrivals)
    return code


def _arrivals() -> int:
    """Open a pipe that receives the numbers of signals: SIGCHLD when a rank ends, others to request that all end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, *ENDING):
        signal.signal(number, lambda *_: None)
    return reader


def _wait(ranks: Mapping[Process, int], arrivals: int) -> int:
    """Wait until all ranks have ended, until shortly after one has failed, or for a signal; return the exit code.
    All ranks that fail in that time are reported, because the first that is noticed may not have failed first."""
    running, code, end = list(ranks), 0, None
    while running and (end is None or time.monotonic() < end):
        arrived = end is None or select.select([arrivals], [], [], max(0.0, end - time.monotonic()))[0]
        seen = os.read(arrivals, 512) if arrived else b""
        if requested := next((number for number in seen if number in ENDING), None):
            return 128 + requested
        for rank in [rank for rank in running if rank.poll() is not None]:
            running.remove(rank)
            if rank.returncode:
                sys.stderr.write(f"llmb: rank {ranks[rank]} on {host_name()} {how_it_ended(rank.returncode)}\n")
                code, end = FAILED, end or time.monotonic() + TOGETHER_S
        sys.stderr.flush()
    return code


def _end(ranks: Sequence[Process], arrivals: int) -> None:
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped rank ends once it is continued
        _send(ranks, number)
    end = time.monotonic() + GRACE_S
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
        if select.select([arrivals], [], [], end - time.monotonic())[0]:
            os.read(arrivals, 512)
    _send(ranks, signal.SIGKILL)


def _send(ranks: Sequence[Process], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.poll() is None:
            try:
                os.killpg(rank.pid, number)
            except ProcessLookupError:
                continue  # it has just ended


def how_it_ended(code: int) -> str:
    """Describe how a process ended, from its exit code (negative for a signal)."""
    if code > 0:
        return f"ended with exit code {code}"
    names = {item.value: item.name for item in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


def main(nodes: str, per_node: str, *command: str) -> None:
    allow_open_files()
    try:
        with scratch_folder("llmb-ranks-") as folder:
            code = run(int(nodes), int(per_node), command, f"{folder}/store")
    except OSError as error:
        sys.exit(f"llmb: node {host_name()} failed: the ranks could not be started: {error}")
    sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
