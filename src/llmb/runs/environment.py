# SPDX-License-Identifier: Apache-2.0
"""Hardware and software of a run's workers, as saved in ``run.json``, and the parsing of nvidia-smi's output."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from llmb.catalogue.records import Record
from llmb.readers.samples.sample_records import reasons_of
from llmb.runs.attention_choice import AttentionReport, Fp8Product
from llmb.runs.plan import ComputePath


class GpuState(Record):
    """A GPU of a node as ``nvidia-smi`` describes it. Unknown and unsupported values are None."""

    node: str
    index: int
    uuid: str | None = None
    name: str | None = None
    persistence_mode: str | None = None
    mig_mode: str | None = None
    ecc_mode: str | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    max_sm_clock_mhz: float | None = None
    max_memory_clock_mhz: float | None = None
    application_sm_clock_mhz: float | None = None
    application_memory_clock_mhz: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    """Reasons for lowered clocks; empty if there are none."""
    throttled_us: dict[str, float] | None = None
    """Microseconds of lowered clocks since the driver was loaded, by reason."""


class RdmaPort(Record):
    """An active port of a network card with RDMA, as the kernel of its node describes it."""

    node: str
    device: str
    port: int
    driver: str | None
    """For example ``mlx5_core`` or ``efa``."""
    link_layer: str | None
    """``InfiniBand``, ``Ethernet`` for RoCE, or another name that the kernel uses."""
    gbit_s: float | None


class KernelCheck(Record):
    """The comparison of a kernel of the engine with torch's code, at a shape of the run."""

    kernel: str
    shape: tuple[int, ...]
    rank: int
    difference: float | None
    """The largest error, as a multiple of what rounding can explain; None if a result is not finite."""
    right: bool
    """True if rounding explains all differences; if not, the run ends."""


class DeviceMemory(Record):
    """The memory of the GPU with the least free memory after the first step, in GiB."""

    rank: int
    free_gib: float
    outside_gib: float
    """Memory in use outside of PyTorch's allocator: by the CUDA context, kernels, NCCL and other processes."""


class Environment(Record):
    """Versions, devices, nodes and the settings that affect speed; ``cuda`` and ``nccl`` are None on a CPU."""

    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    backend: str
    """Backend of torch.distributed."""
    float32_matmul_precision: str
    system: str
    device: str
    device_memory_gib: float | None
    cpu_threads_per_rank: int
    nodes: tuple[str, ...]
    """The nodes, ordered by their first ranks."""
    ranks_per_node: dict[str, int]
    variables: dict[str, str]
    """Variables that may affect speed, except variables that may hold a secret."""
    attention: AttentionReport | None = None
    """None until llmb's engine has chosen a backend, and for another program."""
    fp8_product: Fp8Product | None = None
    """None for a run without FP8, and for another program."""
    compute_path: ComputePath | None = None
    """None for another program, and in the records of earlier versions."""
    kernels: tuple[KernelCheck, ...] | None = None
    """Checks of rank 0, and failed checks of others; empty if none is needed, None if not run."""
    ptxas: str | None = None
    """Version of the assembler of Triton's kernels; None on a CPU, without Triton, or if unknown."""
    driver: str | None = None
    """Driver of the GPUs."""
    cuda_driver: str | None = None
    """The newest CUDA version that the driver supports."""
    cudnn: str | None = None
    cpu: str | None = None
    """Model of the first node's CPU."""
    binding: str | None = None
    """CPUs and memory to which the first rank is bound, or why not; None if it was not tried."""
    gpus: tuple[GpuState, ...] | None = None
    """State of all GPUs of the run before its first step; None if nvidia-smi described none."""
    device_memory: DeviceMemory | None = None
    """None unless llmb's engine trained on GPUs until the run ended by itself."""
    gpus_at_end: tuple[GpuState, ...] | None = None
    """State of the GPUs right after the last step; None where ``device_memory`` or ``gpus`` is None."""
    untried: str | None = None
    """A note that this version of torch was never tested; None if it was tested."""
    rdma_ports: tuple[RdmaPort, ...] | None = None
    """Active ports of all nodes; empty if no process sees any; None if the run has no GPUs."""
    packages: dict[str, str] | None = None
    """Versions of another program's packages, by name; None for llmb's engine."""


