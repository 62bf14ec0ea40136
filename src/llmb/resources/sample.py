# SPDX-License-Identifier: Apache-2.0
"""The lines of a node's file of samples. The sampler writes them, so only the standard library is imported."""

import json
from dataclasses import asdict, dataclass, field

FINITE = {"allow_inf_nan": False}
"""How pydantic reads a line: numbers that no sampler writes are damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGpu:
    """A GPU of the node; ``index`` is the driver's number."""

    index: int
    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRun:
    """Another program of llmb that runs beside a run on its node."""

    program: str
    """Its module, such as ``llmb.engine.worker``."""
    folder: str | None
    pid: int
    since_s: float | None
    """Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStart:
    """The first line of a sampler. ``missing`` has the reason by name of what it cannot read."""

    __pydantic_config__ = FINITE
    node: str
    cores: int | None
    interval_s: float
    gpus: tuple[SampledGpu, ...] = ()
    cpu_limit_cores: float | None = None
    """Limit of the control group of the run; None without a limit."""
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """A node at one moment; None is unknown. Seconds of all cores since the boot, energy since the sampler began."""

    __pydantic_config__ = FINITE
    cpu_busy_s: float | None = None
    cpu_iowait_s: float | None = None
    cpu_steal_s: float | None = None
    cpu_used_s: float | None = None
    """By processes alone, without interrupts."""
    run_cpu_s: float | None = None
    """By the processes of the run."""
    cpu_throttled_s: float | None = None
    """For which the limit of the run's control group stopped it, summed over cores as the kernel does."""
    cpu_total_s: float | None = None
    load: float | None = None
    """Mean number of runnable processes over the last minute."""
    memory_used_bytes: int | None = None
    worker_memory_bytes: int | None = None
    """Resident set of the node's first worker."""
    cpu_energy_j: float | None = None
    """Energy of all CPU packages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSamples:
    """The GPUs of a node at one moment, in the order of ``SamplerStart.gpus``; None is unknown."""

    __pydantic_config__ = FINITE
    power_w: tuple[float | None, ...] = ()
    energy_j: tuple[float | None, ...] = ()
    """Since the driver was loaded."""
    sm_clock_mhz: tuple[float | None, ...] = ()
    temperature_c: tuple[float | None, ...] = ()
    memory_used_bytes: tuple[int | None, ...] = ()
    throttle_reasons: tuple[tuple[str, ...] | None, ...] = ()
    other_pids: tuple[tuple[int, ...] | None, ...] = ()
    """Processes that compute on the GPU and are not of the run; None where the run's own are not seen either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """``time_s`` is Unix time by the node's clock; ``gpus`` is None if none are sampled."""

    __pydantic_config__ = FINITE
    time_s: float
    host: HostSample
    gpus: GpuSamples | None = None
    runs: tuple[SeenRun, ...] = ()
    """Others beside this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterReading:
    """Counters that should not rise, at one moment, as ``area/device/name``, without those at 0."""

    __pydantic_config__ = FINITE
    read_at_s: float
    """Unix time by the node's clock."""
    counters: dict[str, int]
    read: tuple[str, ...]
    """Areas that the counters are all of."""
    unread: dict[str, str]
    """Why other areas could not be read; what the node does not have is in neither."""
    kernel: tuple[str, ...] = ()
    """What the kernel said of its hardware since the reading before."""


Line = SamplerStart | Sample | CounterReading


def to_line(item: Line) -> bytes:
    return json.dumps(asdict(item), separators=(",", ":")).encode() + b"\n"
