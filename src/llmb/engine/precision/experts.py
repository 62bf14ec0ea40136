# SPDX-License-Identifier: Apache-2.0
"""Routed experts whose products are in FP8, with one scale for all matrices of a stack."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmb.engine.collectives import Context
from llmb.engine.kernels.elementwise import cast_activated, cast_activation_gradient
from llmb.engine.model.moe import Experts
from llmb.engine.precision.scaling import (
    ALIGNED,
    FORMATS,
    GRADIENT,
    INPUT,
    Cast,
    Fp8Matrix,
    Kept,
    LayerScales,
    Scaled,
    cast_tensor,
    multiply,
)
from llmb.runs.attention_choice import ProductDtype

GROUPED_CAPABILITY = (9, 0)
"""The only compute capability for which torch 2.13 has a grouped FP8 product with fp32 scales."""


@torch.library.custom_op("llmb::expert_products", mutates_args=())
def expert_products(
    rows: Tensor,
    rows_inverse: Tensor,
    matrices: Tensor,
    matrices_inverse: Tensor,
    counts: Sequence[int],
    fast: bool,
    product_dtype: str,
    grouped: bool = False,
) -> Tensor:
    """Return each expert's rows, [n, inputs], times its transposed matrix, [experts, outputs, inputs]: [n, outputs]
    bf16."""
    if grouped and supports_grouped(rows, matrices):
        return grouped_product(rows, rows_inverse, matrices, matrices_inverse, counts, fast)
    results = rows.new_empty((len(rows), matrices.shape[1]), dtype=torch.bfloat16)
    groups = zip(torch.split(rows, list(counts)), matrices, torch.split(results, list(counts)), strict=True)
    for expert_rows, matrix, result in groups:
        operands = Scaled(expert_rows, rows_inverse), Scaled(matrix, matrices_inverse).mT
        _multiply_into(result, *operands, fast=fast, product_dtype=product_dtype)
    return results


@expert_products.register_fake
def _(rows, _rows_inverse, matrices, _matrices_inverse, _counts, _fast, _product_dtype, _grouped=False):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return rows.new_empty((len(rows), matrices.shape[1]), dtype=torch.bfloat16)


def supports_grouped(rows: Tensor, matrices: Tensor) -> bool:
    """Return True if torch has a grouped product for these operands: aligned e4m3, not empty, capability 9.0."""
    in_e4m3 = rows.dtype == matrices.dtype == torch.float8_e4m3fn
    aligned = len(rows) > 0 and not any(size % ALIGNED for size in matrices.shape[1:])
    return in_e4m3 and aligned and rows.is_cuda and torch.cuda.get_device_capability(rows.device) == GROUPED_CAPABILITY


def grouped_product(
    rows: Tensor, rows_inverse: Tensor, matrices: Tensor, matrices_inverse: Tensor, counts: Sequence[int], fast: bool
) -> Tensor:
    """Return the result of ``expert_products`` from one product, with a scale for each row and each output."""
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, pin_memory=rows.is_cuda)
    return torch._scaled_grouped_mm(
        rows,
        matrices.mT,
        rows_inverse.expand(len(rows)).contiguous(),
        matrices_inverse.expand(matrices.shape[:2]).contiguous(),
        offs=ends.to(rows.device, non_blocking=True),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


@torch.library.custom_op("llmb::expert_weight_gradients", mutates_args=())
def expert_weight_gradients(
    rows: Tensor,
    rows_inverse: Tensor,
    gradients: Tensor,
    gradients_inverse: Tensor,
    counts: Sequence[int],
    product_dtype: str,
) -> Tensor:
    """Return gradients of the experts' matrices, [experts, inputs, outputs] bf16, from transposed [inputs, n] and
    [outputs, n]."""
    results = rows.new_empty((len(counts), len(rows), len(gradients)), dtype=torch.bfloat16)
    groups = zip(*(torch.split(part, list(counts), 1) for part in (rows, gradients)), results, strict=True)
    for inputs, outputs, result in groups:
        operands = Scaled(inputs, rows_inverse), Scaled(outputs, gradients_inverse).mT
        _multiply_into(result, *operands, fast=False, product_dtype=product_dtype)
    return results


@expert_weight_gradients.register_fake
def _(rows, _rows_inverse, gradients, _gradients_inverse, counts, _product_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return rows.new_empty((len(counts), len(rows), len(gradients)), dtype=torch.bfloat16)


def _multiply_into(result: Tensor, left: Scaled, right: Scaled, *, fast: bool, product_dtype: str) -> None:
    """Write the product to ``result``. Operands may be parts of larger matrices; they are copied only if necessary."""
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
    """Return True if the GPU's product supports a row-major matrix without a copy: not empty, all rows aligned."""
    return bool(matrix.numel()) and not any(
        size % ALIGNED for size in (matrix.shape[1], matrix.stride(0), matrix.storage_offset())
    )


