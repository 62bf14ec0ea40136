# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the casts in ``elementwise``, except ``cast_rotated_gradient``. Intermediate values are rounded to
bf16 where torch does so."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

ROWS, COLUMNS = 64, 64
"""Size of a tile. Its rows in both outputs have 64 bytes: two sectors of the GPU's memory."""
WARPS = 8
MAX_STRIDE = 2**24
"""Maximum distance between rows, in elements: offsets within a tile then fit in 32 bits."""


@triton.jit
def largest_bits(values):
    """Bit patterns without the sign have the order of the values, with NaN above infinity, so maxima preserve NaN."""
    return tl.max(values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def round_to_bf16(values):
    return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _silu(values):
    return values / (1 + tl.exp(-values))


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row and column have 64 bits, because a tensor may have more than 2**31 elements."""
    across = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    top, left = (program // across).to(tl.int64) * ROWS, (program % across).to(tl.int64) * COLUMNS
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    high, wide = tl.minimum(rows - top, ROWS).to(tl.int32), tl.minimum(columns - left, COLUMNS).to(tl.int32)
    return top, left, row, column, (row[:, None] < high) & (column[None, :] < wide)


@triton.jit
def load_tile(matrix, row, column, stride, inside):
    return tl.load(matrix + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def saturated(tile, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):
    return tl.clamp(tile * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def store_cast(
    tile, scale, values, transposed, row, column, values_stride, transposed_stride, inside, LARGEST: tl.constexpr
):
    scaled = saturated(tile, scale, values.dtype.element_ty, LARGEST)
    place = values + row[:, None] * values_stride + column[None, :]
    tl.store(place, scaled, mask=inside)
    place_transposed = transposed + column[:, None] * transposed_stride + row[None, :]
    tl.store(place_transposed, tl.trans(scaled), mask=tl.trans(inside))


@triton.jit
def cast_kernel(
    source,
    scale,
    values,
    transposed,
    amax,
    rows,
    columns,
    source_matrix,
    source_row,
    values_matrix,
    values_row,
    transposed_matrix,
    transposed_row,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast ``source`` or, unless ACTIVATION is "none", its activation. rows, columns: of each matrix in ``values``."""
    top, left, row, column, inside = _place(rows, columns, ROWS, COLUMNS)
    matrix = tl.program_id(1).to(tl.int64)
    source += matrix * source_matrix + top * source_row + left
    tile = load_tile(source, row, column, source_row, inside)
    if ACTIVATION == "squared-relu":
        # This form preserves NaN.
        tile = tl.where(tile <= 0, 0.0, tile)
        tile = round_to_bf16(tile * tile)
    if ACTIVATION == "swiglu":
        up = load_tile(source + columns, row, column, source_row, inside)
        tile = round_to_bf16(round_to_bf16(_silu(tile)) * up)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), largest_bits(tile), sem="relaxed")
    store_cast(
        tile,
        tl.load(scale),
        values + matrix * values_matrix + top * values_row + left,
        transposed + matrix * transposed_matrix + left * transposed_row + top,
        row,
        column,
        values_row,
        transposed_row,
        inside,
        LARGEST,
    )


@triton.jit
def activation_gradient_kernel(
    source,
    gradient,
    scale,
    values,
    transposed,
    amax,
    rows,
    columns,
    source_row,
    gradient_row,
    values_row,
    transposed_row,
    ACTIVATION: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast the gradient of an activation's inputs, from the ``gradient`` of its result; "swiglu" has two inputs."""
    top, left, row, column, inside = _place(rows, columns, ROWS, COLUMNS)
    source += top * source_row + left
    values += top * values_row + left
    transposed += left * transposed_row + top
    factor = tl.load(scale)
    gradient_tile = load_tile(gradient + top * gradient_row + left, row, column, gradient_row, inside)
    tile = load_tile(source, row, column, source_row, inside)
    if ACTIVATION == "squared-relu":
        tile = tl.where(tile <= 0, 0.0, round_to_bf16(gradient_tile * 2 * tile))
        largest = largest_bits(tile)
    else:
        up = load_tile(source + columns, row, column, source_row, inside)
        sigmoid = 1 / (1 + tl.exp(-tile))
        to_up = round_to_bf16(gradient_tile * round_to_bf16(_silu(tile)))
        tile = round_to_bf16(round_to_bf16(gradient_tile * up) * sigmoid * (1 + tile * (1 - sigmoid)))
        largest = tl.maximum(largest_bits(tile), largest_bits(to_up))
        below = transposed + tl.cast(columns, tl.int64) * transposed_row
        store_cast(to_up, factor, values + columns, below, row, column, values_row, transposed_row, inside, LARGEST)
    store_cast(tile, factor, values, transposed, row, column, values_row, transposed_row, inside, LARGEST)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")


def _check_offsets(*strides: int) -> None:
    # One by one: for a maximum the compiler would specialize on which of the unknown sizes is the largest.
    for stride in strides:
        if stride > MAX_STRIDE:
            raise ValueError(f"cannot cast rows {stride} elements apart; the limit is {MAX_STRIDE}")


def _grid(rows: int, columns: int, matrices: int = 1) -> tuple[int, int]:
    return triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), matrices


