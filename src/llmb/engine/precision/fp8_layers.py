# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8: matrices, alone or joined; and with trained weights and delayed scaling, whose scales are known
before, what casts its results while it computes them.

- MLPs cast what the activation computes.
- Attention casts the gradients of query, key and value while it rotates them back.

These are classes that ``apply`` gives to modules, as FSDP does: parameters keep their names.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.engine.kernels.fp8_cast import Activation, cast_activated, cast_into
from llmb.engine.model.attention import Attention, Rotary, RotaryPosition
from llmb.engine.model.layers import GatedMLP, SquaredReluMLP
from llmb.engine.model.linear import Joined, Linear
from llmb.engine.model.shards import local_shard
from llmb.engine.precision.autograd import Fp8Activated, Fp8Rotated, Operands, ProductFunction, ProductKind, apply_to
from llmb.engine.precision.scaling import (
    FORMATS,
    INPUT,
    WEIGHT,
    Cast,
    Factor,
    Fp8Matrix,
    Kept,
    LayerScales,
    cast_tensor,
)
from llmb.runs.attention_choice import ProductDtype


class CastInput(NamedTuple):
    """A layer's input that is already cast.

    hidden: stands for it in the graph of gradients, [..., inputs]; its values are not read.
    """

    hidden: Tensor
    cast: Cast


class Fp8Linear(Fp8Matrix, Linear):
    """A matrix without bias; computes in FP8 what ``whole`` computes, [..., inputs] to [..., outputs], bf16.

    casts_again: the backward pass casts the input again, instead of keeping it; for one that is kept in bf16 anyway.
    """

    casts_again = False

    def __init__(self, whole: Linear, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight = whole.weight
        self.register_parameter("bias", None)
        self.adapter = None
        self.set_scales(layer_scales, product_dtype)

    @property
    def layers(self) -> tuple["Fp8Linear", ...]:
        return (self,)

    def matrix(self) -> Tensor:
        return local_shard(self.weight)

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
        return self.adapted(product_of(self, hidden), hidden)


class Fp8Joined(Joined):
    """Layers with the same input, which is cast once, for one product. They share their scales.

    kept: as of one layer; each layer has its part of it.
    """

    kept: Kept | None = None

    @property
    def layers(self) -> tuple[Fp8Linear, ...]:
        return tuple(getattr(self.owner, name) for name in self.names)

    def __call__(self, hidden: Tensor, head_dim: int | None = None) -> tuple[Tensor, ...]:
        return self.adapted(self.split(product_of(self, hidden), head_dim), hidden)

    @torch.no_grad()
    def keep_weight(self) -> None:
        """See ``Fp8Matrix``."""
        if self.kept is not None:
            return
        weights = [local_shard(layer.weight) for layer in self.layers]
        rows, columns = sum(map(len, weights)), weights[0].shape[1]
        values = weights[0].new_empty((rows, columns), dtype=FORMATS[WEIGHT])
        transposed = weights[0].new_empty((columns, rows), dtype=FORMATS[WEIGHT])
        amax = weights[0].new_empty((), dtype=torch.float32)
        first = 0
        for layer, weight in zip(self.layers, weights, strict=True):
            part = slice(first, first + len(weight))
            layer.kept = values[part], transposed[:, part]
            cast_into(weight, layer.layer_scales.factors.weight.scale, *layer.kept, amax)
            first += len(weight)
        self.kept = values, transposed


def operands(
    layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput, activation: Activation | None = None
) -> Operands:
    """Return the operands of a product with hidden, [..., inputs], whose values are cast if they are not yet."""
    first, *_ = layer.layers
    scales, group = first.layer_scales, first.group
    weights = [local_shard(each.weight) for each in layer.layers]
    if not isinstance(hidden, CastInput):
        # Only gradients of weights need the input's transpose.
        transposes = group is None and not first.casts_again and any(each.requires_grad for each in weights)
        rows, factor = hidden.detach().flatten(0, -2), scales.factors.input
        scaled = cast_tensor(rows, INPUT, factor, delayed=scales.delayed, transposes=transposes, group=group)
        hidden = CastInput(hidden, scaled)
    (values, transposed, inverse, amax), outputs = hidden.cast, tuple(map(len, weights))
    batch, rows = hidden.hidden.shape[0], hidden.hidden.flatten(0, -2)
    kind = ProductKind(scales.delayed, first.product_dtype, activation, group, batch, first.casts_again, outputs)
    factors = scales.factors._replace(input=Factor(scales.factors.input.scale, inverse))
    return Operands(rows, scales.probe, kind, weights, values, transposed, amax, factors, layer.kept)


def product_of(layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput) -> Tensor:
    """[..., sum of outputs]."""
    product: Tensor = apply_to(ProductFunction, operands(layer, hidden))
    return as_sequences(product, hidden)


def as_sequences(rows: Tensor, hidden: Tensor | CastInput) -> Tensor:
    """[..., seq, columns] as ``hidden`` is, of which ``rows`` may have whole sequences where it has shards."""
    shape = hidden.hidden.shape if isinstance(hidden, CastInput) else hidden.shape
    return torch.unflatten(rows, 0, (*shape[:-2], -1))


def cast_activation(first: Fp8Linear | Fp8Joined, last: nn.Module, hidden: Tensor, activation: Activation) -> CastInput:
    """The input of ``last``, cast: what the activation makes of the product of ``first``."""
    assert isinstance(last, Fp8Linear)
    product, activated = apply_to(Fp8Activated, operands(first, hidden, activation))
    scale, inverse = last.layer_scales.factors.input
    values, transposed, amax = cast_activated(product, scale, activation, FORMATS[INPUT])
    return CastInput(as_sequences(activated, hidden), Cast(values, transposed, inverse, amax))


class Fp8GatedMLP(GatedMLP):
    """Casts what the activation computes in one pass over memory."""

    def forward(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.gate_up, Fp8Joined)
        output: Tensor = self.down_proj(cast_activation(self.gate_up, self.down_proj, hidden, "swiglu"))
        return output


class Fp8SquaredReluMLP(SquaredReluMLP):
    """Casts what the activation computes in one pass over memory."""

    def forward(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.up_proj, Fp8Linear)
        output: Tensor = self.down_proj(cast_activation(self.up_proj, self.down_proj, hidden, "squared-relu"))
        return output


class RotatedAttention(Attention):
    """Attention of which only positions come between product and attention."""

    def rotated(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qkv, Fp8Joined)
        query, key, value = apply_to(Fp8Rotated, operands(self.qkv, hidden), *rotary.rotation, self.head_dim)
        return query, key, value


def only_rotates(attention: Attention) -> bool:
    return isinstance(attention.position, RotaryPosition) and attention.q_norm is None and not attention.biased
