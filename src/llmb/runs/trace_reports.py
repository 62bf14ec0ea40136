# SPDX-License-Identifier: Apache-2.0
"""A run's profile with the breakdown of one step, and the network that it used according to NCCL."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.base.input_files import open_regular
from llmb.base.missing import Missing
from llmb.base.shown_text import counted, listed, printable
from llmb.base.tools import ask_program
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Gpu
from llmb.readers.nccl.nccl_network import NVLINK, TCP, Network, NodesNetwork, beginning, read_network, source_of
from llmb.readers.profiles import NCCL_LOG_END
from llmb.readers.profiles.breakdown import StepBreakdown, summarize
from llmb.readers.profiles.trace_files import REPORT_END, SQLITE_END, read_traces
from llmb.runs.environment import Environment, RdmaPort
from llmb.runs.folder import (
    UNREADABLE,
    BrokenRecord,
    RunFolder,
    read_or_missing,
    read_stored,
    why_unreadable,
    write_atomically,
)
from llmb.runs.plan import Plan

NSYS = "nsys"
EXPORT_LIMIT_S = 1800
# https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options. Only what the process
# marks is recorded, and it continues when the recording stops.
RECORDING = (
    NSYS,
    "profile",
    "--sample=none",
    "--trace=nvtx,cuda",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--wait=primary",
    "--force-overwrite=true",
)
GPU_METRICS = "--gpu-metrics-devices=cuda-visible"


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """A run's profile; ``breakdown`` is of the step with the median duration on the first rank with a profile."""

    profiler: str
    files: tuple[str, ...]
    breakdown: StepBreakdown | None
    warnings: tuple[str, ...]
    """Sentences about missing profiles, a missing breakdown, and a profiler other than the planned one."""


def profile_file(folder: RunFolder, plan: Plan, rank: int) -> Path:
    """Return the file with the profile of ``rank``: the newest file if several jobs ran the plan."""
    if not plan.profile or plan.profile.profiler != "nsys":
        return folder.torch_profile / f"rank-{rank}.json.gz"
    reports = folder.nsys_profile.glob(report_name(plan, rank, job="*", node="*"))
    report = folder.nsys_profile / report_name(plan, rank)
    return max(reports, key=lambda path: path.stat().st_mtime, default=report)


def new_report(folder: RunFolder, plan: Plan, rank: int, environ: Mapping[str, str]) -> Path:
    """Return the path of ``rank``'s Nsight Systems report; the rank runs with the variables ``environ``."""
    return folder.nsys_profile / report_name(plan, rank, environ.get("SLURM_JOB_ID"), environ.get("SLURM_NODEID"))


def report_name(plan: Plan, rank: int | str, job: str | None = None, node: str | None = None) -> str:
    """Return the name of a report of Nsight Systems; rank, job and node may be patterns or variables."""
    document = plan.recipe.document
    if document and document.profile and document.profile.file and job is not None and node is not None:
        return document.profile.file.format(job=job, node=node, rank=rank) + REPORT_END
    return f"profile_{rank}{REPORT_END}"


def nccl_log(folder: RunFolder, rank: int) -> Path:
    """Return the file with NCCL's log of ``rank``."""
    return folder.nccl_trace / f"rank-{rank}{NCCL_LOG_END}"


