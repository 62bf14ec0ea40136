# SPDX-License-Identifier: Apache-2.0
"""Products in FP8 of routed experts, one product per expert, into one result.

torch's grouped FP8 product does not support e5m2 gradients. These are operators, so that recomputation can keep a
result as a whole, and none is copied from its parts. Tensors come with 1 over their scale, 0-d fp32.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from llmb.engine.precision.product import ALIGNED, Scaled, multiply
from llmb.runs.fp8_product import ProductDtype


@torch.library.custom_op("llmb::expert_products", mutates_args=())
def expert_products(
    rows: Tensor,
    rows_inverse: Tensor,
    matrices: Tensor,
    matrices_inverse: Tensor,
    counts: Sequence[int],
    fast: bool,
    product_dtype: str,
) -> Tensor:
    """Rows of all experts in order, [n, inputs], times the matrices, transposed: [experts, outputs, inputs].

    Returns [n, outputs] bf16. counts: rows of each expert. fast, product_dtype: see ``multiply``.
    """
    results = rows.new_empty((len(rows), matrices.shape[1]), dtype=torch.bfloat16)
    groups = zip(torch.split(rows, list(counts)), matrices, torch.split(results, list(counts)), strict=True)
    for taken, matrix, result in groups:
        operands = Scaled(taken, rows_inverse), Scaled(matrix, matrices_inverse).mT
        _multiply_into(result, *operands, fast=fast, product_dtype=product_dtype)
    return results


@expert_products.register_fake
def _(rows, _rows_inverse, matrices, _matrices_inverse, _counts, _fast, _product_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return rows.new_empty((len(rows), matrices.shape[1]), dtype=torch.bfloat16)


@torch.library.custom_op("llmb::expert_weight_gradients", mutates_args=())
def expert_weight_gradients(
    rows: Tensor,
    rows_inverse: Tensor,
    gradients: Tensor,
    gradients_inverse: Tensor,
    counts: Sequence[int],
    product_dtype: str,
) -> Tensor:
    """From rows and gradients of all experts in order, transposed: [inputs, n] and [outputs, n].

    Returns [experts, inputs, outputs] bf16.
    """
    results = rows.new_empty((len(counts), len(rows), len(gradients)), dtype=torch.bfloat16)
    groups = zip(*(torch.split(part, list(counts), 1) for part in (rows, gradients)), results, strict=True)
    for taken, given, result in groups:
        operands = Scaled(taken, rows_inverse), Scaled(given, gradients_inverse).mT
        _multiply_into(result, *operands, fast=False, product_dtype=product_dtype)
    return results


@expert_weight_gradients.register_fake
def _(rows, _rows_inverse, gradients, _gradients_inverse, counts, _product_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return rows.new_empty((len(counts), len(rows), len(gradients)), dtype=torch.bfloat16)


def _multiply_into(result: Tensor, left: Scaled, right: Scaled, *, fast: bool, product_dtype: str) -> None:
    """``multiply`` of operands that may be columns of larger matrices: only where it must are they copied."""
    column_major = right.values.t()
    if product_dtype == "fp8" and result.numel() and all(map(_fits, (left.values, column_major, result))):
        torch._scaled_mm(
            left.values,
            right.values,
            scale_a=left.inverse,
            scale_b=right.inverse,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
            out=result,
        )
        return
    operands = Scaled(left.values.contiguous(), left.inverse), Scaled(column_major.contiguous(), right.inverse).mT
    result.copy_(multiply(*operands, fast=fast, product_dtype=cast(ProductDtype, product_dtype)))


def _fits(matrix: Tensor) -> bool:
    """Whether a GPU's product takes a row-major matrix: all its rows, and columns if it is transposed, are aligned."""
    return bool(matrix.numel()) and not any(
        size % ALIGNED for size in (matrix.shape[1], matrix.stride(0), matrix.storage_offset())
    )