class Fp8Stack(Fp8Matrix):
    """Multiplies rows in FP8 by a stack of matrices; the host must know the experts' numbers of rows."""

    groups = False

    def __init__(self, experts: Experts, name: str, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        super().__init__()
        # Not attributes: the experts have this as a submodule.
        self.matrices = partial(experts.matrices, name)
        self.parameter = partial(experts.get_parameter, name)
        self.set_scales(layer_scales, product_dtype)
        self.probes = layer_scales.probe, layer_scales.add_probe()

    @property
    def weight(self) -> Tensor:
        return self.parameter()

    def matrix(self) -> Tensor:
        return self.matrices()

    def forward(self, rows: Tensor, counts: list[int], part: int) -> Tensor:
        """Map the rows of all experts, in order, [n, inputs], to [n, outputs]; counts: rows of each expert."""
        product: Tensor = _Fp8GroupedProduct.apply(rows, self.matrix(), self.probes[part], self, counts)
        return product

    def cast(self, rows: Tensor, which: int, *, transposes: bool) -> Cast:
        scales = self.layer_scales
        return cast_tensor(rows, which, scales.factors[which], delayed=scales.delayed, transposes=transposes)

    def product(self, rows: Cast, matrices: Tensor, counts: list[int], *, fast: bool) -> Tensor:
        inverse = self.layer_scales.factors.weight.inverse
        operands = rows.values, rows.inverse, matrices, inverse
        result: Tensor = expert_products(*operands, counts, fast, self.product_dtype, self.groups)
        return result

    def weight_gradient(self, rows: Tensor, inverse: Tensor, gradient: Cast, counts: list[int]) -> Tensor:
        """Return the weights' gradient. rows: the input in FP8, transposed. inverse: 1 over the input's scale."""
        assert gradient.transposed is not None
        result: Tensor = expert_weight_gradients(
            rows, inverse, gradient.transposed, gradient.inverse, counts, self.product_dtype
        )
        return result


class _StackContext(Context):
    stack: Fp8Stack
    kept: Kept | None
    counts: list[int]


class _Fp8GroupedProduct(torch.autograd.Function):
    """y = x w, dx = dy w^T, dw = x^T dy for the rows of each expert."""

    @staticmethod
    def forward(
        ctx: _StackContext,
        rows: Tensor,
        weights: Tensor,
        probe: Tensor,  # noqa: ARG004 (used only for its gradient)
        stack: Fp8Stack,
        counts: list[int],
    ) -> Tensor:
        inputs = stack.cast(rows, INPUT, transposes=ctx.needs_input_grad[1])
        _, transposed = stack.kept or stack.cast_weight(weights)
        ctx.stack, ctx.kept, ctx.counts = stack, stack.kept, counts
        ctx.save_for_backward(inputs.transposed, weights, inputs.inverse, inputs.amax)
        return stack.product(inputs, transposed, counts, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: _StackContext, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        rows, weights, inverse, amax = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        scaled = ctx.stack.cast(gradient, GRADIENT, transposes=trained)
        values, _ = ctx.kept or ctx.stack.cast_weight(weights)
        to_rows = ctx.stack.product(scaled, values, ctx.counts, fast=False)
        to_weights = ctx.stack.weight_gradient(rows, inverse, scaled, ctx.counts) if trained else None
        return to_rows, to_weights, torch.stack((amax, scaled.amax)), None, None


def fp8_products(experts: Experts, rows: Tensor, counts: list[int], part: int) -> Tensor:
    """Return the outputs of experts, computed with FP8 products; see ``model.moe.Products``."""
    first, last = fp8_stacks(experts)
    output: Tensor = last(experts.activate(first(rows, counts, part)), counts, part)
    return output


def fused_fp8_products(experts: Experts, rows: Tensor, counts: list[int], part: int) -> Tensor:
    """Return ``fp8_products`` with activations cast as they are computed; requires trained matrices and delayed
    scaling."""
    first, last = stacks = fp8_stacks(experts)
    probes = first.probes[part], last.probes[part]
    outputs: Tensor = _Fp8Experts.apply(rows, first.matrix(), last.matrix(), *probes, stacks, counts)
    return outputs


def fp8_stacks(experts: Experts) -> tuple[Fp8Stack, Fp8Stack]:
    first, last = (experts.get_submodule(f"{name}_product") for name in ("gate_up_proj", "down_proj"))
    assert isinstance(first, Fp8Stack)
    assert isinstance(last, Fp8Stack)
    return first, last


class _ExpertsContext(Context):
    stacks: tuple[Fp8Stack, Fp8Stack]
    kept: list[Kept | None]
    counts: list[int]


class _Fp8Experts(torch.autograd.Function):
    """Two ``_Fp8GroupedProduct`` with SwiGLU between them: rows [n, hidden] in and out."""

    @staticmethod
    def forward(
        ctx: _ExpertsContext,
        rows: Tensor,
        first_weights: Tensor,
        last_weights: Tensor,
        first_probe: Tensor,  # noqa: ARG004 (used only for its gradient)
        last_probe: Tensor,  # noqa: ARG004
        stacks: tuple[Fp8Stack, Fp8Stack],
        counts: list[int],
    ) -> Tensor:
        first, last = stacks
        ctx.stacks, ctx.kept, ctx.counts = stacks, [first.kept, last.kept], counts
        inputs = first.cast(rows, INPUT, transposes=True)
        gate_up = first.product(inputs, (first.kept or first.cast_weight(first_weights))[1], counts, fast=True)
        scale, inverse = last.layer_scales.factors.input
        values, transposed, amax = cast_activated(gate_up, scale, "swiglu", FORMATS[INPUT])
        inner = Cast(values, transposed, inverse, amax)
        ctx.save_for_backward(inputs.transposed, inputs.amax, gate_up, transposed, amax, first_weights, last_weights)
        return last.product(inner, (last.kept or last.cast_weight(last_weights))[1], counts, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ExpertsContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, amax, gate_up, inner, inner_amax, *weights = ctx.saved_tensors
        (first, last), counts = ctx.stacks, ctx.counts
        matrices = [
            (kept or stack.cast_weight(weight))[0]
            for kept, stack, weight in zip(ctx.kept, ctx.stacks, weights, strict=True)
        ]
        scaled = last.cast(gradient, GRADIENT, transposes=True)
        to_inner = last.product(scaled, matrices[1], counts, fast=False)
        to_last = last.weight_gradient(inner, last.layer_scales.factors.input.inverse, scaled, counts)
        scale, inverse = first.layer_scales.factors.gradient
        values, transposed, largest = cast_activation_gradient(gate_up, to_inner, scale, "swiglu", FORMATS[GRADIENT])
        back = Cast(values, transposed, inverse, largest)
        to_rows = first.product(back, matrices[0], counts, fast=False)
        to_first = first.weight_gradient(rows, first.layer_scales.factors.input.inverse, back, counts)
        probes = torch.stack((amax, largest)), torch.stack((inner_amax, scaled.amax))
        return to_rows, to_first, to_last, *probes, None, None
