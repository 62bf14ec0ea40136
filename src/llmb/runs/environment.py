# SPDX-License-Identifier: Apache-2.0
"""Hardware and software of a run's workers, as saved in ``run.json``."""

from pathlib import Path

from llmb.catalogue.records import Record
from llmb.runs.attention import AttentionReport, Fp8Product
from llmb.runs.node_settings import NodesSettings
from llmb.runs.record_file import read_record_file


class GpuState(Record):
    """A GPU of a node as ``nvidia-smi`` describes it; None is unknown, or not supported by the GPU."""

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
    """Why its clocks are lower than they could be; empty if they are not."""
    throttled_us: dict[str, float] | None = None
    """Microseconds for which a reason lowered its clocks, by reason, since the driver was loaded."""


class RdmaPort(Record):
    """An active port of a network card with RDMA, as the kernel of its node describes it."""

    node: str
    device: str
    port: int
    driver: str | None
    """Such as ``mlx5_core`` or ``efa``."""
    link_layer: str | None
    """``InfiniBand``, ``Ethernet`` for RoCE, or what else the kernel says."""
    gbit_s: float | None


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
    """Ordered by their first ranks."""
    ranks_per_node: dict[str, int]
    variables: dict[str, str]
    """Variables that may affect speed, except those that may hold a secret."""
    attention: AttentionReport | None = None
    """None until a backend is chosen."""
    fp8_product: Fp8Product | None = None
    """None for a run without FP8."""
    driver: str | None = None
    """Driver of the GPUs."""
    cuda_driver: str | None = None
    """The newest CUDA version that the driver supports."""
    cudnn: str | None = None
    cpu: str | None = None
    """Model of the first node's."""
    gpus: tuple[GpuState, ...] | None = None
    """All that the run uses, before its first step; None without GPUs, or without nvidia-smi."""
    gpus_at_end: tuple[GpuState, ...] | None = None
    """State of the GPUs right after the last step; None also for a run that did not end by itself."""
    rdma_ports: tuple[RdmaPort, ...] | None = None
    """Active ports of all nodes; empty if no process sees one; None without GPUs."""
    settings: NodesSettings | None = None
    """What all nodes had before the first step; None if they were not read."""


def read_environment(path: Path) -> Environment | None:
    """None if the workers wrote none. Raises OSError, and ValueError for a damaged file."""
    return read_record_file(path, Environment) if path.exists() else None
