# SPDX-License-Identifier: Apache-2.0
"""Sums of weight gradients over the micro-batches of a step, which the products of the backward pass add to.

Autograd writes a product, and adds it to the gradient so far in another pass over memory: 8 bytes per bf16 weight and
micro-batch. A product that adds to a matrix reads and writes that matrix: 4 bytes, and rounds once instead of twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from llmb.engine.typed_autograd import apply


class GradientSum:
    """The gradient of one matrix, whose rows are the local shards of ``parameters``.

    total: like the matrix. is_empty: 0-d, on the host, where a product reads it without a wait for the device. So
    compiled code is the same for a step's first micro-batch, which overwrites ``total``, and the others.
    """

    def __init__(self, matrix: Tensor, parameters: Sequence[Tensor]) -> None:
        self.total = torch.empty_like(matrix)
        self.is_empty = torch.ones((), dtype=torch.bool, device="cpu")
        self.parameters = parameters

    def multiply(self, hidden: Tensor, matrix: Tensor, trained: Tensor) -> Tensor:
        """``hidden`` times ``matrix``, [..., outputs]; the backward pass adds to ``total``.

        trained: a parameter, because of which autograd computes a backward pass at all.
        """
        product: Tensor = apply(_Multiply, hidden, matrix.detach(), trained, self.total, self.is_empty)
        return product


@torch.library.custom_op("llmb::add_product", mutates_args=("total", "is_empty"))
def add_product(total: Tensor, is_empty: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Adds ``gradient`` [rows, outputs] transposed times ``rows`` [rows, inputs] to ``total``, or sets it if empty."""
    if is_empty:
        torch.mm(gradient.t(), rows, out=total)
        is_empty.fill_(False)
    else:
        total.addmm_(gradient.t(), rows)


class _SumContext(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]
    total: Tensor
    is_empty: Tensor


class _Multiply(torch.autograd.Function):
    """The sum is not a saved tensor: those must not change, and later forward passes may precede this backward pass."""

    @staticmethod
    def forward(
        ctx: _SumContext, hidden: Tensor, weight: Tensor, trained: Tensor, total: Tensor, is_empty: Tensor  # noqa: ARG004
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(hidden, weight)
        ctx.total, ctx.is_empty = total, is_empty
        return functional.linear(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SumContext, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        hidden, weight = ctx.saved_tensors
        add_product(ctx.total, ctx.is_empty, gradient.flatten(0, -2), hidden.flatten(0, -2))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None
