# SPDX-License-Identifier: Apache-2.0
"""How Slurm is set up: ``scontrol show config``, ``scontrol show node`` and what srun offers."""

import re
from collections.abc import Mapping, Sequence

from llmb.errors import InfrastructureError, LlmbError
from llmb.schedulers.port import NodeState, Plugin, SchedulerSetup, Trait
from llmb.schedulers.slurm.client import call, message

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
"""Parts of a node's state in which it gets no jobs, or loses those that it has."""


def read_setup(node: str, time_out_s: float) -> SchedulerSetup:
    """Reads the setup of this machine's cluster. Raises EnvironmentProblem without one, InfrastructureError if its
    controller does not answer."""
    done = call(["scontrol", "show", "config"], time_out_s=time_out_s)
    if done.code:
        raise InfrastructureError(f"Slurm does not show its configuration: {message(done)}")
    settings = parse_settings(done.text)
    traits = {
        **traits_of(settings),
        **mpi_trait(_said(["srun", "--mpi=list"], time_out_s), settings.get("MpiDefault", "")),
        **container_trait(_said(["srun", "--help"], time_out_s)),
    }
    names = dict.fromkeys([node, node.partition(".")[0]])
    shown = (_said(["scontrol", "--oneliner", "show", "node", name], time_out_s) for name in names)
    return SchedulerSetup(
        version=settings.get("SLURM_VERSION"), traits=traits, node=next(filter(None, map(parse_node, shown)), None)
    )


def _said(command: Sequence[str], time_out_s: float) -> str:
    """Both outputs: what srun prints where depends on its version. Empty if it fails."""
    try:
        done = call(command, time_out_s=time_out_s)
    except LlmbError:
        return ""
    return "" if done.code else f"{done.text}\n{done.errors}"


def parse_settings(text: str) -> dict[str, str]:
    """Parses ``scontrol show config``; unset ones are left out."""
    return {name: value for name, value in _SETTING.findall(text) if value not in _NONE}


def traits_of(settings: Mapping[str, str]) -> dict[Trait, Plugin]:
    """By what is set; an empty configuration has none."""
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
    """Parses ``srun --mpi=list``; llmb starts its processes without any of them."""
    lines = (line.removeprefix("srun:").strip() for line in listed.splitlines())
    names = [line for line in lines if re.fullmatch(r"\w+", line)]
    versions = re.findall(r"pmix_v\d+", listed)
    kinds = list(dict.fromkeys([*names, *versions]))
    if not kinds:
        return {}
    known = f", default {default}" if default else ""
    return {"mpi": Plugin(value=f"{', '.join(kinds)}{known}", fit=True)}


def container_trait(usage: str) -> dict[Trait, Plugin]:
    """Parses ``srun --help``, which lists the options of Pyxis where it is loaded."""
    if not usage.strip():
        return {}
    has = PYXIS in usage
    return {"containers": Plugin(value=f"srun has {'' if has else 'no '}{PYXIS}", fit=has)}


def parse_node(line: str) -> NodeState | None:
    """Parses ``scontrol --oneliner show node``; None if it shows none."""
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
    """Number and type of the GPUs in text such as ``gpu:h100:8(S:0-1),nvme:2``; of several types the sum."""
    found = list(_GPUS.finditer(gres))
    if not found:
        return None, None
    types = {match["type"] for match in found}
    return sum(int(match["count"]) for match in found), types.pop() if len(types) == 1 else None
