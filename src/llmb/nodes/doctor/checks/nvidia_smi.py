# SPDX-License-Identifier: Apache-2.0
"""Reads facts about GPUs from nvidia-smi and the PCI bus.

A query fails if the driver does not support one of its fields, so each kind of field has its own query.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmb.base.missing import Missing
from llmb.base.tools import Output
from llmb.nodes.doctor.facts import FactSource
from llmb.runs.environment import PROGRAM, QUERIES, NodeGpus, command, parse_states

LIMIT_S = 30.0
"""Time limit of a query in seconds; without persistence mode, a query waits for the driver to load."""
NVIDIA, DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")
"""The PCI vendor, and the PCI classes of GPUs with and without a display output."""
UNKNOWN_FIELD = "not a valid field"
ECC_FIELDS = ("uuid", "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total")
PCIE_FIELDS = ("uuid", "pcie.link.width.current", "pcie.link.width.max")
FABRIC_FIELDS = ("uuid", "fabric.state", "fabric.status")
REMAP_FIELDS = ("gpu_uuid", *(f"remapped_rows.{name}" for name in ("uncorrectable", "pending", "failure")))
_UNWELL = re.compile(r"\[(GPU requires reset|GPU is lost|Unknown Error)\]", re.IGNORECASE)
_GPU = re.compile(r"GPU (\d+): ")
_LINK = re.compile(r"\s*Link (\d+):\s*(.*)")
_COUNTER = re.compile(r"(.+?)\s*:\s*(\d+)\s*$")


class EccErrors(NamedTuple):
    """Numbers of uncorrected errors since the driver was loaded, and in the GPU's lifetime; None if not supported."""

    uuid: str
    since_load: int | None
    in_life: int | None


class PcieLink(NamedTuple):
    """The number of lanes in use, and the maximum that both GPU and board support."""

    uuid: str
    width: int | None
    max_width: int | None


class FabricState(NamedTuple):
    """The state of the GPU in its NVLink domain, in nvidia-smi's terms; None if not supported."""

    uuid: str
    state: str | None
    status: str | None


class RemappedRows(NamedTuple):
    """Memory rows that were replaced after uncorrected errors; None if not supported."""

    uuid: str
    rows: int | None
    pending: bool | None
    failure: bool | None


class NvLinks(NamedTuple):
    """The rate of each link of a GPU in GB/s per direction; None for an inactive link."""

    gpu: int
    gb_s: tuple[float | None, ...]


class LinkErrors(NamedTuple):
    """The errors that a GPU's links counted, by kind, summed over the links."""

    gpu: int
    counts: dict[str, int]


NOT_REQUESTED = Missing("not requested")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """Facts about the GPUs; Missing if nvidia-smi does not report them. ``on_bus`` counts the GPUs on the PCI bus."""

    on_bus: int
    states: NodeGpus | Missing
    ecc: Sequence[EccErrors] | Missing = NOT_REQUESTED
    pcie: Sequence[PcieLink] | Missing = NOT_REQUESTED
    fabric: Sequence[FabricState] | Missing = NOT_REQUESTED
    remapped: Sequence[RemappedRows] | Missing = NOT_REQUESTED
    links: Sequence[NvLinks] | Missing = NOT_REQUESTED
    link_errors: Sequence[LinkErrors] | Missing = NOT_REQUESTED
    processes: Sequence[str] | Missing = NOT_REQUESTED
    """Processes of any user on the GPUs, as ``pid program``."""
    unwell: Sequence[str] = ()
    """Error texts that nvidia-smi printed instead of values, with the GPU, and the error of a query that hung."""
    hung: bool = False
    """True if nvidia-smi did not list the GPUs in time."""
    up_s: float | None = None
    """Seconds since the node booted."""


def read_gpus(source: FactSource, node: str) -> GpuFacts:
    # NVIDIA's GPUs on the PCI bus, even if the driver does not use them.
    devices = (f"/sys/bus/pci/devices/{name}" for name in source.names("/sys/bus/pci/devices"))
    on_bus = sum(
        source.text(f"{device}/vendor") == NVIDIA and (source.text(f"{device}/class") or "")[:6] in DISPLAY_CLASSES
        for device in devices
    )
    states, output = read_states(source, node)
    if isinstance(states, Missing):
        return GpuFacts(on_bus=on_bus, states=states, hung=output.timed_out)
    facts, hung = _details(source)
    return GpuFacts(
        on_bus=on_bus,
        states=states,
        unwell=(*parse_unwell(output.text), *([hung] if hung else [])),
        up_s=up_seconds(source),
        **facts,
    )


def _details(source: FactSource) -> tuple[dict[str, Any], str | None]:
    """Query further facts; return them by name, and the error of a query that hung, after which others are skipped."""
    queries: dict[str, tuple[list[str], Callable[[str], Sequence[object]]]] = {
        "ecc": (_csv("gpu", ECC_FIELDS), parse_ecc),
        "pcie": (_csv("gpu", PCIE_FIELDS), parse_pcie),
        "fabric": (_csv("gpu", FABRIC_FIELDS), parse_fabric),
        "remapped": (_csv("remapped-rows", REMAP_FIELDS), parse_remapped),
        "links": ([PROGRAM, "nvlink", "--status"], parse_links),
        "link_errors": ([PROGRAM, "nvlink", "--errorcounters"], parse_link_errors),
        "processes": (_csv("compute-apps", ("pid", "process_name")), parse_processes),
    }
    facts: dict[str, Any] = {}
    for name, (words, parse) in queries.items():
        output = source.ask(words, LIMIT_S)
        facts[name] = _printed(output, parse)
        if output.timed_out:
            problem = output.problem or ""
            return {**dict.fromkeys(queries, Missing(problem)), **facts}, problem
    return facts, None


