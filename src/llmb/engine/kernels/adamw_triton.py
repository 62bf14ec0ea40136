# SPDX-License-Identifier: Apache-2.0
"""AdamW's update for CUDA: every value is read once and written once.

Plain launches, not operators of torch: the optimizer calls them outside compiled code. Every intermediate value is
rounded to fp32 (no fused multiply-add), so that the interpreter on a CPU gives the same bits. torch computes some
of them in fp64, which the newest GPUs have little of. Block sizes are fixed, so that no step waits for a choice.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmb.engine.kernels.arguments import AdamWNumbers, Casts, OfParameter, check_contiguous

BLOCK, BLOCK_WARPS = 1024, 8
"""Elements of a program: four per thread, so that fp32 values move 16 bytes at a time, and no value changes threads."""
TILE, TILE_WARPS = 32, 8
"""Rows and columns of a program: again four elements per thread, of which only FP8 values change threads."""
GROUP = 4
"""Consecutive programs make squares of so many tiles: FP8 rows of 128 bytes are then complete before they leave the
cache, in both layouts."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class Factors(NamedTuple):
    """Host numbers of one step, computed in fp64."""

    decay: float
    """What a master weight is multiplied by and reduced by: learning rate times weight decay."""
    beta1: float
    rest1: float
    """1 - beta1."""
    beta2: float
    rest2: float
    eps: float
    step_size: float
    """Learning rate over the bias correction of the first moment."""
    correction: float
    """Square root of the bias correction of the second moment."""


@triton.jit
def _update(master, first, second, gradient, inside, decay, beta1, rest1, beta2, rest2, eps, step_size, correction):
    """One step of what is at these places, in the order of operations of ``torch.optim.AdamW(fused=True)``.

    Returns the new master weights.
    """
    new, mean, square = tl.load(master, inside, 0.0), tl.load(first, inside, 0.0), tl.load(second, inside, 0.0)
    new -= decay * new
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(square), correction) + eps
    new -= tl.div_rn(step_size * mean, denominator)
    tl.store(master, new, inside)
    tl.store(first, mean, inside)
    tl.store(second, square, inside)
    return new


@triton.jit
def _tile_of_program(columns, TILE: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of it, in tiles."""
    group, member = tl.program_id(0) // (GROUP * GROUP), tl.program_id(0) % (GROUP * GROUP)
    groups = tl.cdiv(columns, TILE * GROUP)
    row = (group // groups * GROUP + member // GROUP).to(tl.int64)
    return row, (group % groups * GROUP + member % GROUP).to(tl.int64)


# Numbers of the device may be anywhere, without another compilation.
@triton.jit(do_not_specialize_on_alignment=["divisor"])
def update_kernel(
    master,
    first,
    second,
    gradient,
    weight,
    divisor,
    size,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    step_size,
    correction,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    given = tl.div_rn(tl.load(gradient + place, inside, 0.0).to(tl.float32), tl.load(divisor))
    new = _update(
        master + place,
        first + place,
        second + place,
        given,
        inside,
        decay,
        beta1,
        rest1,
        beta2,
        rest2,
        eps,
        step_size,
        correction,
    )
    if weight is not None:
        tl.store(weight + place, new.to(tl.bfloat16), inside)


@triton.jit(do_not_specialize_on_alignment=["divisor", "scale", "amax"])
def update_and_cast_kernel(
    master,
    first,
    second,
    gradient,
    weight,
    divisor,
    scale,
    values,
    transposed,
    amax,
    rows,
    columns,
    values_matrix,
    values_row,
    transposed_matrix,
    transposed_row,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    step_size,
    correction,
    LARGEST: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    row_tile, column_tile = _tile_of_program(columns, TILE, GROUP)
    row = (row_tile * TILE + tl.arange(0, TILE))[:, None]
    column = (column_tile * TILE + tl.arange(0, TILE))[None, :]
    inside = (row < rows) & (column < columns)
    place = (matrix * rows + row) * columns + column
    given = tl.div_rn(tl.load(gradient + place, inside, 0.0).to(tl.float32), tl.load(divisor))
    new = _update(
        master + place,
        first + place,
        second + place,
        given,
        inside,
        decay,
        beta1,
        rest1,
        beta2,
        rest2,
        eps,
        step_size,
        correction,
    )
    rounded = new.to(tl.bfloat16)
    tl.store(weight + place, rounded, inside)
    kept = tl.where(inside, rounded.to(tl.float32), 0.0)
    # Without a sign, fp32 numbers are ordered as integers, with NaN above infinity.
    tl.atomic_max(amax, tl.max(tl.max(kept.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0), sem="relaxed")
    cast = tl.clamp(kept * tl.load(scale), -LARGEST, LARGEST, tl.PropagateNan.ALL).to(tl.float8e4nv)
    tl.store(values + matrix * values_matrix + row * values_row + column, cast, inside)
    turned = transposed + matrix * transposed_matrix + tl.trans(column) * transposed_row + tl.trans(row)
    tl.store(turned, tl.trans(cast), tl.trans(inside))


def factors(numbers: AdamWNumbers) -> Factors:
    """In fp64, as torch; a kernel gets them rounded to fp32."""
    lr, beta1, beta2, eps, weight_decay, step = numbers
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    return Factors(lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, eps, lr / correction1, math.sqrt(correction2))


def update(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers) -> None:
    """See ``adamw.update``: tensors of any one shape, contiguous; divisor 0-d."""
    check_contiguous(tensors)
    size = tensors.master.numel()
    if size:
        grid = (triton.cdiv(size, BLOCK),)
        update_kernel[grid](
            *tensors, divisor, size, *factors(numbers), BLOCK=BLOCK, num_warps=BLOCK_WARPS, enable_fp_fusion=False
        )


def update_and_cast(tensors: OfParameter, divisor: Tensor, numbers: AdamWNumbers, casts: Casts) -> None:
    """See ``adamw.update_and_cast``: tensors [..., rows, columns], contiguous; divisor 0-d."""
    check_contiguous(tensors)
    scale, values, transposed, amax = casts
    assert tensors.weight is not None
    assert values.stride(-1) == transposed.stride(-1) == 1 or not values.numel()
    amax.zero_()
    size = tensors.master.numel()
    if not size:
        return
    rows, columns = tensors.master.shape[-2:]
    matrices = size // (rows * columns)
    groups = triton.cdiv(rows, TILE * GROUP) * triton.cdiv(columns, TILE * GROUP)
    update_and_cast_kernel[(groups * GROUP * GROUP, matrices)](
        *tensors,
        divisor,
        scale,
        values,
        transposed,
        amax.view(torch.int32),
        rows,
        columns,
        values.stride(0) if matrices > 1 else 0,
        values.stride(-2),
        transposed.stride(0) if matrices > 1 else 0,
        transposed.stride(-2),
        *factors(numbers),
        LARGEST=LARGEST,
        TILE=TILE,
        GROUP=GROUP,
        num_warps=TILE_WARPS,
        enable_fp_fusion=False,
    )
