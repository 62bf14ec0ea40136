# SPDX-License-Identifier: Apache-2.0
"""Local shards of parameters, and products of a sequence of which each tensor-parallel rank has a shard.

Of the sequence (Korthikanti et al., 2022, 4.2.2) a rank keeps only its shard for the backward pass, which gathers it
again: while it travels, the gradient of the whole input is computed, and while that is reduced and scattered, those of
the weights.

Compiled code has such a backward pass as one operator. The compiler would keep what the forward pass gathered instead
of gathering the same again, and is free to move products from between the start and the end of a collective.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from llmb.engine.collectives import Group, finish, start_gather, start_scatter
from llmb.engine.typed_autograd import apply, save_for_backward


def local_shard(parameter: Tensor, *, same_tokens: bool = False) -> Tensor:
    """This rank's shard of a tensor-parallel parameter (a DTensor), sharded or replicated; other parameters unchanged.

    Ranks with replicas of a parameter process different tokens, so each has a partial sum of the gradient; with
    ``same_tokens`` each has the full gradient.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    copied = Replicate() if same_tokens else Partial()
    gradient = [copied if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=gradient)
    return part


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that needs no gradient."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is sharded like ``parameter`` and has ``local`` as this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


SEQUENCE = 1
"""The dimension of hidden states, [batch, seq, hidden], that is sharded."""

Found = TypeVar("Found")


def gathered(shard: Tensor, group: Group) -> Tensor:
    """The whole sequence, without a gradient."""
    return finish(start_gather(shard, SEQUENCE, group), SEQUENCE)


def overlapped(
    shard: Tensor, group: Group, to_input: Callable[[], Tensor], to_weights: Callable[[Tensor], Found]
) -> tuple[Tensor, Found]:
    """The gradient of ``shard``, contiguous, and what ``to_weights`` finds.

    to_input: computes this rank's summand of the gradient of the whole sequence. to_weights: takes the whole sequence.
    """
    again = start_gather(shard, SEQUENCE, group)
    scattered = start_scatter(to_input(), SEQUENCE, group)
    of_weights = to_weights(finish(again, SEQUENCE))
    return finish(scattered, SEQUENCE).contiguous(), of_weights


def multiply_shard(shard: Tensor, weights: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """The products of the whole sequence with each of the weights, [outputs, inputs]: [batch, seq, outputs]."""
    products: tuple[Tensor, ...] = apply(_Multiply, shard, group, *weights)
    return products


def _gradients(
    gradients: list[Tensor], shard: Tensor, weights: list[Tensor], name: str, size: int, rank: int
) -> list[Tensor]:
    """Gradients of ``shard`` and of each of the weights, from those of the products."""

    def to_weights(whole: Tensor) -> list[Tensor]:
        return [gradient.flatten(0, -2).t() @ whole.flatten(0, -2) for gradient in gradients]

    to_shard, of_weights = overlapped(shard, Group(name, size, rank), lambda: _to_input(gradients, weights), to_weights)
    return [to_shard, *of_weights]


shard_gradients = torch.library.custom_op("llmb::shard_gradients", _gradients, mutates_args=())


@shard_gradients.register_fake
def _(_gradients: list[Tensor], shard: Tensor, weights: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (shard, *weights)]


def _to_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.view(-1, total.shape[-1]).addmm_(gradient.flatten(0, -2), weight)
    return total


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor | None, ...]
    needs_input_grad: tuple[bool, ...]
    group: Group


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, shard: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        trained = any(ctx.needs_input_grad[2:])
        save_for_backward(ctx, shard if trained else None, *weights)
        ctx.group = group
        whole = gathered(shard, group)
        return tuple(functional.linear(whole, weight) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shard, *weights = ctx.saved_tensors
        matrices = [weight for weight in weights if weight is not None]
        if shard is None:
            scattered = start_scatter(_to_input(gradients, matrices), SEQUENCE, ctx.group)
            return finish(scattered, SEQUENCE), None, *[None for _ in matrices]
        compute = shard_gradients if torch.compiler.is_compiling() else _gradients
        to_shard, *of_weights = compute(list(gradients), shard, matrices, *ctx.group)
        return to_shard, None, *of_weights
