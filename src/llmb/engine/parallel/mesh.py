# SPDX-License-Identifier: Apache-2.0
"""The one place that describes how ranks are arranged."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmb.catalogue.records import Layout
from llmb.engine.device import backend, local_device
from llmb.runs.plan import Device


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others. ``mesh`` has one dimension per parallelism, named as in the layout."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def dp_rank(self) -> int:
        return self.mesh.get_local_rank("dp")

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join_ranks(kind: Device, layout: Layout) -> Ranks:
    """Connects this process to the others, as torch.distributed.run's environment variables say."""
    device = local_device(kind)
    dist.init_process_group(backend(kind), device_id=device if kind == "cuda" else None)
    world_size = dist.get_world_size()
    if world_size != layout.gpus:
        raise ValueError(f"the plan is for {layout.gpus} ranks, but {world_size} were started")
    mesh = init_device_mesh(kind, (layout.dp,), mesh_dim_names=("dp",))
    return Ranks(rank=int(os.environ["RANK"]), world_size=world_size, device=device, mesh=mesh)


def leave_ranks() -> None:
    """Waits for the others, then disconnects: a process that leaves early breaks collectives still under way."""
    dist.barrier()
    dist.destroy_process_group()
