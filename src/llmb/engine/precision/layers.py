# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8: matrices, alone or joined; and with trained weights and delayed scaling, whose scales are known
before, what casts its results while it computes them.

- MLPs cast what the activation computes.
- Attention casts the gradients of query, key and value while it rotates them back.

Each takes the modules of the layer that it replaces: parameters keep their names.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.engine.kernels.arguments import Activation
from llmb.engine.kernels.fp8_cast import cast_activated, cast_both_ways, cast_into
from llmb.engine.model.attention import Attention, Rotary, RotaryPosition
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.linear import Joined, Linear
from llmb.engine.model.local_shard import local_shard
from llmb.engine.precision.autograd import (
    Fp8Activated,
    Fp8Rotated,
    Operands,
    ProductFunction,
)
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Cast, LayerScales, cast_tensor
from llmb.engine.typed_autograd import apply
from llmb.runs.attention import ProductDtype

Kept = tuple[Tensor, Tensor]
"""A weight in FP8 and its transpose, [outputs, inputs] and [inputs, outputs]."""


class CastInput(NamedTuple):
    """A layer's input that is already cast.

    hidden: stands for it in the graph of gradients, [..., inputs]; its values are not read.
    """

    hidden: Tensor
    cast: Cast


class Fp8Linear(Linear):
    """A matrix without bias; computes in FP8 what ``whole`` computes, [..., inputs] to [..., outputs], bf16.

    kept: the cast weight, if kept for the micro-batches of a step; else the weight is cast at every use. casts_again:
    the backward pass casts the input again, instead of keeping it; for one that is kept in bf16 anyway.
    """

    casts_again = False

    def __init__(self, whole: Linear, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight = whole.weight
        self.register_parameter("bias", None)
        self.adapter = None
        self.layer_scales = layer_scales
        self.factors, self.probe = layer_scales.factors, layer_scales.probe
        self.delayed, self.product_dtype = layer_scales.scales.delayed, product_dtype
        self.kept: Kept | None = None

    @property
    def layers(self) -> tuple["Fp8Linear", ...]:
        return (self,)

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
        return self.adapted(product_of(self, hidden), hidden)

    @torch.no_grad()
    def keep_weight(self) -> None:
        """Casts the weight, which must be gathered, once for many products."""
        if self.kept is None:
            values, transposed, _ = cast_both_ways(
                local_shard(self.weight), self.factors[WEIGHT].scale, FORMATS[WEIGHT]
            )
            self.kept = values, transposed


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
        """See ``Fp8Linear``."""
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
            cast_into(weight, layer.factors[WEIGHT].scale, *layer.kept, amax)
            first += len(weight)
        self.kept = values, transposed


def operands(
    layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput, activation: Activation | None = None
) -> tuple[object, ...]:
    """For functions of ``autograd``, from hidden [..., inputs]: ``Operands``, then weights, [outputs, inputs] each."""
    first, *_ = layer.layers
    weights = [local_shard(each.weight) for each in layer.layers]
    if not isinstance(hidden, CastInput):
        # Only gradients of weights need the input's transpose.
        transposes = first.group is None and not first.casts_again and any(each.requires_grad for each in weights)
        rows, group = hidden.detach().flatten(0, -2), first.group
        factor = first.factors[INPUT]
        taken = cast_tensor(rows, INPUT, factor, delayed=first.delayed, transposes=transposes, group=group)
        hidden = CastInput(hidden, taken)
    kept, kept_transposed = layer.kept or (None, None)
    found = Operands(
        hidden=hidden.hidden.flatten(0, -2),
        values=hidden.cast.values,
        transposed=hidden.cast.transposed,
        casts_again=first.casts_again,
        input_scale=first.factors[INPUT].scale,
        input_inverse=hidden.cast.inverse,
        input_amax=hidden.cast.amax,
        kept=kept,
        kept_transposed=kept_transposed,
        weight_scale=first.factors[WEIGHT].scale,
        weight_inverse=first.factors[WEIGHT].inverse,
        gradient_scale=first.factors[GRADIENT].scale,
        gradient_inverse=first.factors[GRADIENT].inverse,
        probe=first.probe,
        delayed=first.delayed,
        product_dtype=first.product_dtype,
        activation=activation,
        group=first.group,
        batch=hidden.hidden.shape[0],
    )
    return *found, *weights


def product_of(layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput) -> Tensor:
    """[..., sum of outputs]."""
    product: Tensor = apply(ProductFunction, *operands(layer, hidden))
    return as_sequences(product, hidden)


def as_sequences(rows: Tensor, hidden: Tensor | CastInput) -> Tensor:
    """[..., seq, columns] as ``hidden`` is, of which ``rows`` may have whole sequences where it has shards."""
    shape = hidden.hidden.shape if isinstance(hidden, CastInput) else hidden.shape
    return torch.unflatten(rows, 0, (*shape[:-2], -1))


def as_fp8(layer: nn.Module) -> Fp8Linear:
    assert isinstance(layer, Fp8Linear)
    return layer


class Fp8GatedMLP(GatedMLP):
    """Casts what the activation computes in one pass over memory; takes the matrices of ``whole``.

    For trained weights and delayed scaling: then the scales are known before.
    """

    down_proj: Fp8Linear

    def __init__(self, whole: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = whole.gate_proj, whole.up_proj, as_fp8(whole.down_proj)
        self.gate_up = Fp8Joined(self, "gate_proj", "up_proj")

    @property
    def first(self) -> Fp8Joined:
        """What multiplies the input."""
        assert isinstance(self.gate_up, Fp8Joined)
        return self.gate_up

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(cast_activation(self.first, self.down_proj, hidden, "swiglu"))
        return output


class Fp8SquaredReluMLP(SquaredReluMLP):
    """Likewise."""

    down_proj: Fp8Linear

    def __init__(self, whole: SquaredReluMLP) -> None:
        nn.Module.__init__(self)
        self.up_proj, self.down_proj = whole.up_proj, as_fp8(whole.down_proj)

    @property
    def first(self) -> Fp8Linear:
        """What multiplies the input."""
        return as_fp8(self.up_proj)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(cast_activation(self.first, self.down_proj, hidden, "squared-relu"))
        return output


def cast_activation(first: Fp8Linear | Fp8Joined, last: Fp8Linear, hidden: Tensor, activation: Activation) -> CastInput:
    """The input of ``last``, cast: what the activation makes of the product of ``first``."""
    product, activated = apply(Fp8Activated, *operands(first, hidden, activation))
    scale, inverse = last.factors[INPUT]
    values, transposed, amax = cast_activated(product, scale, activation, FORMATS[INPUT])
    return CastInput(as_sequences(activated, hidden), Cast(values, transposed, inverse, amax))


class RotatedAttention(Attention):
    """``whole``, of which only positions come between product and attention, and whose modules it takes."""

    def __init__(self, whole: Attention) -> None:
        nn.Module.__init__(self)
        assert only_rotates(whole)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = whole.q_proj, whole.k_proj, whole.v_proj, whole.o_proj
        self.qkv = Fp8Joined(self, *whole.qkv.names)
        self.qkv_adapter, self.q_norm, self.k_norm = None, None, None
        self.head_dim, self.position, self.core = whole.head_dim, whole.position, whole.core

    def rotated(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(self.qkv, Fp8Joined)
        assert isinstance(self.position, RotaryPosition)
        batch = hidden.shape[0]
        more = *rotary.rotation, self.head_dim, batch
        query, key, value = apply(Fp8Rotated, *operands(self.qkv, hidden), *more)
        return query, key, value


def only_rotates(attention: Attention) -> bool:
    return isinstance(attention.position, RotaryPosition) and attention.q_norm is None
