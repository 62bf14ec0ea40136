# SPDX-License-Identifier: Apache-2.0
"""Routed experts whose products are in FP8: one product per expert, with one scale for all matrices of a layer."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.kernels.fp8_cast import cast
from llmb.engine.model.moe import Experts
from llmb.engine.precision.layer_scales import LayerScales
from llmb.engine.precision.product import Scaled, cast_tensor, multiply
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.runs.fp8_product import ProductDtype


class Fp8Stack(nn.Module):
    """Computes in FP8 the products of one of the stacked matrices of ``experts``; see ``Fp8Linear``.

    torch's grouped FP8 product does not support e5m2 gradients, so experts are multiplied one after the other; the host
    must know their numbers of rows.
    """

    def __init__(self, experts: Experts, name: str, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        super().__init__()
        # Not attributes: the experts have this as a submodule.
        self.matrices = partial(experts.matrices, name)
        self.parameter = partial(experts.get_parameter, name)
        self.layer_scales, self.product_dtype = layer_scales, product_dtype
        self.kept: tuple[Tensor, Tensor] | None = None

    @property
    def weight(self) -> Tensor:
        return self.parameter()

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """[n, inputs] of all experts, in order, to [n, outputs]; counts: rows of each."""
        product: Tensor = _Fp8GroupedProduct.apply(  # type: ignore[no-untyped-call]
            rows,
            self.matrices(),
            self.kept,
            self.layer_scales,
            self.layer_scales.probe,
            counts,
            self.product_dtype,
        )
        return product

    @torch.no_grad()
    def keep_weight(self) -> None:
        """Casts the matrices, which must be gathered, once for many products."""
        if self.kept is None:
            self.kept = cast_both_ways(self.matrices(), self.layer_scales.factors[WEIGHT].scale)


def cast_both_ways(weights: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stacked matrices in FP8, and each of them transposed."""
    values = cast(weights, scale, FORMATS[WEIGHT])
    return values, values.mT.contiguous()


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    kept: tuple[Tensor, Tensor] | None
    layer_scales: LayerScales
    counts: list[int]
    product_dtype: ProductDtype


class _Fp8GroupedProduct(torch.autograd.Function):
    """y = x w, dx = dy w^T, dw = x^T dy for the rows of each expert."""

    @staticmethod
    def forward(
        ctx: _Context,
        rows: Tensor,
        weights: Tensor,
        kept: tuple[Tensor, Tensor] | None,
        layer_scales: LayerScales,
        probe: Tensor,  # noqa: ARG004 (used only for its gradient)
        counts: list[int],
        product_dtype: ProductDtype,
    ) -> Tensor:
        taken, amax = cast_rows(rows, INPUT, layer_scales)
        _, transposed = kept or cast_both_ways(weights, layer_scales.factors[WEIGHT].scale)
        ctx.kept, ctx.layer_scales, ctx.counts, ctx.product_dtype = kept, layer_scales, counts, product_dtype
        ctx.save_for_backward(taken.values, weights, taken.inverse, amax)
        columns = [Scaled(matrix, layer_scales.factors[WEIGHT].inverse).mT for matrix in transposed]
        return torch.cat(each_product(parts(taken, counts), columns, fast=True, product_dtype=product_dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None, Tensor, None, None]:
        rows, weights, rows_inverse, rows_amax = ctx.saved_tensors
        given, amax = cast_rows(gradient, GRADIENT, ctx.layer_scales)
        values, _ = ctx.kept or cast_both_ways(weights, ctx.layer_scales.factors[WEIGHT].scale)
        inverse = ctx.layer_scales.factors[WEIGHT].inverse
        product = partial(each_product, fast=False, product_dtype=ctx.product_dtype)
        gradients = parts(given, ctx.counts)
        to_rows = product(gradients, [Scaled(matrix, inverse).mT for matrix in values])
        to_weights = None
        if ctx.needs_input_grad[1]:
            columns = [turned(part).mT for part in parts(Scaled(rows, rows_inverse), ctx.counts)]
            to_weights = torch.stack(product(columns, [turned(part) for part in gradients]))
        return torch.cat(to_rows), to_weights, None, None, torch.stack((rows_amax, amax)), None, None


def cast_rows(rows: Tensor, which: int, layer_scales: LayerScales) -> tuple[Scaled, Tensor]:
    """Rows of all experts in their format, and their largest absolute value."""
    delayed = layer_scales.scales.delayed
    found = cast_tensor(rows, which, layer_scales.factors[which], delayed=delayed, transposes=False)
    return Scaled(found.values, found.inverse), found.amax


def parts(rows: Scaled, counts: list[int]) -> list[Scaled]:
    """The rows of each expert."""
    return [Scaled(part, rows.inverse) for part in torch.split(rows.values, counts)]


def turned(matrix: Scaled) -> Scaled:
    """The same matrix in column-major memory."""
    return Scaled(matrix.values.t().contiguous().t(), matrix.inverse)


def each_product(
    lefts: Sequence[Scaled], rights: Sequence[Scaled], *, fast: bool, product_dtype: ProductDtype
) -> list[Tensor]:
    return [
        multiply(left, right, fast=fast, product_dtype=product_dtype) for left, right in zip(lefts, rights, strict=True)
    ]