def up_seconds(source: FactSource) -> float | None:
    match = re.match(r"\d+(\.\d+)?", source.text("/proc/uptime") or "")
    return float(match[0]) if match else None


def read_states(source: FactSource, node: str) -> tuple[NodeGpus | Missing, Output]:
    """Query the GPUs with the most fields that the driver supports; return them or Missing, and the last output."""
    output = Output("", "nvidia-smi was not called")
    for fields in QUERIES:
        output = source.ask(command(fields), LIMIT_S)
        if output.problem is None:
            states = parse_states(output.text, fields, node)
            return (states if states.gpus else Missing(f"{PROGRAM} reports no GPU")), output
        if UNKNOWN_FIELD not in output.problem:
            break
    return Missing(output.problem or ""), output


def _csv(kind: str, fields: Sequence[str]) -> list[str]:
    return [PROGRAM, f"--query-{kind}={','.join(fields)}", "--format=csv,noheader,nounits"]


def _printed(output: Output, parse: Callable[[str], Sequence[object]]) -> Sequence[object] | Missing:
    if output.problem is None:
        return parse(output.text)
    reason = "this driver's nvidia-smi does not report it" if UNKNOWN_FIELD in output.problem else output.problem
    return Missing(reason)


def parse_unwell(text: str) -> tuple[str, ...]:
    """Return the errors of GPUs, with their indexes, from a query's output, whose lines begin with the index."""
    rows = ((line.partition(",")[0].strip(), _UNWELL.search(line)) for line in text.splitlines())
    return tuple(f"{match[1]} (GPU {index})" for index, match in rows if match)


def parse_ecc(text: str) -> tuple[EccErrors, ...]:
    return tuple(EccErrors(row[0], _count(row[1]), _count(row[2])) for row in _rows(text, len(ECC_FIELDS)))


def parse_pcie(text: str) -> tuple[PcieLink, ...]:
    return tuple(PcieLink(row[0], _count(row[1]), _count(row[2])) for row in _rows(text, len(PCIE_FIELDS)))


def parse_fabric(text: str) -> tuple[FabricState, ...]:
    return tuple(FabricState(row[0], _word(row[1]), _word(row[2])) for row in _rows(text, len(FABRIC_FIELDS)))


def parse_remapped(text: str) -> tuple[RemappedRows, ...]:
    rows = _rows(text, len(REMAP_FIELDS))
    return tuple(RemappedRows(row[0], _count(row[1]), _yes(row[2]), _yes(row[3])) for row in rows)


def parse_processes(text: str) -> tuple[str, ...]:
    rows = (line.partition(",") for line in text.splitlines())
    return tuple(f"{pid.strip()} {name.strip()}".strip() for pid, _, name in rows if pid.strip().isdecimal())


def parse_links(text: str) -> tuple[NvLinks, ...]:
    """Parse the output of ``nvidia-smi nvlink --status``."""
    speeds: dict[int, list[float | None]] = {}
    for gpu, _, value in _link_lines(text):
        speed = re.match(r"(\d+(\.\d+)?) GB/s", value)
        speeds.setdefault(gpu, []).append(float(speed[1]) or None if speed else None)
    return tuple(NvLinks(gpu, tuple(links)) for gpu, links in speeds.items())


def parse_link_errors(text: str) -> tuple[LinkErrors, ...]:
    """Parse the output of ``nvidia-smi nvlink --errorcounters``."""
    errors: dict[int, dict[str, int]] = {}
    for gpu, _, value in _link_lines(text):
        counts = errors.setdefault(gpu, {})
        counter = _COUNTER.match(value)
        if counter and "error" in counter[1].lower():
            counts[counter[1]] = counts.get(counter[1], 0) + int(counter[2])
    return tuple(LinkErrors(gpu, counts) for gpu, counts in errors.items())


def _link_lines(text: str) -> Iterable[tuple[int, int, str]]:
    """Yield the index of the GPU, the number of the link and the remaining text of each line about a link."""
    gpu = None
    for line in text.splitlines():
        if head := _GPU.match(line):
            gpu = int(head[1])
        elif gpu is not None and (link := _LINK.match(line)):
            yield gpu, int(link[1]), link[2].strip()


def _rows(text: str, width: int) -> list[list[str]]:
    rows = ([value.strip() for value in line.split(",")] for line in text.splitlines())
    return [row for row in rows if len(row) == width]


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() and text.isascii() else None


def _word(text: str) -> str | None:
    return None if not text or text.startswith("[") or text in ("N/A", "Not Supported") else text


def _yes(text: str) -> bool | None:
    """Parse a boolean, which older drivers print as a number and newer ones as yes or no; None for other text."""
    return {"yes": True, "1": True, "no": False, "0": False}.get(text.lower())
