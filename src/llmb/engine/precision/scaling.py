# SPDX-License-Identifier: Apache-2.0
"""Scales of FP8 tensors, casts and products, with delayed (Micikevicius et al., 2022, as in TransformerEngine) or
current scaling."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from llmb.engine.collectives import Group, all_reduce
from llmb.engine.kernels.elementwise import cast, cast_both_ways, largest_value
from llmb.runs.attention_choice import ProductDtype

INPUT, WEIGHT, GRADIENT = range(3)
"""Indices of the cast tensors of a layer; the last is the gradient of its output."""
FORMATS = (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2)
"""Formats of input, weight and gradient: precision for the forward pass, range for gradients (the hybrid format)."""
LARGEST = (448.0, 448.0, 57344.0)
"""The largest values of ``FORMATS``."""
OVERFLOW = (464.0, 464.0, 61440.0)
"""Half a step above ``LARGEST``: values between the two are rounded to ``LARGEST``."""
HISTORY_LENGTH = 1024
LARGEST_SCALE = torch.finfo(torch.float32).max
ALIGNED = 16
"""The GPU's product requires row lengths that are multiples of this many values."""


class Factor(NamedTuple):
    """The factors of a tensor: ``scale`` before its cast, and ``inverse`` after it; each 0-d fp32."""

    scale: Tensor
    inverse: Tensor


class Factors(NamedTuple):
    """The factors of a layer's ``INPUT``, ``WEIGHT`` and ``GRADIENT``."""

    input: Factor
    weight: Factor
    gradient: Factor

    @property
    def numbers(self) -> tuple[Tensor, ...]:
        return *self.input, *self.weight, *self.gradient

    @staticmethod
    def of(numbers: Sequence[Tensor]) -> "Factors":
        """Return the factors from ``numbers``: scale and inverse of input, weight and gradient, in this order."""
        return Factors(Factor(*numbers[:2]), Factor(*numbers[2:4]), Factor(*numbers[4:]))


class Scaled(NamedTuple):
    """An FP8 matrix, and 1 over the scale that it was multiplied by before the cast, 0-d fp32."""

    values: Tensor
    inverse: Tensor

    @property
    def mT(self) -> "Scaled":  # noqa: N802 (torch's name)
        return Scaled(self.values.mT, self.inverse)


class Cast(NamedTuple):
    """A layer's input or gradient, [rows, columns], in FP8."""

    values: Tensor
    transposed: Tensor | None
    """None if no product needs it."""
    inverse: Tensor
    amax: Tensor
    """Largest absolute value before the cast, 0-d fp32."""


def scale_from(amax: Tensor, largest: Tensor | float, otherwise: Tensor | float) -> Tensor:
    """Return the scale, at most ``LARGEST_SCALE``, from ``amax`` to ``largest``; ``otherwise`` if ``amax`` is zero or
    not finite. All fp32."""
    # torch divides a number by a tensor by multiplying with the reciprocal, which rounds twice.
    dividend = largest if isinstance(largest, Tensor) else torch.full_like(amax, largest)
    scale = (dividend / amax).clamp(max=LARGEST_SCALE)
    return torch.where((amax > 0) & amax.isfinite(), scale, otherwise)


def cast_tensor(
    values: Tensor, which: int, factor: Factor, *, delayed: bool, transposes: bool = True, group: Group | None = None
) -> Cast:
    """Cast a layer's ``INPUT`` or ``GRADIENT``, [rows, columns]. Only delayed scaling uses ``factor``; ``group``:
    ranks that share the rows."""
    dtype, (scale, inverse) = FORMATS[which], factor
    if not delayed:
        largest = largest_value(values)
        scale = scale_from(largest if group is None else all_reduce(largest, "max", group), LARGEST[which], 1.0)
        inverse = scale.reciprocal()
    if not transposes:
        return Cast(cast(values, scale, dtype), None, inverse, largest_value(values))
    scaled, transposed, amax = cast_both_ways(values, scale, dtype)
    return Cast(scaled, transposed, inverse, amax)


