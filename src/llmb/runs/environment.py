# SPDX-License-Identifier: Apache-2.0
"""What the workers of a run ran on and with, as ``run.json`` has it."""

from pathlib import Path

from llmb.catalogue.records import Record
from llmb.runs.attention import AttentionReport
from llmb.runs.fp8_product import Fp8Product


class Environment(Record):
    """Versions, devices, nodes and the settings that change speed; ``cuda`` and ``nccl`` are null on a CPU."""

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
    """In the order of their first ranks."""
    ranks_per_node: dict[str, int]
    variables: dict[str, str]
    """Those that may change speed, without any that may hold a secret."""
    attention: AttentionReport | None = None
    """Null until a backend was chosen."""
    fp8_product: Fp8Product | None = None
    """None for a run that does not compute in FP8, and for one of an earlier version."""


def read_environment(path: Path) -> Environment | None:
    """Null where the workers wrote none. Raises OSError, and ValueError for a file that is damaged."""
    return Environment.model_validate_json(path.read_text()) if path.exists() else None