PROGRAM = "nvidia-smi"
TEXTS = {
    "uuid": "uuid",
    "name": "name",
    "persistence_mode": "persistence_mode",
    "mig_mode": "mig.mode.current",
    "ecc_mode": "ecc.mode.current",
}
NUMBERS = {
    "power_limit_w": "power.limit",
    "default_power_limit_w": "power.default_limit",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "max_sm_clock_mhz": "clocks.max.sm",
    "max_memory_clock_mhz": "clocks.max.mem",
    "application_sm_clock_mhz": "clocks.applications.graphics",
    "application_memory_clock_mhz": "clocks.applications.memory",
}
COUNTED = ("sw_power_cap", "sync_boost", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
_PLAIN = ("index", "driver_version", *TEXTS.values(), *NUMBERS.values())
_EVENTS, _COUNTERS = "clocks_event_reasons.active", [f"clocks_event_reasons_counters.{name}" for name in COUNTED]
QUERIES = ((*_PLAIN, _EVENTS, *_COUNTERS), (*_PLAIN, _EVENTS), (*_PLAIN, "clocks_throttle_reasons.active"))
"""Queries to try in order: before driver 535 events were called throttling."""


class NodeGpus(NamedTuple):
    """The GPUs of a node or a run; ``driver`` is the version of their driver, or None if unknown."""

    driver: str | None
    gpus: tuple[GpuState, ...]


def command(fields: Iterable[str]) -> list[str]:
    return [PROGRAM, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def parse_states(text: str, fields: tuple[str, ...], node: str) -> NodeGpus:
    """Parse nvidia-smi's output for ``fields``, and skip other lines; unsupported and unknown values are None."""
    rows = [dict(zip(fields, values, strict=True)) for values in _rows(text) if len(values) == len(fields)]
    gpus = [row for row in rows if row["index"].isdecimal()]
    drivers = (_text(row["driver_version"]) for row in gpus)
    return NodeGpus(next(filter(None, drivers), None), tuple(_state(row, node) for row in gpus))


def of_run(gpus: Iterable[GpuState], uuids: Iterable[str | None]) -> tuple[GpuState, ...]:
    """Return the states of the GPUs with ``uuids``; all of ``gpus`` if a UUID is not listed."""
    listed, ids = tuple(gpus), {uuid and uuid.removeprefix("GPU-") for uuid in uuids}
    listed_ids = {gpu.uuid and gpu.uuid.removeprefix("GPU-") for gpu in listed}
    if not ids <= listed_ids:
        return listed
    return tuple(gpu for gpu in listed if gpu.uuid and gpu.uuid.removeprefix("GPU-") in ids)


def _rows(text: str) -> Iterable[list[str]]:
    return ([value.strip() for value in line.split(",")] for line in text.splitlines())


def _state(row: dict[str, str], node: str) -> GpuState:
    reasons = next((row[name] for name in (_EVENTS, "clocks_throttle_reasons.active") if name in row), "")
    values: dict[str, Any] = {name: _text(row[field]) for name, field in TEXTS.items()}
    values |= {name: _number(row[field]) for name, field in NUMBERS.items()}
    counts = {name: _number(row.get(field, "")) for name, field in zip(COUNTED, _COUNTERS, strict=True)}
    numbers = {name: count for name, count in counts.items() if count is not None}
    return GpuState(
        node=node, index=int(row["index"]), **values, throttle_reasons=_reasons(reasons), throttled_us=numbers or None
    )


def _reasons(text: str) -> tuple[str, ...] | None:
    return reasons_of(int(text, 16)) if re.fullmatch(r"0x[0-9a-fA-F]+", text) else None


def _text(value: str) -> str | None:
    return None if not value or value.startswith("[") or value in ("N/A", "Unknown") else value


def _number(value: str) -> float | None:
    """Some drivers print a unit after the number even if none is requested."""
    match = re.match(r"\d+(\.\d+)?(?=\s|$)", value)
    return float(match[0]) if match else None
