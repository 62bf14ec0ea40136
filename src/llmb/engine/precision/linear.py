# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose three products are in FP8."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.model.local_shard import Linear, local_shard
from llmb.engine.precision.layer_scales import LayerScales
from llmb.engine.precision.product import Scaled, cast, cast_with_amax, multiply
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.runs.fp8_product import ProductDtype


class Fp8Linear(Linear):
    """A matrix without bias; computes in FP8 what ``whole`` computes, [..., inputs] to [..., outputs], bf16.

    kept: the weight in FP8 and its transpose, if kept for the micro-batches of a step; else the weight is cast at every
    use.
    """

    def __init__(self, whole: Linear, layer_scales: LayerScales, *, product_dtype: ProductDtype) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.weight = whole.weight
        self.register_parameter("bias", None)
        self.layer_scales = layer_scales
        self.scale, self.probe = layer_scales.scale, layer_scales.probe
        self.delayed, self.product_dtype = layer_scales.scales.delayed, product_dtype
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        kept = self.kept or (None, None)
        product: Tensor = _Fp8Product.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, -2), weight, *kept, self.scale, self.probe, self.delayed, self.product_dtype
        )
        return product.view(*hidden.shape[:-1], product.shape[-1])

    @torch.no_grad()
    def keep_weight(self) -> None:
        """Casts the weight, which must be gathered, once for many products."""
        if self.kept is None:
            weight = cast(local_shard(self.weight), self.scale[WEIGHT], FORMATS[WEIGHT])
            self.kept = weight, weight.t().contiguous()


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    keeps: bool
    delayed: bool
    product_dtype: ProductDtype


class _Fp8Product(torch.autograd.Function):
    """y = x w^T, dx = dy w, dw = dy^T x; each FP8 matrix is stored for both sides of a product (see ``multiply``)."""

    @staticmethod
    def forward(
        ctx: _Context,
        rows: Tensor,
        weight: Tensor,
        kept: Tensor | None,
        kept_transposed: Tensor | None,
        scale: Tensor,
        probe: Tensor,  # noqa: ARG004 (used only for its gradient)
        delayed: bool,
        product_dtype: ProductDtype,
    ) -> Tensor:
        taken, amax = cast_with_amax(rows, INPUT, scale, delayed=delayed)
        values = cast(weight, scale[WEIGHT], FORMATS[WEIGHT]) if kept is None else kept
        ctx.keeps, ctx.delayed, ctx.product_dtype = kept is not None, delayed, product_dtype
        held = weight if kept_transposed is None else kept_transposed
        # A frozen weight has no gradient, and nothing else needs the rows.
        kept_rows = taken.values.t().contiguous() if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept_rows, held, scale, taken.scale, amax)  # type: ignore[arg-type]
        return multiply(taken, Scaled(values, scale[WEIGHT]).mT, fast=True, product_dtype=product_dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _Context, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, Tensor, None, None]:
        rows, held, scale, rows_scale, rows_amax = ctx.saved_tensors
        given, amax = cast_with_amax(gradient, GRADIENT, scale, delayed=ctx.delayed)
        product = partial(multiply, fast=False, product_dtype=ctx.product_dtype)
        to_rows, to_weight = None, None
        if ctx.needs_input_grad[0]:
            weight = held if ctx.keeps else cast(held, scale[WEIGHT], FORMATS[WEIGHT]).t().contiguous()
            to_rows = product(given, Scaled(weight, scale[WEIGHT]).mT)
        if ctx.needs_input_grad[1]:
            to_weight = product(Scaled(given.values.t().contiguous(), given.scale), Scaled(rows, rows_scale).mT)
        return to_rows, to_weight, None, None, None, torch.stack((rows_amax, amax)), None, None
