# SPDX-License-Identifier: Apache-2.0
"""One rank of a layout without the others: collectives complete immediately, and values are meaningless."""

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.engine.device import local_device
from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.runs.plan import EnginePlan


def pretend_others(plan: EnginePlan) -> Ranks:
    """Set up and return the only rank of ``plan`` that runs."""
    rank, device = plan.recipe.pretended_rank, local_device(plan.device)
    assert rank is not None, "all ranks are there"
    stand_in(device.type)
    return lone_rank(plan, rank, device)


def lone_rank(plan: EnginePlan, rank: int, device: torch.device) -> Ranks:
    """Set up and return ``rank`` without the others. This works once per process, because torch caches meshes."""
    recipe = plan.recipe
    dist.init_process_group("fake", rank=rank, world_size=recipe.layout.gpus, store=FakeStore())
    replicas = plan.parallelism.replicas(recipe.layout)
    return arrange(rank, device, recipe.layout, replicas, experts=recipe.model.moe is not None, alone=True)


@cache  # the replacement ends when the library is freed
def stand_in(device: str) -> torch.library.Library:
    """Make torch's fake collectives on ``device`` fill their results with valid values."""
    library = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that operators are replaced
        for name, function in OPERATORS.items():
            library.impl(name, function, device.upper(), allow_override=True)
    return library


@torch.no_grad()
def _receive(tensors: list[Tensor], *_: object) -> torch.ScriptObject:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.fill_(1)  # a vote of torch's pipeline stages that all know the shapes
    return FakeWork().boxed()


@torch.no_grad()
def _gather(output: Tensor, shard: Tensor, group: torch.ScriptObject, *_: object) -> tuple[Tensor, torch.ScriptObject]:
    places, rank = output.view(-1, shard.numel()), dist.ProcessGroup.unbox(group).rank()
    is_there = places[rank].data_ptr() == shard.data_ptr()
    for others in (places[:rank], places[rank + 1 :]) if is_there else (places,):
        others.copy_(shard.view(1, -1))
    return output, FakeWork().boxed()


@torch.no_grad()
def _scatter(output: Tensor, full: Tensor, group: torch.ScriptObject, *_: object) -> tuple[Tensor, torch.ScriptObject]:
    output.copy_(full.view(-1, *output.shape)[dist.ProcessGroup.unbox(group).rank()])
    return output, FakeWork().boxed()


def _several(
    one: Callable[..., Any], outputs: list[Tensor], inputs: list[Tensor], *group: object
) -> torch.ScriptObject:
    for output, own in zip(outputs, inputs, strict=True):
        one(output, own, *group)
    return FakeWork().boxed()


@torch.no_grad()
def _exchange(output: Tensor, rows: Tensor, *_: object) -> torch.ScriptObject:
    received, sent = output.view(-1), rows.view(-1)
    same = min(len(received), len(sent))
    received[:same].copy_(sent[:same])
    received[same:].zero_()
    return FakeWork().boxed()


OPERATORS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "recv_": _receive,
        "_allgather_base_": _gather,
        "allgather_into_tensor_coalesced_": partial(_several, _gather),
        "_reduce_scatter_base_": _scatter,
        "reduce_scatter_tensor_coalesced_": partial(_several, _scatter),
        "alltoall_base_": _exchange,
    }
)
"""Substitutes for torch's fake collectives, by name."""