def _launch_cast(
    kernel, source: Tensor, scale: Tensor, values: Tensor, transposed: Tensor, amax: Tensor, activation: str
) -> None:
    """Launch ``kernel``, which is ``cast_kernel``, wrapped if the compiler may capture the launch."""
    rows, columns = values.shape[-2:]
    if not values.numel():
        return
    grid = _grid(rows, columns, values.shape[0] if values.ndim == 3 else 1)
    strides = [each.stride(0) if each.ndim == 3 else 0 for each in (source, values, transposed)]
    _check_offsets(*(each.stride(-2) for each in (source, values, transposed)))
    kernel[grid](
        source,
        scale,
        values,
        transposed,
        amax,
        rows,
        columns,
        strides[0],
        source.stride(-2),
        strides[1],
        values.stride(-2),
        strides[2],
        transposed.stride(-2),
        ACTIVATION=activation,
        LARGEST=torch.finfo(values.dtype).max,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


def empty_casts(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    *stack, rows, columns = shape
    return (
        like.new_empty(shape, dtype=dtype),
        like.new_empty((*stack, columns, rows), dtype=dtype),
        like.new_zeros((), dtype=torch.float32),
    )


def _rows_contiguous(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


@triton_op("llmb::cast_both_ways", mutates_args={})
def cast_both_ways(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``elementwise.cast_both_ways``. values: [rows, columns] or [matrices, rows, columns]. scale: 0-d."""
    source = _rows_contiguous(values)
    casts = empty_casts(source, tuple(source.shape), dtype)
    _launch_cast(wrap_triton(cast_kernel), source, scale, *casts, "none")
    return casts


def cast_into(source: Tensor, scale: Tensor, values: Tensor, transposed: Tensor, amax: Tensor) -> None:
    """Implement ``elementwise.cast_into``. ``amax``: 0-d, initially 0. ``transposed``: [columns, rows], or a stack
    of such matrices."""
    # Outside of an operator, a wrapped kernel would be prepared for each launch, and never freed.
    _launch_cast(cast_kernel, _rows_contiguous(source), scale, values, transposed, amax, "none")


@triton_op("llmb::cast_activated", mutates_args={})
def cast_activated(inputs: Tensor, scale: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``elementwise.cast_activated``. inputs: [rows, features], or [rows, 2 * features] with gate and up."""
    source = _rows_contiguous(inputs)
    rows, columns = source.shape
    casts = empty_casts(source, (rows, columns // 2 if activation == "swiglu" else columns), dtype)
    _launch_cast(wrap_triton(cast_kernel), source, scale, *casts, activation)
    return casts


@triton_op("llmb::cast_activation_gradient", mutates_args={})
def cast_activation_gradient(
    inputs: Tensor, gradient: Tensor, scale: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``elementwise.cast_activation_gradient``. With "swiglu", ``gradient`` is half as wide as ``inputs``."""
    source, gradient_rows = _rows_contiguous(inputs), _rows_contiguous(gradient)
    values, transposed, amax = empty_casts(source, tuple(source.shape), dtype)
    rows, columns = gradient_rows.shape
    if gradient_rows.numel():
        _check_offsets(*(each.stride(0) for each in (source, gradient_rows, values, transposed)))
        wrap_triton(activation_gradient_kernel)[_grid(rows, columns)](
            source,
            gradient_rows,
            scale,
            values,
            transposed,
            amax,
            rows,
            columns,
            source.stride(0),
            gradient_rows.stride(0),
            values.stride(0),
            transposed.stride(0),
            ACTIVATION=activation,
            LARGEST=torch.finfo(dtype).max,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=WARPS,
        )
    return values, transposed, amax
