# SPDX-License-Identifier: Apache-2.0
"""Makes NCCL write the logs and topology that llmb needs
(https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-debug)."""

import os
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

from llmb.base.input_files import open_regular
from llmb.readers.nccl.nccl_network import MOST_BYTES, beginning
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.trace_reports import nccl_log, network_log

LEVEL, SUBSYSTEMS, FILE = "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"
TOPOLOGY = "NCCL_TOPO_DUMP_FILE"
OF_NETWORK = ("INIT", "NET")
OF_COLLECTIVES = ("INIT", "COLL")
NCCL_DEFAULT = "INIT,BOOTSTRAP,ENV"
"""Subsystems that NCCL logs without NCCL_DEBUG_SUBSYS."""
BRIEF = ("VERSION", "WARN")
DETAILED = ("INFO", "ABORT", "TRACE")


def ask_for_topology(plan: Plan, folder: RunFolder) -> None:
    """Make NCCL write the first node's topology to the run folder, unless the user has named a file."""
    # NCCL writes it in every process that is the first of a group; one process per file.
    if plan.device == "cuda" and _rank() == 0 and not nccl_setting(TOPOLOGY):
        os.environ[TOPOLOGY] = str(folder.nccl_topology)


def ask_for_nccl_log(plan: Plan, folder: RunFolder) -> Path | None:
    """Request NCCL's log of collectives or the network; return the user's log file if NCCL writes there, else None."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The first rank of one of several nodes.
    speaks = plan.device == "cuda" and several and os.environ.get("LOCAL_RANK") == "0"
    if plan.nccl_trace:
        wanted = os.environ.get(SUBSYSTEMS) or ",".join(OF_COLLECTIVES)
        _log_to(nccl_log(folder, _rank()), _with(wanted, OF_NETWORK) if speaks else wanted)
        return None
    return _ask_for_network(folder) if speaks else None


def _ask_for_network(folder: RunFolder) -> Path | None:
    level = nccl_setting(LEVEL).upper()
    if level not in (*BRIEF, *DETAILED):
        _log_to(network_log(folder, _rank()), ",".join(OF_NETWORK))
        return None
    if level in BRIEF:  # warnings are logged whatever the subsystems
        os.environ.update({LEVEL: "INFO", SUBSYSTEMS: ",".join(OF_NETWORK)})
    else:
        os.environ[SUBSYSTEMS] = _with(nccl_setting(SUBSYSTEMS, NCCL_DEFAULT), OF_NETWORK)
    if level == "VERSION":  # for which NCCL opens no file
        os.environ[FILE] = ""
    pattern = nccl_setting(FILE)
    # NCCL's placeholders: the host name without its domain, and the process ID.
    named = pattern.replace("%h", socket.gethostname().partition(".")[0]).replace("%p", str(os.getpid()))
    return Path(named.replace("%%", "%")) if pattern else None


def _log_to(log: Path, subsystems: str) -> None:
    log.parent.mkdir(exist_ok=True)
    os.environ.update({LEVEL: "INFO", SUBSYSTEMS: subsystems, FILE: str(log).replace("%", "%%")})


def _rank() -> int:
    return int(os.environ["RANK"])


def nccl_setting(name: str, default: str = "") -> str:
    """Look up a setting in the environment, then in NCCL's configuration files."""
    if name in os.environ:
        return os.environ[name]
    own = os.environ.get("NCCL_CONF_FILE") or Path(os.environ.get("HOME", "/"), ".nccl.conf")
    for path in (Path(own), Path("/etc/nccl.conf")):
        try:
            with open_regular(path) as stream:
                text = stream.read(MOST_BYTES).decode(errors="replace")
        except OSError:
            continue
        for key, _, value in (line.strip().partition("=") for line in text.splitlines()):
            if key == name:
                return value
    return default


def _with(subsystems: str, more: Iterable[str]) -> str:
    """Return the list of subsystems with ``more`` enabled; a list that begins with ``^`` excludes its members."""
    listed = [name for name in subsystems.removeprefix("^").split(",") if name]
    names = {name.upper() for name in listed}
    if not subsystems.startswith("^"):
        return ",".join([*listed, *(name for name in more if name not in names and "ALL" not in names)])
    left = [name for name in listed if name.upper() not in more]
    return f"^{','.join(left)}" if left else "ALL"


def keep_network_lines(log: Path | None, folder: RunFolder) -> None:
    """Copy NCCL's lines, except those about collectives, from the start of the user's log to the run folder."""
    if log is None:
        return
    kept = network_log(folder, _rank())
    try:
        kept.parent.mkdir(exist_ok=True)
        with open_regular(log) as source, kept.open("wb") as target:
            for text in beginning(source):
                lines = text.splitlines(keepends=True)
                target.writelines(line for line in lines if b"NCCL " in line and b"opCount" not in line)
    except OSError as error:
        sys.stderr.write(f"llmb: NCCL's output about the network was not saved: {error.strerror} ({log})\n")
