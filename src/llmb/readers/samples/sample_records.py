# SPDX-License-Identifier: Apache-2.0
"""Records of a sampler's lines, of a run's use of resources, and of other work on its nodes."""

import json
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from pydantic import AfterValidator

from llmb.base.record import Record

FINITE = {"allow_inf_nan": False}
"""Pydantic's configuration for reading a line: infinity and NaN are errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGpu:
    """A GPU of the node; ``index`` is the driver's number."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """Another llmb program that runs on a node of the run."""

    program: str
    """The program's module, such as ``llmb.engine.worker``."""
    folder: str | None
    pid: int
    since_s: float | None
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStart:
    """The first line of a sampler. ``missing`` has the reasons why ``gpus`` and ``cpu_energy`` are not sampled."""

    __pydantic_config__ = FINITE
    node: str
    cores: int | None
    interval_s: float
    gpus: tuple[SampledGpu, ...] = ()
    cpu_limit_cores: float | None = None
    """Number of cores that the run's control group may use; None without a readable limit."""
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """A node at one moment; unknown values are None. Times and energy accumulate: only differences of samples count."""

    __pydantic_config__ = FINITE
    cpu_busy_s: float | None = None
    cpu_iowait_s: float | None = None
    cpu_steal_s: float | None = None
    cpu_used_s: float | None = None
    """The time used by processes, without interrupts."""
    run_cpu_s: float | None = None
    """The CPU time of the run's processes and their ancestors."""
    cpu_throttled_s: float | None = None
    """The time for which the CPU limit of the run's control group stopped it, summed over cores."""
    cpu_total_s: float | None = None
    load: float | None = None
    """The kernel's load average over the last minute."""
    memory_used_bytes: int | None = None
    worker_memory_bytes: int | None = None
    """Resident set of the node's first worker; None for other programs than llmb's engine."""
    cpu_energy_j: float | None = None
    """Energy of all CPU packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSamples:
    """The GPUs of a node at one moment, in the order of ``SamplerStart.gpus``; unknown values are None."""

    __pydantic_config__ = FINITE
    power_w: tuple[float | None, ...] = ()
    energy_j: tuple[float | None, ...] = ()
    """Energy since the driver was loaded."""
    sm_clock_mhz: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    memory_used_bytes: tuple[int | None, ...] = ()
    throttle_reasons: tuple[tuple[str, ...] | None, ...] = ()
    other_pids: tuple[tuple[int, ...] | None, ...] = ()
    """Processes outside the run that compute on each GPU; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a node. ``time_s`` is Unix time by its clock; ``gpus`` is None if none are sampled."""

    __pydantic_config__ = FINITE
    time_s: float
    host: HostSample
    gpus: GpuSamples | None = None
    runs: tuple[OtherRun, ...] = ()
    """Other runs on the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterReading:
    """Counters of a node at one moment, named ``area/device/name``; counters at 0 are omitted."""

    __pydantic_config__ = FINITE
    read_at_s: float
    """Unix time by the node's clock."""
    counters: dict[str, int]
    read: tuple[str, ...]
    """Areas that could be read."""
    unread: dict[str, str]
    """The reasons why other areas could not be read; areas that the node lacks are omitted."""
    kernel: tuple[str, ...] = ()
    """The kernel's messages since the previous reading that may concern the run."""


Line = SamplerStart | Sample | CounterReading


def to_line(item: Line) -> bytes:
    return json.dumps(asdict(item), separators=(",", ":")).encode() + b"\n"


REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of NVML's reasons for lower clocks, with their names."""


def reasons_of(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in REASONS.items() if bits & bit)


EnergySource = Literal["gpu_counter", "gpu_power", "cpu_package"]
"""The GPUs' own counters, the integral of their sampled power, or the counters of the CPU packages."""


class GpuUse(Record):
    """The use of one GPU; ``index`` is the driver's number for it."""

    node: str
    index: int
    uuid: str
    power_w_mean: float | None
    power_w_max: float | None
    energy_j: float | None
    energy_source: EnergySource | None
    sm_clock_mhz_mean: float | None
    sm_clock_mhz_min: float | None
    temperature_c_max: float | None
    memory_used_gib_max: float | None
    throttled: dict[str, float] | None
    """Fraction of the samples in which a reason lowered the clocks, by reason."""


class HostUse(Record):
    """The use of one node, by everything that runs on it."""

    node: str
    samples: int
    cpu_pct_mean: float | None
    """In percent of the time of all cores, like the next two fields."""
    iowait_pct_mean: float | None
    steal_pct_mean: float | None
    """Time in which another virtual machine had the core."""
    load_mean: float | None
    memory_used_gib_max: float | None
    worker_memory_gib_max: float | None
    """Resident set of the node's first worker; None for other programs than llmb's engine."""
    cpu_energy_j: float | None


class ResourceUse(Record):
    """The use of the sampled nodes and GPUs of a run. Power, clocks, temperature and memory are per GPU."""

    samples: int
    """Number of samples of the node with the fewest."""
    power_w_mean: float | None
    power_w_max: float | None
    total_power_w_mean: float | None
    """Mean power of all devices together: ``energy_j`` divided by the steps' time."""
    energy_j: float | None
    """Energy of all GPUs, or of all CPU packages if the run is on CPUs."""
    energy_j_per_token: float | None
    """Energy per token of the steps, including padding."""
    energy_source: EnergySource | None
    sm_clock_mhz_mean: float | None
    sm_clock_mhz_min: float | None
    temperature_c_max: float | None
    memory_used_gib_max: float | None
    throttled: dict[str, float] | None
    """Fraction of the samples in which a reason lowered a GPU's clocks, by reason; the mean of all GPUs."""
    gpus: tuple[GpuUse, ...] | None
    hosts: tuple[HostUse, ...]
    reasons: dict[str, str]
    """The reason for each value that is None, by name, such as ``gpus``, ``gpus.energy_j`` or ``hosts.load_mean``."""


class NodeOtherWork(Record):
    """Other work on a node between the samples around the window."""

    node: str
    cores: int | None
    sampled_s: float
    other_cores: float | None
    """Mean number of cores used by processes outside the run."""
    run_cores: float | None
    stolen_cores: float | None
    """Mean number of cores that other virtual machines took from this node."""
    cpu_limit_cores: float | None
    """Number of cores that the run's control group may use; None without a readable limit."""
    throttled_cores: float | None
    """Mean number of cores by which ``cpu_limit_cores`` throttled the run."""
    load_before: float | None
    """The kernel's load average over the minute before the sampler's first sample."""
    runs: tuple[OtherRun, ...]
    gpu_processes: dict[str, tuple[int, ...]] | None
    """Other processes that compute on the run's GPUs, by the GPU's UUID."""
    reasons: dict[str, str]
    """The reason for each field that is None, by name."""


def _without_names(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the programs and folders of other runs, which earlier versions recorded."""
    return tuple(text.partition(": llmb.")[0] for text in texts)


class OtherWork(Record):
    """Other work on the nodes that were sampled for long enough."""

    disturbing: Annotated[tuple[str, ...], AfterValidator(_without_names)]
    """Descriptions of other runs, processes on the run's GPUs, and work above the limits of ``other_work.yaml``."""
    nodes: tuple[NodeOtherWork, ...]
