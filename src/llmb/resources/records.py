# SPDX-License-Identifier: Apache-2.0
"""What a run used of its GPUs and nodes, in the steps of its window. Unavailable figures are None."""

from typing import Literal

from llmb.catalogue.record import Record
from llmb.resources.sample import SeenRun

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
"""Bits of the reasons that are active, as NVML's documentation names them."""


def reasons_of(bits: int) -> tuple[str, ...]:
    return tuple(name for bit, name in REASONS.items() if bits & bit)


EnergySource = Literal["gpu_counter", "gpu_power", "cpu_package"]
"""The GPUs' own counters, the integral of their sampled power, or the counters of the CPU packages."""


class GpuUse(Record):
    """One GPU; ``index`` is the driver's number."""

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
    """Share of the samples in which a reason lowered the clocks, by reason."""


class HostUse(Record):
    """One node, with everything that runs on it."""

    node: str
    samples: int
    cpu_pct_mean: float | None
    """Use of all cores, as are the next two."""
    iowait_pct_mean: float | None
    steal_pct_mean: float | None
    """Time in which another virtual machine had the core."""
    load_mean: float | None
    memory_used_gib_max: float | None
    worker_memory_gib_max: float | None
    """Resident set of the node's first worker."""
    cpu_energy_j: float | None


class ResourceUse(Record):
    """All nodes and GPUs of a run. Power, clocks, temperature and memory are those of single GPUs."""

    samples: int
    """Samples of the node with the fewest."""
    power_w_mean: float | None
    power_w_max: float | None
    total_power_w_mean: float | None
    """Power of what ``energy_j`` counts."""
    energy_j: float | None
    """Energy of all GPUs, or of all CPU packages if the run computes on CPUs."""
    energy_j_per_token: float | None
    """By the tokens that ``tokens_per_s`` counts."""
    energy_source: EnergySource | None
    sm_clock_mhz_mean: float | None
    sm_clock_mhz_min: float | None
    temperature_c_max: float | None
    memory_used_gib_max: float | None
    throttled: dict[str, float] | None
    """Mean share of the samples, by reason."""
    gpus: tuple[GpuUse, ...] | None
    hosts: tuple[HostUse, ...]
    reasons: dict[str, str]
    """Why a figure is None, by name."""


class NodeOtherWork(Record):
    """What a node did beside the run, from the last sample before the window to the first one after it."""

    node: str
    cores: int | None
    sampled_s: float
    other_cores: float | None
    """Mean number of cores that processes used which are not of the run."""
    run_cores: float | None
    stolen_cores: float | None
    """That other virtual machines had."""
    cpu_limit_cores: float | None
    """Limit of the run's control group; None without a limit."""
    throttled_cores: float | None
    """On which that limit stopped the run."""
    load_before: float | None
    """Mean number of runnable processes in the minute before the run trained, with its own start."""
    runs: tuple[SeenRun, ...]
    gpu_processes: dict[str, tuple[int, ...]] | None
    """Others that compute on the run's GPUs, by the id of the GPU."""
    reasons: dict[str, str]
    """Why a figure is None, by name."""


class OtherWork(Record):
    """Other work on all nodes that were sampled."""

    disturbing: tuple[str, ...]
    """What of it is more than ``other_work.yaml`` takes for harmless; empty if nothing is."""
    nodes: tuple[NodeOtherWork, ...]
