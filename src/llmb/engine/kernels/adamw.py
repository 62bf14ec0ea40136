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


def update(
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    weight: Tensor | None,
    divisor: Tensor,
    numbers: AdamWNumbers,
) -> None:
    """Updates ``master`` and both moments, fp32 and contiguous, with ``gradient``, bf16 or fp32, over ``divisor``.

    ``weight``, bf16, gets the rounded master; None if the master itself is the weight. divisor: 0-d fp32 on the device.
    An fp32 gradient may be overwritten.
    """
    if master.is_cuda:
        from llmb.engine.kernels import adamw_triton  # Not at the top: a machine without a GPU has no Triton.

        adamw_triton.update(master, first, second, gradient, weight, divisor, numbers)
        return
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


def update_and_cast(
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    weight: Tensor,
    divisor: Tensor,
    numbers: AdamWNumbers,
    scale: Tensor,
    values: Tensor,
    transposed: Tensor,
    amax: Tensor,
) -> None:
    """``update``, and casts the rounded master, [..., rows, columns], to FP8 e4m3 as ``fp8_cast.cast`` does.

    scale: the factor before the cast, 0-d fp32. ``values`` and ``transposed``, [..., columns, rows], get the cast
    weight; both may be slices of larger buffers, with contiguous last dimensions. ``amax``, 0-d fp32, gets the rounded
    master's largest absolute value, NaN if any is NaN.
    """
    if has_kernel(master):
        from llmb.engine.kernels import adamw_triton

        adamw_triton.update_and_cast(
            master, first, second, gradient, weight, divisor, numbers, scale, values, transposed, amax
        )
        return
    update(master, first, second, gradient, weight, divisor, numbers)
    cast_into(weight, scale, values, transposed, amax)
