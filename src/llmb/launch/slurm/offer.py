# SPDX-License-Identifier: Apache-2.0
"""Reads Slurm's setup, nodes and offer to this user; parses and formats lists of nodes; finds partitions by GPU."""

import os
import pwd
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby, islice

from llmb.base.errors import InfrastructureError, LlmbError, UsageError, unknown
from llmb.base.options import parse_ranges
from llmb.catalogue.resolve import CPU
from llmb.launch.scheduler_port import NodeState, Offer, Partition, Plugin, SchedulerSetup, Trait
from llmb.launch.slurm.client import AGAIN, call, message
from llmb.launch.slurm.settings import SlurmSettings, partition_names

_PART = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NUMBERED = re.compile(r"(.*?)(\d+)(\D*)")
_NODE = re.compile(r"\bNodeName=(\S+)")
ABSENT = "not found"
SINFO = ("sinfo", "--noheader", "--format=%P|%D|%G|%N")
"""The command that prints a line for each group of identical nodes in a partition."""
SAMPLE = 5
"""Number of nodes per group that are queried for their architecture."""
_ARCHITECTURE = re.compile(r"\bArch=(\S+)")


def expand(hosts: str | None) -> list[str]:
    """Return the names in a list such as ``node[1-4]``; raise ValueError if it is malformed."""
    if re.search(r"[\[\]]", _BRACKET.sub("", hosts or "")):
        raise ValueError("unbalanced brackets")
    return [name for part in _PART.findall(hosts or "") for name in _names(part)]


def nodelist_warnings(listed: str | None, nodes: int) -> Iterator[str]:
    """Yield a warning if a node list has more than ``nodes`` nodes; ignore files and malformed lists."""
    if listed is None or "/" in listed:
        return
    with suppress(ValueError):
        if (count := len({*expand(listed)})) > nodes:
            yield f"--nodelist has {count} nodes, but the job has {nodes}; Slurm will reject it"


