# SPDX-License-Identifier: Apache-2.0
"""AdamW of one parameter in one pass over memory, with the copies of lower precision that the next step computes with.

All tensors have the parameter's shape unless stated otherwise, and are updated in place.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmb.engine.kernels.arguments import AdamWNumbers, Casts, OfParameter, check_contiguous
from llmb.engine.kernels.fp8_cast import cast_into, has_kernel, is_there


def update(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers) -> None:
    """Updates master and moments with the gradient over ``divisor``, and sets the weight; all of any one shape.

    divisor: 0-d fp32, on the device.
    """
    master = tensors.master
    if master.is_cuda and is_there("adamw_triton"):
        from llmb.engine.kernels import adamw_triton  # Not at the top: a machine without a GPU has no Triton.

        adamw_triton.update(tensors, divisor, numbers)
        return
    update_together([tensors], [torch.full((), float(numbers.step), device=master.device)], divisor, numbers)


def update_together(
    parameters: Sequence[OfParameter], steps: Sequence[Tensor], divisor: Tensor, numbers: AdamWNumbers
) -> None:
    """``update`` of many parameters by torch's own kernel; steps: of each, 0-d fp32 on the device."""
    for tensors in parameters:
        check_contiguous(tensors)
    torch._fused_adamw_(
        [tensors.master for tensors in parameters],
        [tensors.gradient.float() for tensors in parameters],
        [tensors.first for tensors in parameters],
        [tensors.second for tensors in parameters],
        [],
        list(steps),
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
    for tensors in parameters:
        if tensors.weight is not None:
            tensors.weight.copy_(tensors.master)


def update_and_cast(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers, casts: Casts) -> None:
    """``update`` of [..., rows, columns], and casts the rounded master; there must be a weight."""
    if has_kernel(tensors.master, "adamw_triton"):
        from llmb.engine.kernels import adamw_triton

        adamw_triton.update_and_cast(tensors, divisor, numbers, casts)
        return
    update(tensors, divisor, numbers)
    assert tensors.weight is not None
    cast_into(tensors.weight, *casts)