def report_profile(folder: RunFolder, plan: Plan) -> ProfileReport | None:
    """Report a run's profile, with the saved breakdown, else the first profile's; None if not profiled."""
    if plan.profile is None:
        return None
    expected = [profile_file(folder, plan, rank) for rank in plan.profile.ranks]
    existing = [path for path in expected if path.exists()]
    export_failure = _export(existing[0]) if existing and plan.profile.profiler == "nsys" else None
    there = [path for path in existing if path.stat().st_size]
    missing = [path.name for path in expected if path not in there]
    warnings = [plan.profile.reason] if plan.profile.reason else []
    warnings += [f"profiles were not written: {', '.join(missing)}; the run's log may show why"] if missing else []
    try:
        breakdown = read_breakdown(folder)
    except (OSError, BrokenRecord) as error:
        warnings.append(f"the saved breakdown of a step cannot be read: {why_unreadable(error)}")
        breakdown = None
    if export_failure:
        warnings.append(f"no breakdown of a step: {export_failure}")
    elif there and breakdown is None:
        source = there[0].with_suffix(SQLITE_END) if plan.profile.profiler == "nsys" else there[0]
        try:
            breakdown = summarize(read_traces([source])).ranks[0].typical
        except UsageError as error:
            warnings.append(f"no breakdown of a step: {error.what} ({source.name})")
        except UNREADABLE as error:
            warnings.append(f"no breakdown of a step: {why_unreadable(error)} ({source.name})")
    files = tuple(printable(path.relative_to(folder.path)) for path in there)
    return ProfileReport(plan.profile.profiler, files, breakdown, tuple(warnings))


def write_breakdown(folder: RunFolder, profile: ProfileReport | None) -> None:
    """Write the breakdown of a step, if there is one, to the run folder. Raise OSError if that fails."""
    if profile and profile.breakdown:
        write_atomically(folder.breakdown, json.dumps(asdict(profile.breakdown), indent=2) + "\n")


def read_breakdown(folder: RunFolder) -> StepBreakdown | None:
    """Return the breakdown saved at the end of the run, if any. Raise errors as ``read_stored`` does."""
    return read_stored(folder.breakdown, StepBreakdown) if folder.breakdown.exists() else None


LEAST_SHARE = 0.99
"""The fraction of a GPU type's nominal network rate that counts as the full rate."""
MOST_NAMED = 2
DECIDING = (
    *("NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_NET_DISABLE_GDR"),
)
"""Variables that choose the network or GPUDirect."""
SILENT = "NCCL reported nothing about its network in the run's files"


class NetworkUse(Network):
    """The network of a run, and its problems."""

    faults: tuple[str, ...] = ()
    """Descriptions of problems; any of them makes a verdict soft."""


def find_faults(network: Network, environment: Environment | None, gpu: Gpu | None) -> Iterator[str]:
    """Yield the network's faults, then variables that may have caused them; ``gpu`` is the run's GPU type."""
    faults = [fault for nodes in network.nodes for fault in _of_nodes(nodes, environment, gpu)]
    if fault := _differing(network.nodes):
        faults.append(fault)
    variables = environment.variables if environment else {}
    chosen = [f"{name}={variables[name]}" for name in DECIDING if name in variables]
    yield from faults
    if faults and chosen:
        yield f"the run has {' '.join(chosen)}"


def _of_nodes(nodes: NodesNetwork, environment: Environment | None, gpu: Gpu | None) -> Iterator[str]:
    ports = [
        port for port in (environment.rdma_ports if environment else None) or () if _short(port.node) in nodes.nodes
    ]
    where = f"on {_named(nodes.nodes)}"
    if TCP in (nodes.fabric or ""):
        if ports:
            yield f"NCCL used {TCP} {where}, though {_named([port.device for port in ports])} can be used there"
        elif gpu and gpu.network_gb_s:
            yield f"NCCL used {TCP} {where}; the network of {gpu.name} has {gpu.network_gb_s:g} GB/s per GPU"
        return
    if nodes.fabric == NVLINK:
        return
    if nodes.link_layer and nodes.devices and environment and ports:
        ranks = min(environment.ranks_per_node.get(port.node, 1) for port in ports)
        yield from _few_devices(nodes, ports, ranks, gpu, where)
    if nodes.gpudirect is False and gpu:
        yield f"NCCL used no GPUDirect RDMA {where}: messages are copied through host memory"


def _short(node: str) -> str:
    """Return a node's name without its domain, as NCCL does."""
    return node.partition(".")[0]


