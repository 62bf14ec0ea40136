# SPDX-License-Identifier: Apache-2.0
"""Linear layers with the same input, multiplied as one where their weights are side by side in memory.

One product instead of several: the input is read once, its gradient is written once instead of summed from several, and
matrix units prefer large products. Parameters keep their names and shapes, and so do checkpoints.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from llmb.engine.model.gradient_sum import GradientSum
from llmb.engine.model.local_shard import Linear, local_shard
from llmb.engine.typed_autograd import apply


class Joined:
    """Some linear layers of ``owner``, by name; not a module, so that parameters keep their names.

    weight: the local shards of the layers' weights as one matrix, [sum of outputs, inputs], in the memory of the
    parameters. None: each layer multiplies by itself, with its hooks. gradients: where the product adds the gradient of
    ``weight``; None for autograd's.
    """

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self.owner = owner
        self.names = names
        self.weight: Tensor | None = None
        self.gradients: GradientSum | None = None

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The layers as they are now: transformations replace them."""
        return tuple(getattr(self.owner, name) for name in self.names)

    def __call__(self, hidden: Tensor, head_dim: int | None = None) -> tuple[Tensor, ...]:
        """The outputs of the layers, in order; views of one tensor if multiplied as one.

        Each is [..., outputs], or [..., heads, head_dim]: then gradients of heads are written where the backward pass
        multiplies them, which the compiler would not do for parts of a last dimension that is unflattened later.
        """
        if self.weight is None:
            return tuple(as_heads(layer(hidden), head_dim) for layer in self.layers)
        return self.split(self.multiply(hidden), head_dim)

    def split(self, product: Tensor, head_dim: int | None) -> tuple[Tensor, ...]:
        """The outputs of the layers, from those of one product."""
        sizes = [len(local_shard(layer.weight)) for layer in self.layers]
        if head_dim is None:
            return torch.split(product, sizes, -1)
        return torch.split(as_heads(product, head_dim), [size // head_dim for size in sizes], -2)

    def multiply(self, hidden: Tensor) -> Tensor:
        """``hidden`` times the joined weight: [..., sum of outputs]."""
        if self.gradients is not None and self.weight is not None:
            return self.gradients.multiply(hidden, self.weight, local_shard(self.layers[0].weight))
        return functional.linear(hidden, self.matrix())

    def matrix(self) -> Tensor:
        """The joined weight; its gradient goes to the parameters, as views and not as copies."""
        matrix: Tensor = apply(_AsOne, self.weight, *(local_shard(layer.weight) for layer in self.layers))
        return matrix


def as_heads(outputs: Tensor, head_dim: int | None) -> Tensor:
    return outputs if head_dim is None else torch.unflatten(outputs, -1, (-1, head_dim))


class _JoinedContext(FunctionCtx):
    rows: list[int]


class _AsOne(torch.autograd.Function):
    """``weight``, with the gradients of ``parts``, which are its rows in the same memory."""

    # All tensors in one argument: where no part is trained, the compiler counts named arguments to see whether there is
    # a context, and would take the first of two parts for the weight.
    @staticmethod
    def forward(ctx: _JoinedContext, *weight_and_parts: Tensor) -> Tensor:
        weight, *parts = weight_and_parts
        ctx.rows = [len(part) for part in parts]
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _JoinedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.split(gradient, ctx.rows)


class SideBySide(Protocol):
    """Parameters in an order in which the weights of joined layers follow each other."""

    def joined(self, layers: Sequence[Linear]) -> Tensor:
        """The local shards of the layers' weights as one matrix, without a copy."""


def joined_layers(stage: nn.Module) -> Iterator[Joined]:
    """Layers of ``stage`` with the same input, whether multiplied as one or not."""
    for module in stage.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Joined))


def join_products(stages: Iterable[nn.Module], flat: SideBySide) -> None:
    """Multiplies layers with the same input as one, in place, where none has hooks or a product of its own.

    After all transformations, when parameters have their memory.
    """
    for stage in stages:
        for joined in joined_layers(stage):
            if all(map(is_plain, joined.layers)):
                joined.weight = flat.joined(joined.layers)


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer only multiplies: it has no adapter, no hook, and no product in FP8."""
    return type(layer) is Linear and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
