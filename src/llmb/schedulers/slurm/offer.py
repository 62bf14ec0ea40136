# SPDX-License-Identifier: Apache-2.0
"""What Slurm offers this user: accounts, and partitions with their nodes, from its lists of hosts, and GPUs."""

import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice

from llmb.catalogue.resolve import CPU
from llmb.errors import InfrastructureError, UsageError, unknown
from llmb.options.option import parse_ranges
from llmb.schedulers.installer import Offer, Partition
from llmb.schedulers.port import NodeState
from llmb.schedulers.slurm.client import call, message
from llmb.schedulers.slurm.settings import SlurmSettings
from llmb.schedulers.slurm.setup import parse_node, read_gpus

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_NODE = re.compile(r"\bNodeName=(\S+)")
ABSENT = "not found"
SINFO = ("sinfo", "--noheader", "--format=%P|%D|%G|%N")
"""One line for each group of equal nodes of a partition."""
SAMPLE = 5
"""Nodes of a partition whose architecture is looked at."""
_ARCHITECTURE = re.compile(r"\bArch=(\S+)")


def expand(hosts: str | None) -> list[str]:
    """Every name of the list; empty for none. Raises ValueError."""
    if re.search(r"[\[\]]", _BRACKET.sub("", hosts or "")):
        raise ValueError("a bracket lacks its other one")
    return [name for part in _PART.findall(hosts or "") for name in _names(part)]


def nodelist_warnings(listed: str | None, nodes: int) -> Iterator[str]:
    """For a list of nodes that a job of ``nodes`` nodes cannot have; nothing for a file or a damaged list."""
    if listed is None or "/" in listed:
        return
    with suppress(ValueError):
        if (count := len({*expand(listed)})) > nodes:
            yield f"--nodelist names {count} nodes, and the job has {nodes}: Slurm will reject it"


def compress(names: Iterable[str]) -> str:
    """The names as one list, sorted, each of them once; ``node1``, ``node2`` as ``node[1-2]``."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        found = _NUMBERED.fullmatch(name)
        head, digits, tail = found.groups() if found else (name, "", "")
        numbers.setdefault((head, tail), set()).add(digits)
    return ",".join(part for (head, tail), found in sorted(numbers.items()) for part in _families(head, tail, found))


def _families(head: str, tail: str, numbers: set[str]) -> Iterator[str]:
    """Numbers of as many digits as one with leading zeros have leading zeros, too."""
    padded = {len(digits) for digits in numbers if len(digits) > 1 and digits.startswith("0")}
    for width in (0, *sorted(padded)):
        own = {int(digits) for digits in numbers if digits and (len(digits) if len(digits) in padded else 0) == width}
        if own:
            yield _family(head, width, tail, sorted(own))
    if "" in numbers:
        yield head + tail


def _family(head: str, width: int, tail: str, numbers: list[int]) -> str:
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    spans = [f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs]
    return f"{head}{spans[0]}{tail}" if len(numbers) == 1 else f"{head}[{','.join(spans)}]{tail}"


def _names(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if not bracket:
        yield part
        return
    for span in parse_ranges(bracket[1]):
        for number in span.numbers:
            head = f"{part[: bracket.start()]}{number:0{span.width}d}"
            for tail in _names(part[bracket.end() :] or ""):
                yield head + tail


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
        raise UsageError(f"'{text}' is not a list of nodes: {error}", do=do) from error
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
    """Parses ``scontrol --oneliner show node``: nodes by name."""
    found = {}
    for line in text.splitlines():
        name, state = _NODE.search(line), parse_node(line)
        if name and state:
            found[name[1]] = state
    return found


def site_partition(settings: SlurmSettings, gpu_type: str | None) -> str | None:
    """The cluster's partition for a job that names none: the default, unless another one is for its GPU type."""
    if gpu_type == CPU:
        return settings.cpu_partition or settings.partition
    known = settings.types_of(settings.partition)
    if gpu_type is None or not settings.partitions or gpu_type in known.values():
        return settings.partition
    others = [name for name, partition in settings.partitions.items() if partition.gpu_type == gpu_type]
    if settings.partition is None or known:
        return ",".join(others) or settings.partition
    return settings.partition


def gpu_type_within(settings: SlurmSettings, partition: str | None, asked: str | None, site: str | None) -> str | None:
    """The GPU type of a job in ``partition``, which is None where the job names none: the ``asked`` one, else the
    partition's, else the ``site``'s.

    Raises UsageError where the partition does not have it, or where several partitions have different ones.
    """
    if asked == CPU:
        return asked
    named = partition or settings.partition
    known = settings.types_of(named)
    if asked is None:
        if len(set(known.values())) > 1:
            what = ", ".join(f"{name} has {gpu_type}" for name, gpu_type in known.items())
            raise UsageError(f"the partitions have different GPU types: {what}", do="give --gpu-type, or one partition")
        return next(iter(known.values()), site)
    having = [name for name, item in settings.partitions.items() if item.gpu_type == asked]
    wrong = {name: gpu_type for name, gpu_type in known.items() if gpu_type != asked}
    if wrong and (partition or not having):
        what = ", ".join(f"partition {name} has {gpu_type}" for name, gpu_type in wrong.items())
        do = None if having else f"add the partition with {asked} to slurm.partitions in cluster_config.yaml"
        choices = [f"--partition {name}" for name in having] or [f"--gpu-type {item}" for item in set(wrong.values())]
        raise UsageError(f"{what}, and the job requests {asked}", choices=choices, do=do)
    return asked


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
        gpus[read_gpus(gres)] += count
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


def _architectures(groups: Iterable[tuple[str, int, str, str]]) -> dict[str, str]:
    """Architectures of a sample of nodes, by name; the controller knows those of nodes that have registered."""
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
