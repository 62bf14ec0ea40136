# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose three products are in FP8, alone or joined."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.engine.kernels.arguments import Activation
from llmb.engine.kernels.fp8_cast import cast_activated, cast_both_ways, cast_into
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.joined import Joined
from llmb.engine.model.local_shard import Linear, local_shard
from llmb.engine.precision.autograd import Fp8Activated, Operands, ProductFunction
from llmb.engine.precision.layer_scales import LayerScales
from llmb.engine.precision.product import Cast, cast_tensor
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.engine.typed_autograd import apply
from llmb.runs.fp8_product import ProductDtype

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

    kept: the cast weight, if kept for the micro-batches of a step; else the weight is cast at every use.
    """

    def __init__(self, whole: Linear, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight = whole.weight
        self.register_parameter("bias", None)
        self.layer_scales = layer_scales
        self.factors, self.probe = layer_scales.factors, layer_scales.probe
        self.delayed, self.product_dtype = layer_scales.scales.delayed, product_dtype
        self.kept: Kept | None = None

    @property
    def layers(self) -> tuple["Fp8Linear", ...]:
        return (self,)

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
        return product_of(self, hidden)

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

    def __call__(self, hidden: Tensor | CastInput, head_dim: int | None = None) -> tuple[Tensor, ...]:
        return self.split(product_of(self, hidden), head_dim)

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

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
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

    def forward(self, hidden: Tensor | CastInput) -> Tensor:
        output: Tensor = self.down_proj(cast_activation(self.first, self.down_proj, hidden, "squared-relu"))
        return output


def as_fp8(layer: nn.Module) -> Fp8Linear:
    assert isinstance(layer, Fp8Linear)
    return layer


def cast_activation(
    first: Fp8Linear | Fp8Joined, last: Fp8Linear, hidden: Tensor | CastInput, activation: Activation
) -> CastInput:
    """The input of ``last``, cast: what the activation makes of the product of ``first``."""
    product, activated = apply(Fp8Activated, *operands(first, hidden, activation))
    scale, inverse = last.factors[INPUT]
    values, transposed, amax = cast_activated(product, scale, activation, FORMATS[INPUT])
    return CastInput(torch.unflatten(activated, 0, shape_of(hidden)[:-1]), Cast(values, transposed, inverse, amax))


def product_of(layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput) -> Tensor:
    """[..., sum of outputs]."""
    product: Tensor = apply(ProductFunction, *operands(layer, hidden))
    return torch.unflatten(product, 0, shape_of(hidden)[:-1])


def shape_of(hidden: Tensor | CastInput) -> torch.Size:
    return hidden.hidden.shape if isinstance(hidden, CastInput) else hidden.shape


def operands(
    layer: Fp8Linear | Fp8Joined, hidden: Tensor | CastInput, activation: Activation | None = None
) -> tuple[object, ...]:
    """For the functions of ``autograd``."""
    first, *_ = layer.layers
    weights = [local_shard(each.weight) for each in layer.layers]
    if not isinstance(hidden, CastInput):
        # Only gradients of weights need the input's transpose.
        trained = any(weight.requires_grad for weight in weights)
        rows = hidden.detach().flatten(0, -2)
        taken = cast_tensor(rows, INPUT, first.factors[INPUT], delayed=first.delayed, transposes=trained)
        hidden = CastInput(hidden, taken)
    kept, kept_transposed = layer.kept or (None, None)
    found = Operands(
        hidden=hidden.hidden.flatten(0, -2),
        values=hidden.cast.values,
        transposed=hidden.cast.transposed,
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
    )
    return *found, *weights
