# SPDX-License-Identifier: Apache-2.0
"""AdamW of one parameter in one pass over memory, with the copies of lower precision that the next step computes with.

All tensors have the parameter's shape unless stated otherwise, and are updated in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.engine.kernels.fp8_cast import cast_into, has_kernel


class AdamWNumbers(NamedTuple):
    """The numbers of one step, on the host. ``step`` is 1 for the first."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class OfParameter(NamedTuple):
    """The tensors of one parameter, contiguous. master, first, second: fp32, the two moments last.

    gradient: bf16 or fp32; the latter may be overwritten. weight: bf16, gets the rounded master; None if the master
    itself is the weight.
    """

    master: Tensor
    first: Tensor
    second: Tensor
    gradient: Tensor
    weight: Tensor | None


class Casts(NamedTuple):
    """What gets the weight in FP8 e4m3, [..., rows, columns], as ``fp8_cast.cast`` casts it.

    scale: the factor before the cast, 0-d fp32. transposed: [..., columns, rows]; it and ``values`` may be slices of
    larger buffers, with contiguous last dimensions. amax: 0-d fp32, gets the largest absolute value of the rounded
    master, NaN if any is NaN.
    """

    scale: Tensor
    values: Tensor
    transposed: Tensor
    amax: Tensor


def check_contiguous(tensors: OfParameter) -> None:
    """Kernels take one place for all of them: others would be updated with values of their neighbors."""
    given = [tensor for tensor in tensors if tensor is not None]
    assert all(tensor.is_contiguous() and tensor.shape == tensors.master.shape for tensor in given)


def update(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers) -> None:
    """Updates master and moments with the gradient over ``divisor``, 0-d fp32 on the device, and sets the weight."""
    master, first, second, gradient, weight = tensors
    if master.is_cuda:
        from llmb.engine.kernels import adamw_triton  # Not at the top: a machine without a GPU has no Triton.

        adamw_triton.update(tensors, divisor, numbers)
        return
    check_contiguous(tensors)
    torch._fused_adamw_(
        [master],
        [gradient.float()],
        [first],
        [second],
        [],
        [torch.full((), float(numbers.step), device=master.device)],
        lr=numbers.lr,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=None,
    )
    if weight is not None:
        weight.copy_(master)


def update_and_cast(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers, casts: Casts) -> None:
    """``update``, and casts the rounded master; there must be a weight."""
    if has_kernel(tensors.master):
        from llmb.engine.kernels import adamw_triton

        adamw_triton.update_and_cast(tensors, divisor, numbers, casts)
        return
    update(tensors, divisor, numbers)
    assert tensors.weight is not None
    cast_into(tensors.weight, *casts)
