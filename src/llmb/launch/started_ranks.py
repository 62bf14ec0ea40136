# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher has started, such as torchrun, mpirun or a Kubernetes TrainJob: each runs ``llmb run``.

Rank 0 plans the run, creates its folder and writes its record; the other ranks receive the folder's path through the
store of torch.distributed; all train.
"""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from llmb.base.errors import RunFailed, UsageError, UserInterrupt
from llmb.base.processes import Interrupted, started_program
from llmb.base.secrets import without_secrets
from llmb.launch.jobspec.job_options import Binding
from llmb.launch.ranks import bind_words, how_it_ended

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
JOIN = "llmb.engine.join"
"""The program with which ranks other than 0 receive the run folder's path and train, bound if rank 0 is."""
STORE_ID = "LLMB_STORE_ID"
RANK_VARIABLES = "LLMB_RANK_VARIABLES"
"""Variable with the names of the variables that rank 0 sends to the other ranks."""
RUN_ID, RESTART, AGENT = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True, slots=True)
class StartedRank:
    """This process as a rank that another launcher started."""

    rank: int
    world_size: int
    master: str


def started_rank(environ: Mapping[str, str]) -> StartedRank | None:
    """Return this rank; None if ``llmb run`` starts the ranks. Raise UsageError if a variable is missing or invalid."""
    if not all(environ.get(name) for name in ("RANK", "WORLD_SIZE")):
        return None
    if missing := [name for name in VARIABLES if not environ.get(name)]:
        what = f"RANK and WORLD_SIZE are set, as for ranks that another launcher starts, but not {', '.join(missing)}"
        raise UsageError(what, do="set all of these, or unset RANK and WORLD_SIZE so that 'llmb run' starts the ranks")
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        if not (0 <= rank < world_size and int(environ["LOCAL_RANK"]) >= 0 and 0 < int(environ["MASTER_PORT"]) < 65536):
            raise ValueError
    except ValueError as error:
        values = ", ".join(f"{name} is '{environ[name]}'" for name in VARIABLES)
        do = "set RANK to a value from 0 to WORLD_SIZE - 1, LOCAL_RANK to 0 or more, and MASTER_PORT to a port"
        raise UsageError(f"the variables of this rank are invalid: {values}", do=do) from error
    return StartedRank(rank, world_size, environ["MASTER_ADDR"])


def rank_variables(rank: StartedRank, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rank lacks: an id for torch's store and, if the master is local, the loopback
    interface."""
    words = {STORE_ID: f"llmb-{environ.get(RUN_ID, '')}-{environ.get(RESTART, '')}"}
    if rank.master.startswith("127.") or rank.master in ("localhost", "::1"):
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        words |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
    return {name: value for name, value in words.items() if name not in environ}


def join_run(rank: StartedRank, environ: Mapping[str, str]) -> None:
    """Train as a rank other than 0, with output to stderr; raise RunFailed on failure, UserInterrupt on a signal."""
    command = (sys.executable, "-P", "-m", JOIN, *bind_words(Binding().arguments(gpus=True, workers=rank.world_size)))
    own = {**without_secrets(environ), **rank_variables(rank, environ)}
    try:
        with started_program(command, sys.stderr.fileno(), subprocess.STDOUT, own) as process:
            code = process.wait()
    except Interrupted as signal:
        raise UserInterrupt(f"rank {rank.rank} was ended by {signal}") from signal
    if code:
        what = f"rank {rank.rank} of {rank.world_size} {how_it_ended(code)}"
        raise RunFailed(what, do="see the output above, and rank 0's")
