# SPDX-License-Identifier: Apache-2.0
"""Describes the hardware and software of the workers for the record of a run."""

import ctypes
import os
import platform
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from llmb.base.secrets import without_secrets
from llmb.base.tools import ask_program
from llmb.engine.device import cpu_name, device_name
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.engine.parallel.rendezvous import STORE
from llmb.engine.torch_names import untried
from llmb.readers.samples.host import host_name
from llmb.runs.conditions import SPEED_PREFIXES
from llmb.runs.environment import QUERIES, DeviceMemory, Environment, NodeGpus, RdmaPort, command, of_run, parse_states
from llmb.runs.rank_account import GIB

RECORDED = (*SPEED_PREFIXES, "LLMB_", "SLURM_")
QUERY_S = 20.0
"""Time limit of nvidia-smi and ptxas in seconds; without persistence mode, nvidia-smi waits for the driver to load."""
RDMA_DEVICES = Path("/sys/class/infiniband")


def describe_environment(ranks: Ranks) -> Environment:
    """Return versions, devices, nodes and the settings that affect speed. A collective: every rank must call it."""
    nodes = of_every_rank(host_name(), ranks)
    on_gpu = ranks.device.type == "cuda"
    seen = _gpus_of_run(ranks)
    ports: tuple[RdmaPort, ...] | None = None
    if on_gpu:  # described by the first rank of each node
        own = active_ports(host_name()) if os.environ.get("LOCAL_RANK", "0") == "0" else ()
        ports = tuple(port for of_rank in of_every_rank(own, ranks) for port in of_rank)
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        untried=untried(torch.__version__),
        cuda=torch.version.cuda if on_gpu else None,
        nccl=nccl_version() if on_gpu else None,
        backend=dist.get_backend(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        system=platform.platform(),
        device=device_name(ranks.device),
        device_memory_gib=torch.cuda.get_device_properties(ranks.device).total_memory / 2**30 if on_gpu else None,
        cpu_threads_per_rank=torch.get_num_threads(),
        nodes=tuple(dict.fromkeys(nodes)),
        ranks_per_node={node: nodes.count(node) for node in dict.fromkeys(nodes)},
        variables=recorded_variables(os.environ),
        driver=seen.driver,
        cuda_driver=_cuda_of_driver() if on_gpu else None,
        cudnn=cudnn_version() if on_gpu else None,
        ptxas=assembler_version(ranks.device) if on_gpu else None,
        cpu=cpu_name(),
        binding=os.environ.get("LLMB_BINDING"),
        gpus=seen.gpus or None,
        rdma_ports=ports,
    )


def device_memory(ranks: Ranks) -> DeviceMemory | None:
    """Return the free memory of this rank's GPU and the use outside of torch's allocator, in GiB; None on CPUs."""
    if ranks.device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(ranks.device)
    outside = total - free - torch.cuda.memory_reserved(ranks.device)
    return DeviceMemory(rank=ranks.rank, free_gib=free / GIB, outside_gib=outside / GIB)


def gpus_after(ranks: Ranks, memory: DeviceMemory | None) -> dict[str, object]:
    """Return fields of ``Environment`` about the run's GPUs after the last step; empty on CPUs. A collective on
    GPUs."""
    found: dict[str, object] = {"gpus_at_end": _gpus_of_run(ranks).gpus or None}
    if memory:
        found["device_memory"] = min(of_every_rank(memory, ranks), key=lambda each: each.free_gib)
    return {name: value for name, value in found.items() if value}


def cudnn_text(version: int | None) -> str | None:
    """Format cuDNN's version number, if any, as in its release notes, such as 9.10.2. Its encoding varies."""
    if version is None:
        return None
    major, rest = divmod(version, 10_000 if version >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def node_gpus(node: str) -> NodeGpus:
    """Return the driver and all GPUs that nvidia-smi shows on this node; neither if nvidia-smi is missing or fails."""
    for fields in QUERIES:
        said = ask_program(command(fields), QUERY_S)
        if said.code is None:
            break
        if said.code == 0:
            return parse_states(said.text, fields, node)
    return NodeGpus(None, ())


def _gpus_of_run(ranks: Ranks) -> NodeGpus:
    """Return the driver and the GPUs that ``of_run`` selects from all GPUs of the nodes. A collective on GPUs."""
    if ranks.device.type != "cuda":
        return NodeGpus(None, ())
    own = node_gpus(host_name()) if os.environ.get("LOCAL_RANK", "0") == "0" else NodeGpus(None, ())
    uuid = getattr(torch.cuda.get_device_properties(ranks.device), "uuid", None)
    described = of_every_rank((own, None if uuid is None else str(uuid)), ranks)
    gpus = [gpu for node, _ in described for gpu in node.gpus]
    drivers = (node.driver for node, _ in described)
    return NodeGpus(next(filter(None, drivers), None), of_run(gpus, [uuid for _, uuid in described]))


def _cuda_of_driver() -> str | None:
    """Return the newest CUDA version that the driver supports; None if it is unknown."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def cudnn_version() -> str | None:
    number: int | None = torch.backends.cudnn.version()
    return cudnn_text(number)


def assembler_version(device: torch.device) -> str | None:
    """Return the version of the ptxas that assembles Triton's kernels, such as 12.8.93; None if it is unknown."""
    if find_spec("triton") is None:
        return None
    from triton import knobs

    newer = torch.cuda.get_device_capability(device) >= (10, 0)
    tool = getattr(knobs.nvidia, "ptxas_blackwell" if newer else "ptxas", knobs.nvidia.ptxas)
    version = re.search(r"\bV(\d+(?:\.\d+)+)", ask_program([tool.path, "--version"], QUERY_S).text)
    return version[1] if version else None


def nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return ".".join(map(str, version))


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may affect a run's speed, except secrets and variables of the rendezvous store."""
    variables = sorted(without_secrets(environ).items())
    return {name: value for name, value in variables if name.startswith(RECORDED) and not name.startswith(STORE)}


def active_ports(node: str, devices: Path = RDMA_DEVICES) -> tuple[RdmaPort, ...]:
    """Return the active InfiniBand, RoCE and EFA ports that this process can see, sorted by name."""
    return tuple(_port(node, path) for path in sorted(devices.glob("*/ports/*")) if "ACTIVE" in (_text(path, "state")))


def _port(node: str, path: Path) -> RdmaPort:
    device = path.parent.parent
    rate = re.match(r"\d+(?:\.\d+)?", _text(path, "rate"))
    driver = (device / "device" / "driver").resolve()
    return RdmaPort(
        node=node,
        device=device.name,
        port=int(path.name),
        driver=driver.name if driver.exists() else None,
        link_layer=_text(path, "link_layer") or None,
        gbit_s=float(rate[0]) if rate else None,
    )


def _text(path: Path, name: str) -> str:
    try:
        return (path / name).read_text().strip()
    except OSError:
        return ""
