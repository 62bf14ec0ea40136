# SPDX-License-Identifier: Apache-2.0
"""Hardware and software of a run's workers, as saved in ``run.json``."""

from pathlib import Path

from llmb.catalogue.records import Record
from llmb.runs.attention import AttentionReport
from llmb.runs.fp8_product import Fp8Product
from llmb.runs.record_file import read_record_file


class Environment(Record):
    """Versions, devices, nodes and the settings that affect speed; ``cuda`` and ``nccl`` are None on a CPU."""

    python: str
    torch: str
    cuda: str | None
    nccl: str | None
    backend: str
    """Of torch.distributed."""
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
    """None for a run without FP8, or of an earlier version."""


def read_environment(path: Path) -> Environment | None:
    """None if the workers wrote none. Raises OSError, and ValueError for a damaged file."""
    return read_record_file(path, Environment) if path.exists() else None
