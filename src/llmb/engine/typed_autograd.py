# SPDX-License-Identifier: Apache-2.0
"""Typed calls of torch's autograd functions, whose annotations are missing or narrower than what torch takes."""

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, FunctionCtx


def apply(function: type[Function], *arguments: object) -> Any:  # noqa: ANN401 (what its ``forward`` returns)
    return function.apply(*arguments)


def save_for_backward(ctx: FunctionCtx, *tensors: Tensor | None) -> None:
    """Save tensors, and None, which torch restores as None."""
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]


class Context(FunctionCtx):
    """The attributes that autograd sets on the context of any function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
