# SPDX-License-Identifier: Apache-2.0
"""Hardware and software of the workers, for the record."""

import os
import platform
from collections.abc import Mapping

import torch
import torch.distributed as dist

from llmb.engine.device import device_name
from llmb.engine.parallel.mesh import Ranks
from llmb.runs.environment import Environment
from llmb.runs.host import host_name
from llmb.secrets import without_secrets

RECORDED = ("NCCL_", "CUDA_", "TORCH_", "OMP_", "GOMP_", "MKL_", "GLOO_", "LLMB_", "SLURM_", "PYTORCH_", "NVIDIA_")


def describe_environment(ranks: Ranks) -> Environment:
    """Versions, devices, nodes and the settings that affect speed. A collective: every rank must call it."""
    nodes: list[str] = [""] * ranks.world_size
    dist.all_gather_object(nodes, host_name())
    on_gpu = ranks.device.type == "cuda"
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda if on_gpu else None,
        nccl=_nccl_version() if on_gpu else None,
        backend=dist.get_backend(),
        float32_matmul_precision=torch.get_float32_matmul_precision(),
        system=platform.platform(),
        device=device_name(ranks.device),
        device_memory_gib=torch.cuda.get_device_properties(ranks.device).total_memory / 2**30 if on_gpu else None,
        cpu_threads_per_rank=torch.get_num_threads(),
        nodes=tuple(dict.fromkeys(nodes)),
        ranks_per_node={node: nodes.count(node) for node in dict.fromkeys(nodes)},
        variables=recorded_variables(os.environ),
    )


def _nccl_version() -> str:
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return ".".join(map(str, version))


def recorded_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may affect a run's speed, except those that may hold a secret."""
    return {name: value for name, value in sorted(without_secrets(environ).items()) if name.startswith(RECORDED)}