def compress(names: Iterable[str]) -> str:
    """Format names as a sorted list without duplicates, in which ``node1`` and ``node2`` are ``node[1-2]``."""
    numbers: dict[tuple[str, str], set[str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        head, digits, tail = match.groups() if match else (name, "", "")
        numbers.setdefault((head, tail), set()).add(digits)
    return ",".join(part for (head, tail), match in sorted(numbers.items()) for part in _families(head, tail, match))


def _families(head: str, tail: str, numbers: set[str]) -> Iterator[str]:
    """Yield lists of names: with unpadded numbers, with numbers padded to each width, and without a number."""
    padded = {len(digits) for digits in numbers if len(digits) > 1 and digits.startswith("0")}
    for width in (0, *sorted(padded)):
        ids = {int(digits) for digits in numbers if digits and (len(digits) if len(digits) in padded else 0) == width}
        if ids:
            yield _family(head, width, tail, sorted(ids))
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
    """Read the nodes in ``listed``, in order, or else the partitions' nodes, or all nodes. Raises UsageError if the
    list is malformed, or a node or a partition does not exist; InfrastructureError if Slurm does not answer; and the
    errors of ``call``."""
    queried = _listed(listed) if listed is not None else _of_partition(partition, time_out_s)
    names = list(dict.fromkeys(queried))
    output = call(["scontrol", "--oneliner", "show", "node", compress(names)], time_out_s=time_out_s)
    nodes = parse_nodes(output.text)
    if missing := [name for name in names if name not in nodes]:
        if output.code and ABSENT not in f"{output.errors}{output.text}":
            raise InfrastructureError(f"Slurm does not report its nodes: {message(output)}", do=AGAIN)
        raise UsageError(f"this cluster has no node {compress(missing)}", do="run 'sinfo -N' to list its nodes")
    return {name: nodes[name] for name in names}


def _listed(text: str) -> list[str]:
    do = "use Slurm's list format, such as node[1-4,7],login1"
    try:
        names = expand(text)
    except ValueError as error:
        raise UsageError(f"'{text}' is not a list of nodes: {error}", do=do) from error
    if bad := next((name for name in names if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name)), None):
        raise UsageError(f"'{bad}' is not a valid node name", do=do)
    if not names:
        raise UsageError("the list of nodes is empty", do=do)
    return names


def _of_partition(partition: str | None, time_out_s: float) -> list[str]:
    output = call(["sinfo", "--noheader", "--format=%R|%N"], time_out_s=time_out_s)
    if output.code:
        raise InfrastructureError(f"sinfo failed: {message(output)}", do=AGAIN)
    rows = [line.partition("|")[::2] for line in output.text.splitlines() if "|" in line]
    wanted, names = partition_names(partition), {name for name, _ in rows}
    if absent := [name for name in wanted if partition and name not in names]:
        raise unknown("partition", absent[0], sorted(names))
    return [node for name, nodes in rows if not partition or name in wanted for node in expand(nodes.strip())]


def parse_nodes(text: str) -> dict[str, NodeState]:
    """Parse the output of ``scontrol --oneliner show node`` for several nodes, by name."""
    nodes = {}
    for line in text.splitlines():
        name, state = _NODE.search(line), parse_node(line)
        if name and state:
            nodes[name[1]] = state
    return nodes


def site_partition(settings: SlurmSettings, gpu_type: str | None) -> str | None:
    """Return the cluster's partitions for jobs with ``gpu_type``, separated by commas; None for Slurm's default."""
    if gpu_type == CPU:
        return settings.cpu_partition or settings.partition
    types = settings.types_of(settings.partition)
    if gpu_type in types.values():
        return ",".join(name for name in partition_names(settings.partition) if types.get(name, gpu_type) == gpu_type)
    if gpu_type and (settings.partition is None or types):
        others = [name for name, partition in settings.partitions.items() if partition.gpu_type == gpu_type]
        return ",".join(others) or settings.partition
    return settings.partition


def gpu_type_within(settings: SlurmSettings, partition: str | None, type_: str | None, site: str | None) -> str | None:
    """Return the GPU type of a job: the requested ``type_``, or else the partition's, or else the ``site``'s.

    ``partition`` is None if the job requests none. Raises UsageError if a partition to use has another type than
    requested, or if no type is requested and the partitions' types differ.
    """
    if type_ == CPU:
        return type_
    chosen = partition or settings.partition
    types = settings.types_of(chosen)
    if type_ is None:
        if len(set(types.values())) > 1:
            what = ", ".join(f"{name} has {gpu_type}" for name, gpu_type in types.items())
            do = f"pass partitions of one type with -p{'' if partition else ' or, if the command has it, --gpu-type'}"
            raise UsageError(f"partitions have different GPU types: {what}", do=do)
        return next(iter(types.values()), site)
    having = [name for name, item in settings.partitions.items() if item.gpu_type == type_]
    wrong = {name: gpu_type for name, gpu_type in types.items() if gpu_type != type_}
    if wrong and (partition or not having):
        what = ", ".join(f"partition {name} has {gpu_type}" for name, gpu_type in wrong.items())
        add = None if having else f"add the partition with {type_} to slurm.partitions in cluster_config.yaml"
        choices = [f"--partition {name}" for name in having] or [f"--gpu-type {item}" for item in set(wrong.values())]
        raise UsageError(f"{what}, but the job requests {type_}", choices=choices, do=add)
    return type_


def slurm_offer() -> Offer:
    """Query Slurm's offer; raise InfrastructureError if Slurm does not answer, EnvironmentProblem if it is missing."""
    output = call(SINFO)
    if output.code:
        raise InfrastructureError(f"sinfo failed: {message(output)}", do=AGAIN)
    groups = _groups(output.text)
    accounts, default = _accounts()
    return Offer(partitions=partitions(groups, _architectures(groups)), accounts=accounts, default_account=default)


def _groups(text: str) -> list[tuple[str, int, str, str]]:
    partitions = []
    for line in text.splitlines():
        parts = line.split("|")
        if len(parts) == 4 and parts[1].isdecimal():
            partitions.append((parts[0], int(parts[1]), parts[2], parts[3]))
    return partitions


def partitions(groups: Iterable[tuple[str, int, str, str]], architectures: Mapping[str, str]) -> tuple[Partition, ...]:
    """Return partitions with the most common GPUs of their nodes, and the most common architecture. Pure."""
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
    """Query the architectures of a sample of nodes, by name; nodes that never registered are missing."""
    sample = dict.fromkeys(node for _, _, _, nodes in groups for node in islice(expand(nodes), SAMPLE))
    if not sample:
        return {}
    output = call(["scontrol", "show", "node", "--oneliner", ",".join(sample)])
    values = {}
    for line in output.text.splitlines():
        node, architecture = _NODE.search(line), _ARCHITECTURE.search(line)
        if node and architecture:
            values[node[1]] = architecture[1]
    return values


def _accounts() -> tuple[tuple[str, ...] | None, str | None]:
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


_SETTING = re.compile(r"^(\w+)\s*=\s*(.*?)\s*$", re.MULTILINE)
_FIELD = re.compile(r"(?:^|\s)(\w+)=(\S*)")
_REASON = re.compile(r"(?:^|\s)Reason=(.*?)(?:\s+\[[^\]]*\])?\s*$", re.MULTILINE)
_GPUS = re.compile(r"(?:^|,)gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
_NONE = ("", "(null)", "N/A")
PYXIS = "--container-image"
UNUSABLE = frozenset(
    [
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "NOT_RESPONDING",
        "NO_RESPOND",
        "INVAL",
        "INVALID_REG",
        "MAINT",
        "MAINTENANCE",
        "POWERED_DOWN",
        "POWERING_DOWN",
        "REBOOT",
        "UNKNOWN",
        "FUTURE",
    ]
)
"""Flags in the state of a node that cannot run jobs."""


def read_setup(node: str, time_out_s: float) -> SchedulerSetup:
    """Read Slurm's setup and the state of ``node``. Raises EnvironmentProblem if Slurm is missing, InfrastructureError
    if the controller does not answer."""
    output = call(["scontrol", "show", "config"], time_out_s=time_out_s)
    if output.code:
        raise InfrastructureError(f"Slurm does not report its configuration: {message(output)}", do=AGAIN)
    settings = parse_settings(output.text)
    traits = {
        **traits_of(settings),
        **mpi_trait(_said(["srun", "--mpi=list"], time_out_s), settings.get("MpiDefault", "")),
        **container_trait(_said(["srun", "--help"], time_out_s)),
    }
    names = dict.fromkeys([node, node.partition(".")[0]])
    outputs = (_said(["scontrol", "--oneliner", "show", "node", name], time_out_s) for name in names)
    return SchedulerSetup(
        version=settings.get("SLURM_VERSION"), traits=traits, node=next(filter(None, map(parse_node, outputs)), None)
    )


def _said(command: Sequence[str], time_out_s: float) -> str:
    """Return a command's stdout and stderr, or an empty string if it fails; some versions of srun print to stderr."""
    try:
        output = call(command, time_out_s=time_out_s)
    except LlmbError:
        return ""
    return "" if output.code else f"{output.text}\n{output.errors}"


def parse_settings(text: str) -> dict[str, str]:
    """Parse the output of ``scontrol show config``, without unset values."""
    return {name: value for name, value in _SETTING.findall(text) if value not in _NONE}


def traits_of(settings: Mapping[str, str]) -> dict[Trait, Plugin]:
    """Return the traits that Slurm's configuration determines; an empty dictionary if there is no configuration."""
    if not settings:
        return {}
    tracking = settings.get("ProctrackType", "none")
    tasks = settings.get("TaskPlugin", "task/none")
    selection = settings.get("SelectType", "unknown")
    kinds = settings.get("GresTypes", "none")
    parts = " ".join(filter(None, [selection, settings.get("SelectTypeParameters")]))
    return {
        "tracking": Plugin(value=tracking, fit=tracking == "proctrack/cgroup"),
        "binding": Plugin(value=tasks, fit="task/affinity" in tasks or "task/cgroup" in tasks),
        "selection": Plugin(value=parts, fit="cons_" in selection),
        "gpus": Plugin(value=f"GresTypes={kinds}", fit="gpu" in kinds.split(",")),
    }


def mpi_trait(listed: str, default: str) -> dict[Trait, Plugin]:
    """Parse the output of ``srun --mpi=list``. Every value is suitable, because llmb does not use MPI."""
    lines = (line.removeprefix("srun:").strip() for line in listed.splitlines())
    names = [line for line in lines if re.fullmatch(r"\w+", line)]
    versions = re.findall(r"pmix_v\d+", listed)
    kinds = list(dict.fromkeys([*names, *versions]))
    if not kinds:
        return {}
    note = f", default {default}" if default else ""
    return {"mpi": Plugin(value=f"{', '.join(kinds)}{note}", fit=True)}


def container_trait(usage: str) -> dict[Trait, Plugin]:
    """Parse the output of ``srun --help``, which lists the options of Pyxis if that is loaded."""
    if not usage.strip():
        return {}
    has = PYXIS in usage
    return {"containers": Plugin(value=f"srun has {'' if has else 'no '}{PYXIS}", fit=has)}


def parse_node(line: str) -> NodeState | None:
    """Parse a line of ``scontrol --oneliner show node``; return None if it does not describe a node."""
    fields = dict(_FIELD.findall(line.strip()))
    state = fields.get("State")
    if not state:
        return None
    parts = set(re.split(r"[+*~#!%$@^:-]+", state.upper())) - {""}
    reason = _REASON.search(line.strip())
    silent = "*" in state
    return NodeState(
        state=state,
        usable=not silent and not parts & UNUSABLE,
        reason=reason[1].strip() if reason else None,
        gpus=read_gpus(fields.get("Gres", ""))[0],
        partitions=tuple(filter(None, fields.get("Partitions", "").split(","))),
    )


def read_gpus(gres: str) -> tuple[int | None, str | None]:
    """Parse the number of GPUs, and their type if there is only one, from text such as ``gpu:h100:8(S:0-1),nvme:2``."""
    matches = list(_GPUS.finditer(gres))
    if not matches:
        return None, None
    types = {match["type"] for match in matches}
    return sum(int(match["count"]) for match in matches), types.pop() if len(types) == 1 else None