def multiply(left: Scaled, right: Scaled, *, fast: bool, product_dtype: ProductDtype) -> Tensor:
    """Return the unscaled product of row-major [m, k] and column-major [k, n], in bf16. ``fast`` allows less accurate
    accumulation."""
    rows, columns = left.values.shape[0], right.values.shape[1]
    if not left.values.numel() or not right.values.numel():
        return left.values.new_zeros(rows, columns, dtype=torch.bfloat16)
    if product_dtype != "fp8":
        dtype = torch.float32 if product_dtype == "fp32" else torch.bfloat16
        product = left.values.to(dtype) @ right.values.to(dtype)
        return (product.float() * left.inverse * right.inverse).bfloat16()
    product = torch._scaled_mm(
        _padded(left.values),
        _padded(right.values.t(), rows=columns).t(),
        scale_a=left.inverse,
        scale_b=right.inverse,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product[:, :columns]


def _padded(matrix: Tensor, *, rows: int = 0) -> Tensor:
    """Zero-pad the columns, and the rows if ``rows`` is their number, to multiples of ``ALIGNED``."""
    missing = (-matrix.shape[1] % ALIGNED, -rows % ALIGNED)
    if not any(missing):
        return matrix
    # As bytes, because torch cannot pad FP8; zero is a zero byte.
    return functional.pad(matrix.view(torch.uint8), (0, missing[0], 0, missing[1])).view(matrix.dtype)


class Scales:
    """Scales and largest absolute values of the layers' ``INPUT``, ``WEIGHT`` and ``GRADIENT``: [layers, 3] fp32."""

    def __init__(
        self,
        layers: int,
        device: torch.device,
        group: ProcessGroup,
        *,
        delayed: bool,
        length: int = HISTORY_LENGTH,
        leaders: Sequence[int] = (),
    ) -> None:
        self.group, self.delayed = group, delayed
        self.scale = torch.ones(layers, 3, device=device)
        # Each at a multiple of 16 bytes: compiled code would first copy others.
        self.factors = torch.ones(layers, 3, 2, 4, device=device)
        self.amax = torch.zeros(layers, 3, device=device)
        self.history = torch.zeros(layers, 3, length if delayed else 0, device=device)
        """Largest absolute values of the latest steps, [layers, 3, length], in any order."""
        self.frozen_weights: Tensor | None = None
        """Largest absolute values of frozen weights, [layers]; None until they are known."""
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Numbers of saturated tensors and of tensors with non-finite values in the last step, [2] int64."""
        self.largest, self.overflow = (torch.tensor(values, device=device) for values in (LARGEST, OVERFLOW))
        self.leaders = torch.tensor(leaders or range(layers), dtype=torch.int64, device=device)
        """For each layer, the first of the layers with which it shares scales."""
        self.leads = self.leaders == torch.arange(layers, device=device)

    def of_all(self, values: Tensor) -> Tensor:
        """Return for each layer the largest value of all layers that share its scales: [layers, ...]."""
        leaders = self.leaders.view(-1, *[1] * (values.ndim - 1)).expand_as(values)
        largest = torch.scatter_reduce(values, 0, leaders, values, "amax")
        return largest.index_select(0, self.leaders)

    def use(self) -> None:
        """Set the factors by which layers cast, and their inverses, from the scales."""
        self.factors[:, :, 0, 0] = self.scale
        torch.reciprocal(self.scale, out=self.factors[:, :, 1, 0])

    def of_layer(self, number: int) -> Factors:
        each = self.factors[number, :, :, 0]
        return Factors.of([each[which, part] for which in (INPUT, WEIGHT, GRADIENT) for part in (0, 1)])

    def freeze_weights(self, amax: Tensor) -> None:
        """Set the scales of weights permanently: every earlier step would have had the same ``amax``."""
        self.frozen_weights = amax = self.of_all(amax)
        self.scale[:, WEIGHT] = scale_from(amax, LARGEST[WEIGHT], 1.0)
        self.history[:, WEIGHT] = amax.unsqueeze(-1)

    def set_weights(self, amax: Tensor) -> None:
        """Set the scales of weights for one step, from their largest values in ``group``."""
        self.scale[:, WEIGHT] = scale_from(self.of_all(amax), LARGEST[WEIGHT], 1.0)

    def finish(self, step: int) -> None:
        """Update the counts and, with delayed scaling, the scales after a step; reset the all-reduced ``amax``."""
        amax = self.of_all(self.amax)
        finite, leads = amax.isfinite(), self.leads.unsqueeze(-1)
        self.counts[1] = (~finite & leads).sum()
        if self.delayed:
            self.counts[0] = (finite & leads & (amax * self.scale > self.overflow)).sum()
            self.history[:, :, step % self.history.shape[-1]] = amax
            self.scale.copy_(scale_from(self.history.amax(-1), self.largest, self.scale))
        self.amax.zero_()


class LayerScales:
    """One layer's part of ``Scales``. ``probe`` receives largest values as its gradient, so that passes have no side
    effects."""

    def __init__(self, scales: Scales, number: int) -> None:
        self.scales, self.delayed = scales, scales.delayed
        self.scale = scales.scale[number]
        self.factors = scales.of_layer(number)
        self.history = scales.history[number]
        self.amax = scales.amax[number, INPUT : GRADIENT + 1 : GRADIENT - INPUT]
        self.probe = self.add_probe()

    def add_probe(self) -> Tensor:
        """Return a probe for one product per backward pass: autograd would add the largest values of several."""
        probe = torch.zeros(2, device=self.amax.device, requires_grad=True)
        probe.register_post_accumulate_grad_hook(partial(_record, self.amax))
        return probe


def _record(amax: Tensor, probe: Tensor) -> None:
    assert probe.grad is not None
    torch.maximum(amax, probe.grad, out=amax)
    probe.grad = None


Kept = tuple[Tensor, Tensor]
"""A weight, or a stack of weights, in FP8, and the transpose of each matrix."""


class Fp8Matrix(nn.Module):
    """A matrix, or a stack of them, that is multiplied in FP8. ``kept``: the cast weight, or None."""

    def set_scales(self, layer_scales: LayerScales, product_dtype: ProductDtype) -> None:
        self.layer_scales, self.product_dtype = layer_scales, product_dtype
        self.kept: Kept | None = None

    def matrix(self) -> Tensor:
        """Return this rank's shard of the matrix or the stack."""
        raise NotImplementedError

    @torch.no_grad()
    def keep_weight(self) -> None:
        """Cast the gathered weight, and keep the cast until ``kept`` is reset."""
        if self.kept is None:
            self.kept = self.cast_weight(self.matrix())

    def cast_weight(self, weight: Tensor) -> Kept:
        values, transposed, _ = cast_both_ways(weight, self.layer_scales.factors.weight.scale, FORMATS[WEIGHT])
        return values, transposed
