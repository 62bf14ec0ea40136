# SPDX-License-Identifier: Apache-2.0
"""Arranges ranks in device meshes, and creates their process groups."""

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.catalogue.records import Layout
from llmb.engine.device import local_device
from llmb.engine.parallel.rendezvous import announce_folder, gloo_backend, host_store
from llmb.runs.choices import Replicas
from llmb.runs.failure import PHASE_LIMITS
from llmb.runs.plan import EnginePlan

DIMENSIONS = ("pp", "dp", "cp", "tp")
"""Dimensions of the mesh, the slowest-varying first: tensor-parallel ranks are consecutive, as in Megatron-LM."""
EXPERT_DIMENSIONS = ("pp", "edp", "ep", "etp")
"""Dimensions of the mesh of all ranks for routed experts; ``edp`` is data parallelism of experts."""
LONGEST_LEAVE_S = 5
NO_LIMIT = timedelta(days=24)
"""About the maximum of 32-bit milliseconds, because torch has no way to wait without a limit."""
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's place among all ranks; for torchtitan, all four meshes are the same."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    fsdp: DeviceMesh
    """The ranks of dp and cp: one dimension or, with replicas, the dimensions ``replicate`` and ``shard``."""
    expert_mesh: DeviceMesh
    """All ranks, with one dimension per name of ``EXPERT_DIMENSIONS``; ranks of edp hold the same experts."""
    expert_fsdp: DeviceMesh
    """The ranks of edp, which are for routed experts what ``fsdp`` is for other parameters."""
    alone: bool = False
    """True if the other ranks do not exist."""

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
        """True for rank 0, and for a rank that is alone."""
        return self.rank == 0 or self.alone


def join_ranks(plan: EnginePlan, folder: Path | None = None) -> Ranks:
    """Connect this process to the other ranks of ``plan``. folder: rank 0 announces it."""
    device, gpus = local_device(plan.device), plan.recipe.layout.gpus
    connect_ranks(device, collective_limit(plan), folder)
    world_size = dist.get_world_size()
    if world_size != gpus:
        raise ValueError(f"the number of ranks is {world_size}, but the plan is for {gpus}")
    recipe, replicas = plan.recipe, plan.parallelism.replicas(plan.recipe.layout)
    return arrange(dist.get_rank(), device, recipe.layout, replicas, experts=recipe.model.moe is not None)


def connect_ranks(device: torch.device, timeout: timedelta | None = None, folder: Path | None = None) -> None:
    """Create the group of all ranks. timeout: of collectives, by default torch's. folder: rank 0 announces it."""
    on_gpu = device.type == "cuda"
    store = host_store()
    if folder and os.environ["RANK"] == "0":
        announce_folder(store, folder)
    dist.init_process_group(
        "nccl" if on_gpu else gloo_backend(),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
        device_id=device if on_gpu else None,
    )


def collective_limit(plan: EnginePlan) -> timedelta:
    """Return the time limit of collectives: the watchdog's longest, so that it reports hangs first, or ``NO_LIMIT``."""
    return timedelta(seconds=plan.stall_limit_s * max(PHASE_LIMITS.values())) or NO_LIMIT


