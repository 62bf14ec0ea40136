# SPDX-License-Identifier: Apache-2.0
"""The states of many nodes, with one call of Slurm."""

import re

from llmb.errors import InfrastructureError, UsageError, unknown
from llmb.schedulers.port import NodeState
from llmb.schedulers.slurm.client import call, message
from llmb.schedulers.slurm.hostlist import compress, expand
from llmb.schedulers.slurm.setup import parse_node

_NODE = re.compile(r"\bNodeName=(\S+)")
ABSENT = "not found"


def read_nodes(listed: str | None, partition: str | None, time_out_s: float) -> dict[str, NodeState]:
    """In the order of the list. Raises UsageError for text that is not a list, and for nodes or partitions that are
    not of this cluster; InfrastructureError if Slurm does not answer, EnvironmentProblem on a machine without Slurm."""
    wanted = _listed(listed) if listed is not None else _of_partition(partition, time_out_s)
    names = list(dict.fromkeys(wanted))
    done = call(["scontrol", "--oneliner", "show", "node", compress(names)], time_out_s=time_out_s)
    found = parse_nodes(done.text)
    if missing := [name for name in names if name not in found]:
        if done.code and ABSENT not in f"{done.errors}{done.text}":
            raise InfrastructureError(f"Slurm does not show its nodes: {message(done)}", do="try again")
        do = "'sinfo -N' lists the nodes of this cluster"
        raise UsageError(f"this cluster has no node {compress(missing)}", do=do)
    return {name: found[name] for name in names}


def _listed(text: str) -> list[str]:
    do = "give a list as Slurm does, such as node[1-4,7],login1"
    try:
        names = expand(text)
    except ValueError as error:
        raise UsageError(f"'{text}' is no list of nodes: {error}", do=do) from error
    if bad := next((name for name in names if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)), None):
        raise UsageError(f"'{bad}' is not the name of a node", do=do)
    if not names:
        raise UsageError("the list of nodes is empty", do=do)
    return names


def _of_partition(partition: str | None, time_out_s: float) -> list[str]:
    done = call(["sinfo", "--noheader", "--format=%R|%N"], time_out_s=time_out_s)
    if done.code:
        raise InfrastructureError(f"sinfo failed: {message(done)}", do="try again, or see 'scontrol ping'")
    rows = [line.partition("|")[::2] for line in done.text.splitlines() if "|" in line]
    if partition and partition not in {name for name, _ in rows}:
        raise unknown("partition", partition, sorted({name for name, _ in rows}))
    return [node for name, nodes in rows if partition in (None, name) for node in expand(nodes.strip())]


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Of ``scontrol --oneliner show node``, by name."""
    found = {}
    for line in text.splitlines():
        name, state = _NODE.search(line), parse_node(line)
        if name and state:
            found[name[1]] = state
    return found
