# SPDX-License-Identifier: Apache-2.0
"""Norms whose results are cast to FP8, with what is before them, as functions of torch's autograd.

Each returns the hidden states, too: the gradients of both of their uses meet in one backward function.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from llmb.engine.kernels.arguments import Normalized, NormGradients, NormOf
from llmb.engine.kernels.norm import normalize_and_cast, normalize_backward, normalize_backward_and_cast
from llmb.engine.precision.autograd import (
    WEIGHTS,
    Fp8Context,
    Gradients,
    Operands,
    backward,
    forward,
    save,
    saved,
    without_gradients,
    without_values,
)
from llmb.engine.precision.product import Cast
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT
from llmb.engine.typed_autograd import save_for_backward

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The hidden states; what stands for them normalized, of which only the gradient is used; and their cast."""


class Fp8Norm(torch.autograd.Function):
    """Of hidden states, [..., columns]; ``NormOf`` and the scale of the cast follow."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor
    ) -> Results:
        found = normalize_and_cast(hidden, None, NormOf(weight, bias, eps), scale, FORMATS[INPUT])
        save_for_backward(ctx, hidden, found.mean, found.factor, weight)
        return results(ctx, found._replace(hidden=hidden.view_as(hidden)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, passed: Tensor, given: Tensor, *_cast: None) -> Gradients:
        hidden, mean, factor, weight = ctx.saved_tensors
        found = normalize_backward(given, passed, hidden, mean, factor, weight)
        return found.hidden, *of_parameters(found, weight), None, None


class Fp8ProductNorm(torch.autograd.Function):
    """Of the sum of a product and hidden states, [..., columns].

    The arguments of a product with one weight; then those of ``Fp8Norm``.
    """

    @staticmethod
    def forward(ctx: Fp8Context, *arguments: Any) -> Results:  # noqa: ANN401 (torch's interface)
        operands, own = Operands(*arguments[:WEIGHTS]), arguments[WEIGHTS : WEIGHTS + 1]
        hidden, weight, bias, eps, scale = arguments[WEIGHTS + 1 :]
        update = forward(ctx, operands, own).view_as(hidden)
        found = normalize_and_cast(hidden, update, NormOf(weight, bias, eps), scale, FORMATS[INPUT])
        save(ctx, operands, own, [found.hidden, found.mean, found.factor, weight])
        return results(ctx, found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Fp8Context, passed: Tensor, given: Tensor, *_cast: None) -> Gradients:
        kept = saved(ctx)
        hidden, mean, factor, weight = kept.more
        found, (values, transposed, amax) = normalize_backward_and_cast(
            given, passed, hidden, mean, factor, weight, kept.gradient.scale, FORMATS[GRADIENT]
        )
        product = backward(ctx, kept, Cast(values, transposed, kept.gradient.inverse, amax))
        return *product[: WEIGHTS + 1], found.hidden, *of_parameters(found, weight), None, None


def results(ctx: FunctionCtx, found: Normalized) -> Results:
    without_gradients(ctx, found.values, found.transposed, found.amax)
    stands = without_values(found.hidden, found.hidden.shape)
    return found.hidden, stands, found.values, found.transposed, found.amax


def of_parameters(found: NormGradients, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """In the dtype of the weight; fp32 with a bias."""
    return found.weight.to(weight.dtype), found.bias
