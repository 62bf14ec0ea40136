# SPDX-License-Identifier: Apache-2.0
"""The arrangement of ranks in device meshes."""

import os
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from llmb.catalogue.records import Layout
from llmb.engine.device import local_device
from llmb.engine.parallel.gloo import gloo_backend
from llmb.engine.parallel.store import host_store
from llmb.runs.parallelism import Replicas
from llmb.runs.plan import EnginePlan

DIMENSIONS = ("pp", "dp", "cp", "tp")
"""Slowest-varying first: the ranks of a tensor-parallel group are consecutive, as in Megatron-LM."""
EXPERT_DIMENSIONS = ("pp", "edp", "ep", "etp")
"""The mesh of the same ranks for routed experts: every rank of a pipeline stage has different tokens."""
LONGEST_LEAVE_S = 5


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others. ``mesh`` has one dimension per parallelism, named as in the layout."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    fsdp: DeviceMesh
    """The ranks of dp and cp, which use the same parameters for different tokens: one dimension that shards them or,
    with replicas, the dimensions ``replicate`` and ``shard``."""
    expert_mesh: DeviceMesh
    """The second view, with one dimension per name of ``EXPERT_DIMENSIONS``; ranks of edp hold the same experts."""
    expert_fsdp: DeviceMesh
    """``fsdp`` of routed experts: the ranks of edp."""

    @property
    def dp_rank(self) -> int:
        return self.mesh.get_local_rank("dp")

    @property
    def cp_rank(self) -> int:
        return self.mesh.get_local_rank("cp")

    @property
    def pp_rank(self) -> int:
        return self.mesh.get_local_rank("pp")

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def join_ranks(plan: EnginePlan) -> Ranks:
    """Connects this process to the others, as configured by its environment variables."""
    device, gpus = local_device(plan.device), plan.recipe.layout.gpus
    connect_ranks(device)
    world_size = dist.get_world_size()
    if world_size != gpus:
        raise ValueError(f"the plan is for {gpus} ranks, but {world_size} were started")
    return arrange(dist.get_rank(), device, plan.recipe.layout, plan.parallelism.replicas(plan.recipe.layout))


def connect_ranks(device: torch.device, timeout: timedelta | None = None) -> None:
    """Makes the group of all ranks; ``timeout`` of collectives, or torch's own."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else gloo_backend(),
        store=host_store(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def arrange(rank: int, device: torch.device, layout: Layout, replicas: Replicas) -> Ranks:
    """This rank's position among ``layout.gpus`` connected ranks."""
    sizes = tuple(getattr(layout, name) for name in DIMENSIONS)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    expert_sizes = tuple(getattr(layout, name) for name in EXPERT_DIMENSIONS)
    expert_mesh = init_device_mesh(device.type, expert_sizes, mesh_dim_names=EXPERT_DIMENSIONS)
    fsdp = with_replicas(mesh["dp", "cp"]._flatten("fsdp"), replicas.dense)
    return Ranks(
        rank, layout.gpus, device, mesh, fsdp, expert_mesh, with_replicas(expert_mesh["edp"], replicas.experts)
    )


def with_replicas(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """Splits a mesh into ``replicas`` groups of consecutive ranks, each of which shards one replica."""
    if replicas == 1:
        return mesh
    return mesh._unflatten(0, (replicas, mesh.size() // replicas), ("replicate", "shard"))


def leave_ranks() -> None:
    """Waits for the others, then disconnects: a process that exits early breaks collectives in progress.

    All work is done by then. If disconnecting hangs, as it may with graphs that hold communicators, the process exits
    anyway.
    """
    dist.barrier()
    sys.stdout.flush()
    deadline = threading.Timer(LONGEST_LEAVE_S, os._exit, (0,))
    deadline.daemon = True
    deadline.start()
    dist.destroy_process_group()
    deadline.cancel()
