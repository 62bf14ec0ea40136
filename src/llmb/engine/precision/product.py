# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 and products of FP8 matrices."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from llmb.engine.kernels.fp8_cast import cast, cast_both_ways, largest_value
from llmb.engine.precision.scaling import FORMATS, LARGEST, Factor, scale_from
from llmb.runs.fp8_product import ProductDtype

ALIGNED = 16
"""Row lengths in values must be multiples of it for the GPU's product."""


class Scaled(NamedTuple):
    """An FP8 matrix, and 1 over the scale that it was multiplied by before the cast, 0-d fp32."""

    values: Tensor
    inverse: Tensor

    @property
    def mT(self) -> "Scaled":  # noqa: N802 (torch's name)
        return Scaled(self.values.mT, self.inverse)


class Cast(NamedTuple):
    """A layer's input or gradient, [rows, columns], in FP8.

    transposed: None where no product needs it. amax: the largest absolute value before the cast, 0-d fp32.
    """

    values: Tensor
    transposed: Tensor | None
    inverse: Tensor
    amax: Tensor


def cast_tensor(values: Tensor, which: int, factor: Factor, *, delayed: bool, transposes: bool = True) -> Cast:
    """A layer's input or gradient in its format.

    factor: by the scale of the layer's tensor; with current scaling it is computed from the tensor.
    """
    dtype, (scale, inverse) = FORMATS[which], factor
    if not delayed:
        scale = scale_from(largest_value(values), LARGEST[which], 1.0)
        inverse = scale.reciprocal()
    if not transposes:
        return Cast(cast(values, scale, dtype), None, inverse, largest_value(values))
    scaled, transposed, amax = cast_both_ways(values, scale, dtype)
    return Cast(scaled, transposed, inverse, amax)


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
    """Zero-pads the columns, and the rows if given, to multiples of ``ALIGNED``."""
    missing = (-matrix.shape[1] % ALIGNED, -rows % ALIGNED)
    if not any(missing):
        return matrix
    # As bytes, because torch cannot pad FP8; zero is a zero byte.
    return functional.pad(matrix.view(torch.uint8), (0, missing[0], 0, missing[1])).view(matrix.dtype)
