# SPDX-License-Identifier: Apache-2.0
"""What a run used of its GPUs and nodes, in the steps of its window. Unavailable figures are None."""

from typing import Literal

from llmb.catalogue.record import Record

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
    """Of all cores, as are the next two."""
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
    """Of the node with the fewest."""
    power_w_mean: float | None
    power_w_max: float | None
    total_power_w_mean: float | None
    """Of what ``energy_j`` is of."""
    energy_j: float | None
    """Of all GPUs, or of all CPU packages if the run computes on CPUs."""
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
