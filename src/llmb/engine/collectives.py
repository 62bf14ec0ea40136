# SPDX-License-Identifier: Apache-2.0
"""Collectives with gradients, which can be compiled unless noted; in compiled
# SPDX-License-Identifier: Apache-2.0code, torch's own wrappers can lose gradients."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh

c10d = torch.ops._c10d_functional


class Context(FunctionCtx):
    """The attributes that autograd sets on a function's context. ``save_for_backward`` also accepts None."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    save_for_backward: Callable[..., None]


class Group(NamedTuple):
    """A process group as constants for the compiler; ``rank`` is this rank's position in it."""

    name: str
    size: int
    rank: int
    fused: bool = False
    """True if, on GPUs, torch's fused operators overlap products with communication."""


def group_of(mesh: DeviceMesh) -> Group:
    """Return the process group of a mesh with one dimension."""
    return Group(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())


def fuses(tensor: Tensor, group: Group) -> bool:
    """Return True if torch's fused operators multiply ``tensor`` while they gather it, or scatter the product."""
    return group.fused and tensor.is_cuda


def all_gather(shard: Tensor, dim: int, group: Group) -> Tensor:
    """Concatenate the shards of all ranks along ``dim``. Gradients are summed over the ranks."""
    gathered: Tensor = _AllGather.apply(shard, dim, group)
    return gathered


def reduce_scatter(full: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's shard, along ``dim``, of the sum over the ranks."""
    shard: Tensor = _ReduceScatter.apply(full, dim, group)
    return shard


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Exchange rows: ``sent[i]`` rows go to rank i, ``received[i]`` come from it. Compiled code cannot call this."""
    return finish_all_to_all(start_all_to_all(rows, sent, received, group))


def start_all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Begin ``all_to_all``; pass the result only to ``finish_all_to_all``."""
    started: Tensor = _StartAllToAll.apply(rows, sent, received, group)
    return started


def finish_all_to_all(started: Tensor, start: object = None) -> Tensor:
    """Return the exchanged rows. ``start``: the ``grad_fn`` of ``start_all_to_all``'s result, if hooks have replaced
    it."""
    exchanged: Tensor = _FinishAllToAll.apply(started, start or started.grad_fn)
    return exchanged


def rank_sum(summand: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks; its gradient, equal on all ranks, is the gradient of each summand."""
    total: Tensor = _RankSum.apply(summand, group)
    return total


def gradient_sum(tensor: Tensor, group: Group) -> Tensor:
    """Return the input, which is the same on all ranks. Its gradients, which differ, are summed over the ranks."""
    same: Tensor = _GradientSum.apply(tensor, group)
    return same


def all_reduce(tensor: Tensor, how: Literal["sum", "max"], group: Group) -> Tensor:
    """Return the sum or the maximum over the ranks, without a gradient."""
    reduced: Tensor = c10d.wait_tensor(c10d.all_reduce(tensor.contiguous(), how, group.name))
    return reduced


class _CollectiveContext(FunctionCtx):
    dim: int
    group: Group


class _StartContext(FunctionCtx):
    sent: list[int]
    received: list[int]
    group: Group
    gradient: Tensor
    """The gradient that other ranks are sending."""


class _FinishContext(FunctionCtx):
    start: _StartContext


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CollectiveContext, shard: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(shard, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CollectiveContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scattered(gradient, ctx.dim, ctx.group), None, None


class _RankSum(torch.autograd.Function):
    @staticmethod
    def forward(_: _CollectiveContext, summand: Tensor, group: Group) -> Tensor:
        return all_reduce(summand, "sum", group)

    @staticmethod
    @once_differentiable
    def backward(_: _CollectiveContext, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GradientSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CollectiveContext, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CollectiveContext, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, "sum", ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _CollectiveContext, full: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _scattered(full, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _CollectiveContext, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradient, ctx.dim, ctx.group), None, None


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _StartContext, rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchanging(rows, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _StartContext, _: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = c10d.wait_tensor(ctx.gradient)
        del ctx.gradient  # contexts live as long as the loss
        return gradient, None, None, None


class _FinishAllToAll(torch.autograd.Function):
    """Passes the gradient through the context of ``_StartAllToAll``: autograd would reject one with another number of
    rows."""

    @staticmethod
    def forward(ctx: _FinishContext, started: Tensor, start: _StartContext) -> Tensor:
        ctx.start = start
        exchanged: Tensor = c10d.wait_tensor(started)
        return exchanged.view_as(started)

    @staticmethod
    @once_differentiable
    def backward(ctx: _FinishContext, gradient: Tensor) -> tuple[Tensor, None]:
        start = ctx.start
        start.gradient = _exchanging(gradient, start.received, start.sent, start.group)
        return gradient, None


def _exchanging(rows: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    started: Tensor = c10d.all_to_all_single(rows.contiguous(), received, sent, group.name)
    return started


# Collectives work along dimension 0. Moving the dimension there copies nothing if the dimensions before it have size 1.


def start_gather(shard: Tensor, dim: int, group: Group) -> Tensor:
    """Begin to gather the shards along ``dim``, without a gradient; pass the result to ``finish``."""
    started: Tensor = c10d.all_gather_into_tensor(shard.movedim(dim, 0).contiguous(), group.size, group.name)
    return started


def start_scatter(full: Tensor, dim: int, group: Group) -> Tensor:
    """Begin to sum over the ranks and scatter along ``dim``, without a gradient; pass the result to ``finish``."""
    rows = full.movedim(dim, 0).contiguous()
    started: Tensor = c10d.reduce_scatter_tensor(rows, "sum", group.size, group.name)
    return started


def finish(started: Tensor, dim: int) -> Tensor:
    """Wait for a result of ``start_gather`` or ``start_scatter``; return it with the dimensions in order."""
    completed: Tensor = c10d.wait_tensor(started)
    return completed.movedim(0, dim)


def _gathered(shard: Tensor, dim: int, group: Group) -> Tensor:
    return finish(start_gather(shard, dim, group), dim)


def _scattered(full: Tensor, dim: int, group: Group) -> Tensor:
    return finish(start_scatter(full, dim, group), dim)