def _few_devices(
    nodes: NodesNetwork, ports: Sequence[RdmaPort], ranks: int, gpu: Gpu | None, where: str
) -> Iterator[str]:
    devices = nodes.devices_used if nodes.idle_devices is not None else nodes.devices
    used, unused = _by_use([port for port in ports if port.node == ports[0].node], devices or ())
    each_gb_s = sum(port.gbit_s or 0 for port in used) / 8 / ranks
    network_gb_s = (gpu and gpu.network_gb_s) or 0.0
    if 0 < each_gb_s < LEAST_SHARE * network_gb_s:
        text = f"NCCL used {counted(len(used), 'device')} {where} with {each_gb_s:.3g} of {network_gb_s:g} GB/s per GPU"
        yield text + (f", without {_named(unused)}" if unused else "")
    elif unused and len(used) < ranks:
        yield f"NCCL used {len(used)} of {len(used) + len(unused)} devices {where}, without {_named(unused)}"


def _by_use(ports: Sequence[RdmaPort], devices: Sequence[str]) -> tuple[list[RdmaPort], list[str]]:
    used = [port for port in ports if port.device in devices]
    kinds = {(port.link_layer, port.driver) for port in used}
    rate = max((port.gbit_s or 0 for port in used), default=0)
    alike = [port for port in ports if (port.link_layer, port.driver) in kinds and (port.gbit_s or 0) >= rate]
    return used, [port.device for port in alike if port not in used]


def _differing(groups: Sequence[NodesNetwork]) -> str | None:
    kinds: dict[tuple[object, ...], NodesNetwork] = {}
    for group in groups:
        devices = None if group.devices is None else len(group.devices)
        kinds.setdefault((group.fabric, group.transport, group.gpudirect, devices), group)
    if len(kinds) == 1:
        return None
    texts = (f"{_kind(group)} on {_named(group.nodes)}" for group in kinds.values())
    return f"nodes used different networks: {'; '.join(texts)}"


def _kind(group: NodesNetwork) -> str:
    devices = "" if group.devices is None else f", {counted(len(group.devices), 'device')}"
    direct = {True: ", GPUDirect", False: ", no GPUDirect", None: ""}[group.gpudirect]
    return f"{group.fabric or group.transport}{devices}{direct}"


def _named(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return " and ".join(names) if len(names) <= MOST_NAMED else listed(names, MOST_NAMED)


def network_log(folder: RunFolder, rank: int) -> Path:
    """Return the file with NCCL's lines about the network for ``rank``, the first of its node."""
    return folder.nccl_network / f"rank-{rank}{NCCL_LOG_END}"


def report_network(folder: RunFolder, plan: Plan, environment: Environment | None) -> NetworkUse | Missing:
    if plan.device != "cuda":
        return Missing("the ranks communicate with gloo, not NCCL")
    gpu, gpus = Catalogue().gpus.get(plan.recipe.gpu_type), plan.recipe.layout.gpus
    if len(environment.nodes) == 1 if environment else gpu and gpus <= gpu.gpus_per_node:
        return Missing("the run used one node")
    logs = _logs(folder)
    if not logs:
        return Missing(SILENT)
    source = printable(source_of([str(path.relative_to(folder.path)) for path in logs]))

    def read() -> NetworkUse | Missing:
        network = read_network(_texts(logs), source, gpus)
        if isinstance(network, Missing):
            return network
        return NetworkUse(**dict(network), faults=tuple(find_faults(network, environment, gpu)))

    return read_or_missing("NCCL's output about the network", read)


def _logs(folder: RunFolder) -> Sequence[Path]:
    logs = (sorted(path.glob(f"*{NCCL_LOG_END}")) for path in (folder.nccl_network, folder.nccl_trace))
    return next(filter(None, logs), [folder.log] if folder.log.exists() else [])


def _texts(paths: Sequence[Path]) -> Iterator[bytes]:
    for path in paths:
        with open_regular(path) as stream:
            yield from beginning(stream)


def _export(report: Path) -> str | None:
    target = report.with_suffix(SQLITE_END)
    command = [NSYS, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report)]
    output = ask_program(command, EXPORT_LIMIT_S, cwd=None)
    return f"{report.name} could not be exported: {output.problem}" if output.problem else None