def limit_collectives(plan: EnginePlan) -> None:
    """Apply ``collective_limit`` to all existing groups: each new group has torch's default, 10 minutes with NCCL."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(collective_limit(plan), group)


Parts = tuple[tuple[int, ...], ...]
"""All ranks, split into groups."""


class Groups:
    """Creates process groups, equal ones only once, because each has a communicator that takes GPU memory."""

    def __init__(self) -> None:
        world = dist.distributed_c10d._get_default_group()
        self.made: dict[Parts, dist.ProcessGroup] = {(tuple(range(world.size())),): world}

    def mesh(self, device: torch.device, sizes: Mapping[str, int]) -> DeviceMesh:
        """Return a mesh of all ranks with these dimensions; the last one varies fastest."""
        ranks = numbered(sizes)
        groups = [self.of(along(ranks, dim), name) for dim, name in enumerate(sizes)]
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=tuple(sizes))

    def of(self, parts: Parts, name: str) -> dist.ProcessGroup:
        if parts not in self.made:
            self.made[parts] = new_group(parts, name)
        return self.made[parts]


def numbered(sizes: Mapping[str, int]) -> Tensor:
    return torch.arange(math.prod(sizes.values())).view(*sizes.values())


def along(ranks: Tensor, *dims: int) -> Parts:
    """Return the groups of ranks that differ only in these neighboring dimensions."""
    last = ranks.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
    return tuple(map(tuple, last.reshape(-1, last.shape[-1]).tolist()))


def new_group(parts: Parts, name: str) -> dist.ProcessGroup:
    """Create a group for each of ``parts``, and return this rank's group. A collective of all ranks."""
    world = dist.distributed_c10d._get_default_group()
    own: dist.ProcessGroup | None
    if world.bound_device_id is None:
        own, _ = dist.new_subgroups_by_enumeration(parts, group_desc=name)
    else:
        own = dist.split_group(world, [list(part) for part in parts], group_desc=name)  # in one operation
    assert own is not None, "every rank is in a part"
    return own


def arrange(
    rank: int, device: torch.device, layout: Layout, replicas: Replicas, *, experts: bool = True, alone: bool = False
) -> Ranks:
    """Return this rank's place among ``layout.gpus`` ranks; ``experts`` makes separate groups for routed experts."""
    groups = Groups()
    sizes = {name: getattr(layout, name) for name in DIMENSIONS}
    mesh = groups.mesh(device, sizes)
    fsdp = as_one(mesh, "dp", "cp")
    groups.made[along(numbered(sizes), 1, 2)] = fsdp.get_group()
    expert_sizes = {name: getattr(layout, name) for name in EXPERT_DIMENSIONS}
    if not experts:
        expert_sizes |= {"edp": layout.dp * layout.cp, "ep": 1, "etp": layout.tp}
        replicas = Replicas(replicas.dense, replicas.dense)
    expert_mesh = groups.mesh(device, expert_sizes)
    expert_fsdp = with_replicas(expert_mesh["edp"], replicas.experts)
    dense = with_replicas(fsdp, replicas.dense)
    return Ranks(rank, layout.gpus, device, mesh, dense, expert_mesh, expert_fsdp, alone)


def as_one(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Merge neighboring dimensions into one, with a new group only if several of them have more than one rank."""
    several = tuple(name for name in names if mesh[name].size() > 1) or names[:1]
    return mesh[several]._flatten("_".join(several))


def with_replicas(mesh: DeviceMesh, replicas: int) -> DeviceMesh:
    """Split a mesh into ``replicas`` groups of consecutive ranks; each group shards one replica."""
    if replicas == 1:
        return mesh
    return mesh._unflatten(0, (replicas, mesh.size() // replicas), ("replicate", "shard"))


def of_every_rank(value: Value, ranks: Ranks) -> list[Value]:
    """Return the values of all ranks, or only this rank's if it is alone. A collective."""
    values = [value]
    if not ranks.alone:
        values *= ranks.world_size
        dist.all_gather_object(values, value)
    return values


def of_first_rank(give: Callable[[], Value], ranks: Ranks) -> Value:
    """Call ``give`` on the first rank only, and return its result on all ranks. A collective."""
    shared: list[Any] = [give() if ranks.is_first else None]
    if not ranks.alone:
        dist.broadcast_object_list(shared, src=0, device=ranks.device)
    value: Value = shared[0]
    return value


def leave_ranks() -> None:
    """Wait for the other ranks, then disconnect; exit if that hangs. All work must be done before."""
    dist.barrier()
    sys.stdout.flush()
    deadline = threading.Timer(LONGEST_LEAVE_S, os._exit, (0,))
    deadline.daemon = True
    deadline.start()
    dist.destroy_process_group()
    deadline.cancel()
