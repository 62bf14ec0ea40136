# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 and products of FP8 matrices."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llmb.engine.precision.scaling import FORMATS, LARGEST, scale_from
from llmb.runs.fp8_product import ProductDtype

ALIGNED = 16
"""Row lengths in values must be multiples of it for the GPU's product."""


class Scaled(NamedTuple):
    """An FP8 matrix, and the scale that it was multiplied by before the cast, 0-d fp32."""

    values: Tensor
    scale: Tensor

    @property
    def mT(self) -> "Scaled":  # noqa: N802 (torch's name)
        return Scaled(self.values.mT, self.scale)


def largest_value(values: Tensor) -> Tensor:
    """Largest absolute value; 0-d fp32, NaN if any value is NaN."""
    return values.abs().amax().float() if values.numel() else values.new_zeros((), dtype=torch.float32)


def cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``values`` times ``scale``. Values beyond the range of ``dtype`` are clamped."""
    largest = torch.finfo(dtype).max
    # Casts of larger values differ between versions and devices of torch.
    return (values.float() * scale).clamp(-largest, largest).to(dtype)


def cast_with_amax(values: Tensor, which: int, scale: Tensor, *, delayed: bool) -> tuple[Scaled, Tensor]:
    """A layer's input or gradient in its format, and its largest absolute value.

    scale: of the layer's tensors, [3]; with current scaling it is computed from the tensor.
    """
    amax = largest_value(values)
    own = scale[which] if delayed else scale_from(amax, LARGEST[which], 1.0)
    return Scaled(cast(values, own, FORMATS[which]), own), amax


def multiply(left: Scaled, right: Scaled, *, fast: bool, product_dtype: ProductDtype) -> Tensor:
    """The product of the two unscaled matrices, [m, k] and [k, n], accumulated in fp32 and rounded to bf16.

    left: row-major. right: column-major; a GPU of compute capability 9 supports no other order. fast: accumulates with
    fewer bits if the device can. product_dtype: both matrices are cast to it, which is exact; bf16 rounds the result
    twice, before and after the scales are divided out, the others once.
    """
    rows, columns = left.values.shape[0], right.values.shape[1]
    if not left.values.numel() or not right.values.numel():
        return left.values.new_zeros(rows, columns, dtype=torch.bfloat16)
    if product_dtype != "fp8":
        dtype = torch.float32 if product_dtype == "fp32" else torch.bfloat16
        product = left.values.to(dtype) @ right.values.to(dtype)
        return (product.float() / left.scale / right.scale).bfloat16()
    product = torch._scaled_mm(
        _padded(left.values),
        _padded(right.values.t(), rows=columns).t(),
        scale_a=left.scale.reciprocal(),
        scale_b=right.scale.reciprocal(),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product[:, :columns]


def _padded(matrix: Tensor, *, rows: int = 0) -> Tensor:
    """Zero-pads the columns, and the rows if given, to multiples of ``ALIGNED``."""
    missing = (-matrix.shape[1] % ALIGNED, -rows % ALIGNED)
    if not any(missing):
        return matrix
    # As bytes, because torch cannot pad FP8; zero is a zero byte.
    return functional.pad(matrix.view(torch.uint8), (0, missing[0], 0, missing[1])).view(matrix.dtype)
