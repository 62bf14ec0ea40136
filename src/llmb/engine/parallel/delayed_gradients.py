# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients: a backward pass that computes only what other pipeline ranks wait for.

The backward pass of a matrix product is two products: one for the gradient of its input, which the stage before waits
for, and one for that of its weight, which is not needed before the end of the step. Zero-bubble schedules (Qi et al.,
2024) fill idle time with the latter. All but large matrices (norms, router, embedding) have an ordinary backward pass.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.joined import joined_layers
from llmb.engine.model.local_shard import Linear, local_shard
from llmb.engine.model.loss import Head
from llmb.engine.model.moe import Experts, grouped_matmul, grouped_outer
from llmb.engine.parallel.data_parallel import add_up


class Product(NamedTuple):
    """Multiplies rows by a weight, and computes the two products of the backward pass separately."""

    multiply: Callable[[Tensor, Tensor], Tensor]
    """Rows, weight."""
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the product, weight."""
    weight_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Rows, gradient of the product, weight (for its shape)."""


class DelayedGradients:
    """The weight gradients that the backward passes of a stage delayed, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], None]] = deque()

    def multiply(self, product: Product, weight: Callable[[], Tensor], rows: Tensor) -> Tensor:
        """``weight`` is called again when its gradient is added: FSDP may have resharded it in between."""
        result: Tensor = _Multiply.apply(rows, weight().detach(), product, weight, self)  # type: ignore[no-untyped-call]
        return result

    def leave(self, weight: Callable[[], Tensor], make: Callable[[Tensor], Tensor]) -> None:
        """``make`` computes the gradient of ``weight`` from it."""
        self.waiting.append(partial(_add, weight, make))

    def take(self) -> Callable[[], None]:
        """All delayed gradients so far as one task, which frees the rows and gradients that it holds as it runs."""
        taken, self.waiting = self.waiting, deque()

        def add_all() -> None:
            while taken:
                taken.popleft()()

        return add_all


def delay_weight_gradients(stage: Decoder) -> Callable[[], Callable[[], None]]:
    """Changes ``stage`` in place. Call the result after a backward pass: it returns the delayed gradients as a task."""
    delayed = DelayedGradients()
    for module in stage.modules():
        # Methods are replaced, not modules: parameters keep their names, and hooks stay in place.
        if isinstance(module, Head):
            module.later = partial(delayed.leave, partial(_matrix, module))
        elif isinstance(module, Linear):
            module.forward = partial(delayed.multiply, LINEAR, partial(_matrix, module))  # type: ignore[method-assign]
        elif isinstance(module, Experts):
            module.multiply = partial(_multiply_grouped, delayed, module)  # type: ignore[method-assign]
    for joined in joined_layers(stage):
        joined.multiply = partial(delayed.multiply, LINEAR, joined.matrix)  # type: ignore[method-assign]

    def left() -> Callable[[], None]:
        add_all = delayed.take()

        def finish() -> None:
            add_all()
            add_up(stage)

        return finish

    return left


def _matrix(module: Linear) -> Tensor:
    return local_shard(module.weight)


def _linear_weight_gradient(rows: Tensor, gradient: Tensor, _weight: Tensor) -> Tensor:
    return gradient.flatten(0, -2).T @ rows.flatten(0, -2)


LINEAR = Product(functional.linear, torch.matmul, _linear_weight_gradient)


def _multiply_grouped(
    delayed: DelayedGradients,
    experts: Experts,
    name: str,
    rows: Tensor,
    counts: Tensor,
    known: list[int] | None,  # noqa: ARG001
) -> Tensor:
    product = Product(
        multiply=partial(grouped_matmul, counts=counts),
        input_gradient=lambda gradient, weights: grouped_matmul(gradient, weights.transpose(1, 2), counts),
        weight_gradient=partial(grouped_outer, counts=counts),
    )
    return delayed.multiply(product, partial(experts.matrices, name), rows)


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, Tensor]
    product: Product
    weight: Callable[[], Tensor]
    delayed: DelayedGradients


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        rows: Tensor,
        values: Tensor,
        product: Product,
        weight: Callable[[], Tensor],
        delayed: DelayedGradients,
    ) -> Tensor:
        ctx.save_for_backward(rows, values)
        ctx.product, ctx.weight, ctx.delayed = product, weight, delayed
        return product.multiply(rows, values)

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, values = ctx.saved_tensors
        ctx.delayed.leave(ctx.weight, partial(ctx.product.weight_gradient, rows, gradient))
        return ctx.product.input_gradient(gradient, values), None, None, None, None


def _add(weight: Callable[[], Tensor], make: Callable[[Tensor], Tensor]) -> None:
    part = weight()
    torch.autograd.backward(part, make(part.detach()))
