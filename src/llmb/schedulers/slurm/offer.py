# SPDX-License-Identifier: Apache-2.0
"""What Slurm offers this user: accounts, and partitions with their nodes and GPUs."""

import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from llmb.errors import InfrastructureError
from llmb.schedulers.port import Offer, Partition
from llmb.schedulers.slurm.client import call, message
from llmb.schedulers.slurm.hostlist import expand

SINFO = ("sinfo", "--noheader", "--format=%P|%D|%G|%N")
"""One line for each group of equal nodes of a partition."""
SAMPLE = 5
"""Nodes of a partition whose architecture is looked at."""
_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[A-Za-z][\w-]*))?:(?P<count>\d+)")
_NODE = re.compile(r"\bNodeName=(\S+)")
_ARCHITECTURE = re.compile(r"\bArch=(\S+)")


def slurm_offer() -> Offer:
    """Raises InfrastructureError where Slurm does not answer, EnvironmentProblem if it is not on this machine."""
    done = call(SINFO)
    if done.code:
        raise InfrastructureError(f"sinfo failed: {message(done)}", do="try again, or see 'scontrol ping'")
    groups = _groups(done.text)
    accounts, default = _accounts()
    return Offer(partitions=partitions(groups, _architectures(groups)), accounts=accounts, default_account=default)


def _groups(text: str) -> list[tuple[str, int, str, str]]:
    """Partition, number of nodes, generic resources and nodes of each line of sinfo."""
    found = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 4 and parts[1].isdecimal():
            found.append((parts[0], int(parts[1]), parts[2], parts[3]))
    return found


def partitions(groups: Iterable[tuple[str, int, str, str]], architectures: Mapping[str, str]) -> tuple[Partition, ...]:
    """GPUs and architecture are those that most of a partition's nodes have. Pure."""
    by_name: dict[str, list[tuple[int, str, str]]] = {}
    for name, count, gres, nodes in groups:
        by_name.setdefault(name, []).append((count, gres, nodes))
    return tuple(_partition(name, lines, architectures) for name, lines in by_name.items())


def _partition(name: str, lines: Sequence[tuple[int, str, str]], architectures: Mapping[str, str]) -> Partition:
    gpus: Counter[tuple[int | None, str | None]] = Counter()
    kinds: Counter[str] = Counter()
    for count, gres, nodes in lines:
        gpus[_gpus(gres)] += count
        kinds.update(architectures[node] for node in islice(expand(nodes), SAMPLE) if node in architectures)
    gpus_per_node, gres_type = gpus.most_common(1)[0][0]
    return Partition(
        name=name.removesuffix("*"),
        is_default=name.endswith("*"),
        nodes=sum(count for count, _, _ in lines),
        gpus_per_node=gpus_per_node,
        gres_type=gres_type,
        architecture=kinds.most_common(1)[0][0] if kinds else None,
    )


def _gpus(gres: str) -> tuple[int | None, str | None]:
    """Number and type of the GPUs in text such as ``gpu:h100:8(S:0-1),nvme:2``; of several types the sum."""
    found = list(_GPUS.finditer(gres))
    if not found:
        return None, None
    types = {match["type"] for match in found}
    return sum(int(match["count"]) for match in found), types.pop() if len(types) == 1 else None


def _architectures(groups: Iterable[tuple[str, int, str, str]]) -> dict[str, str]:
    """Of a sample of nodes, by name; the controller knows those of nodes that have registered."""
    sample = dict.fromkeys(node for _, _, _, nodes in groups for node in islice(expand(nodes), SAMPLE))
    if not sample:
        return {}
    done = call(["scontrol", "show", "node", "--oneliner", ",".join(sample)])
    found = {}
    for line in done.text.splitlines():
        node, architecture = _NODE.search(line), _ARCHITECTURE.search(line)
        if node and architecture:
            found[node[1]] = architecture[1]
    return found


def _accounts() -> tuple[tuple[str, ...] | None, str | None]:
    """This user's accounts and the default one; None where Slurm keeps none, or its database does not answer."""
    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
        query = ["sacctmgr", "--noheader", "--parsable2", "show"]
        mine = call([*query, "assoc", f"user={user}", "format=account"])
        default = call([*query, "user", user, "format=defaultaccount"])
    except (KeyError, InfrastructureError):
        return None, None
    if mine.code or default.code:
        return None, None
    names = tuple(dict.fromkeys(filter(None, mine.text.split())))
    return names, next(iter(default.text.split()), None)
