# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of ``norm``, for rows in bf16.

A program takes groups of whole rows, in two loops over tiles of their columns. The first computes what a row is
normalized with. The second begins where the first ended, because the caches still hold what was read last; it
normalizes, casts and stores. Programs are so few that the rows in flight stay in the L2 cache (``norm.fits``), which
evicts first what is read once: so memory is read once.

Results do not depend on the order of programs: each has its own sums of the weight's gradient, which torch adds.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from llmb.engine.kernels.arguments import PROGRAMS, ROWS, BothWays, Normalized, NormGradients, NormOf
from llmb.engine.kernels.fp8_cast_triton import empty_casts, load_tile, round_to_bf16, store_cast

WARPS = 16
ELEMENTS = 16
"""Elements of a tile for each thread: two loads of 16 bytes from each tensor."""
TILE = 32 * WARPS * ELEMENTS
GROUP = 2**16
"""Elements of a group of rows at most, where nothing is cast: as with casts, of 4096 columns.

Fewer rows take less of the cache and add more often to the sums of weights, which stay there, too: with 18432 columns
and a bias, 132 programs have 19.5 MB of rows and as much of sums.
"""


@triton.jit
def _last(matrix, row, column, stride, inside):
    """Loads what is not read again, and may leave the cache before rows that are."""
    place = matrix + row[:, None] * stride + column[None, :]
    return tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _added(hidden, update, total, row, column, stride, inside, ADDS: tl.constexpr):
    """A tile of rows, or of their sum with ``update``, which is stored."""
    if ADDS:
        tile = _last(hidden, row, column, stride, inside)
        tile = round_to_bf16(tile + _last(update, row, column, stride, inside))
        tl.store(total + row[:, None] * stride + column[None, :], tile.to(tl.bfloat16), mask=inside)
    else:
        tile = load_tile(hidden, row, column, stride, inside)
    return tile


@triton.jit
def _of_columns(source, row, column, columns):
    """Part of a weight or a bias, fp32, for each row: threads then need not exchange it, and wait for each other."""
    place = row[:, None] * 0 + column[None, :]
    return tl.load(source + place, mask=column[None, :] < columns, other=0.0).to(tl.float32)


@triton.jit
def _bits(values):
    """Without the sign."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _center_and_deviations(
    hidden,
    update,
    total,
    row,
    rows,
    columns,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each row's mean and the sum of squared differences from it; not CENTERED, 0 and the sum of squares."""
    center = tl.zeros([ROWS], tl.float32)
    deviations = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(tl.cdiv(columns, COLUMNS)):
        column = number * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        tile = _added(hidden, update, total, row, column, columns, inside, ADDS)
        if CENTERED:
            # Chan's formula for the mean and deviations of two parts; a difference of sums would cancel.
            own = tl.minimum(columns - number * COLUMNS, COLUMNS)
            share = own / (number * COLUMNS + own)
            own_center = tl.sum(tile, 1) / own
            tile = tl.where(inside, tile - own_center[:, None], 0.0)
            apart = own_center - center
            center += apart * share
            deviations += tl.sum(tile * tile, 1) + apart * apart * (share * (number * COLUMNS))
        else:
            squares += tile * tile
    return center, (deviations if CENTERED else tl.sum(squares, 1))


@triton.jit
def normalize_and_cast_kernel(
    hidden,
    update,
    total,
    weight,
    bias,
    mean,
    factor,
    scale,
    values,
    transposed,
    amax,
    rows,
    columns,
    eps,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles = tl.cdiv(columns, COLUMNS)
    # Where registers permit, more is read at a time.
    wide: tl.constexpr = COLUMNS if CENTERED else 2 * COLUMNS
    largest = tl.zeros([ROWS, COLUMNS], tl.int32)
    before_cast = tl.load(scale)
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(group, tl.int64) * ROWS + tl.arange(0, ROWS)
        center, deviations = _center_and_deviations(
            hidden, update, total, row, rows, columns, ADDS, CENTERED, ROWS, wide
        )
        if CENTERED:
            tl.store(mean + row, center, mask=row < rows)
        spread = tl.rsqrt(deviations / columns + eps)
        tl.store(factor + row, spread, mask=row < rows)
        # Other threads of the program stored the sums that this one loads.
        tl.debug_barrier()
        for number in range(tiles):
            column = (tiles - 1 - number) * COLUMNS + tl.arange(0, COLUMNS)
            inside = (row[:, None] < rows) & (column[None, :] < columns)
            tile = _last(total if ADDS else hidden, row, column, columns, inside)
            if CENTERED:
                tile -= center[:, None]
            tile = tile * spread[:, None] * _of_columns(weight, row, column, columns)
            if CENTERED:
                tile += _of_columns(bias, row, column, columns)
            tile = round_to_bf16(tl.where(inside, tile, 0.0))
            largest = tl.maximum(largest, _bits(tile))
            below = column.to(tl.int64)  # multiplied by the length of a transposed row
            store_cast(tile, before_cast, values, transposed, row, below, columns, rows, inside, LARGEST, True)
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(largest), sem="relaxed")


@triton.jit
def _add_to_sums(sums, values, column, columns, begun):
    """Adds those of a group's rows to the sums of this program."""
    place = sums + tl.program_id(0) * columns + column
    before = tl.load(place, mask=begun & (column < columns), other=0.0)
    tl.store(place, before + tl.sum(values, 0), mask=column < columns)


@triton.jit
def _gradient_along(
    given,
    hidden,
    weight,
    row,
    rows,
    columns,
    center,
    spread,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The parts of a row's gradient that would change its deviation and, if CENTERED, its mean. [ROWS, 1]"""
    along = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(tl.cdiv(columns, COLUMNS)):
        column = number * COLUMNS + tl.arange(0, COLUMNS)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        normal = (load_tile(hidden, row, column, columns, inside) - center) * spread
        scaled = load_tile(given, row, column, columns, inside) * _of_columns(weight, row, column, columns)
        along += scaled * normal
        whole += scaled
    return (tl.sum(along, 1) / columns)[:, None], (tl.sum(whole, 1) / columns)[:, None] if CENTERED else 0.0


@triton.jit
def normalize_backward_kernel(
    given,
    passed,
    hidden,
    mean,
    factor,
    weight,
    to_hidden,
    weight_sums,
    bias_sums,
    scale,
    values,
    transposed,
    amax,
    rows,
    columns,
    CENTERED: tl.constexpr,
    CASTS: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """weight_sums, bias_sums: [programs, columns] fp32."""
    tiles = tl.cdiv(columns, COLUMNS)
    # Of each row: one of each element would take too many registers.
    largest = tl.zeros([ROWS], tl.int32)
    before_cast = tl.load(scale) if CASTS else 1.0
    for group in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(group, tl.int64) * ROWS + tl.arange(0, ROWS)
        spread = tl.load(factor + row, mask=row < rows, other=0.0)[:, None]
        center = tl.load(mean + row, mask=row < rows, other=0.0)[:, None] if CENTERED else 0.0
        along, whole = _gradient_along(
            given, hidden, weight, row, rows, columns, center, spread, CENTERED, ROWS, COLUMNS
        )
        # Other threads of the program may have stored the sums that this one loads.
        tl.debug_barrier()
        for number in range(tiles):
            column = (tiles - 1 - number) * COLUMNS + tl.arange(0, COLUMNS)
            inside = (row[:, None] < rows) & (column[None, :] < columns)
            normal = (_last(hidden, row, column, columns, inside) - center) * spread
            own = _last(given, row, column, columns, inside)
            begun = group >= tl.num_programs(0)
            _add_to_sums(weight_sums, own * normal, column, columns, begun)
            if CENTERED:
                _add_to_sums(bias_sums, own, column, columns, begun)
            tile = own * _of_columns(weight, row, column, columns) - whole - normal * along
            tile = round_to_bf16(_last(passed, row, column, columns, inside) + round_to_bf16(tile * spread))
            place = to_hidden + row[:, None] * columns + column[None, :]
            tl.store(place, tile.to(tl.bfloat16), mask=inside, eviction_policy="evict_first")
            if CASTS:
                tile = tl.where(inside, tile, 0.0)
                largest = tl.maximum(largest, tl.max(_bits(tile), 1))
                below = column.to(tl.int64)  # multiplied by the length of a transposed row
                store_cast(tile, before_cast, values, transposed, row, below, columns, rows, inside, LARGEST, True)
    if CASTS:
        tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), tl.max(largest), sem="relaxed")


def _programs(device: torch.device, groups: int) -> int:
    """A fixed number of a GPU, so that rows in flight are bounded."""
    return min(groups, PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count)


def _rows_of_group(columns: int) -> int:
    """Where nothing is cast, and no transposed row is made: so few that they stay in the cache, a power of two."""
    return int(2 ** min(4, max(0, (GROUP // columns).bit_length() - 1)))


@triton_op("llmb::normalize_and_cast", mutates_args={})
def _normalize_and_cast(
    hidden: Tensor,
    update: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``Normalized``; empty if there is none."""
    source = hidden.contiguous()
    columns = source.shape[-1]
    rows = source.numel() // columns
    total = torch.empty_like(source) if update is not None else source.new_empty(0)
    factor = source.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(factor) if bias is not None else factor.new_empty(0)
    values, transposed, amax = empty_casts(source, (rows, columns), dtype)
    if rows:
        wrap_triton(normalize_and_cast_kernel)[(_programs(source.device, triton.cdiv(rows, ROWS)),)](
            source,
            weight if update is None else update.contiguous(),
            total,
            weight,
            weight if bias is None else bias,
            mean,
            factor,
            scale,
            values,
            transposed,
            amax,
            rows,
            columns,
            eps,
            ADDS=update is not None,
            CENTERED=bias is not None,
            LARGEST=torch.finfo(dtype).max,
            ROWS=ROWS,
            COLUMNS=TILE // ROWS,
            num_warps=WARPS,
        )
    return total, mean, factor, values, transposed, amax


def normalize_and_cast(
    hidden: Tensor, update: Tensor | None, norm: NormOf, scale: Tensor, dtype: torch.dtype
) -> Normalized:
    """See ``norm.normalize_and_cast``: hidden, update: [..., columns]; scale: 0-d."""
    total, mean, *found = _normalize_and_cast(hidden, update, *norm, scale, dtype)
    return Normalized(hidden if update is None else total, None if norm.bias is None else mean, *found)


def _nothing(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Three tensors, as no two results may be one."""
    return like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=torch.float32)


@triton_op("llmb::normalize_backward", mutates_args={})
def _normalize_backward(
    given: Tensor,
    passed: Tensor,
    hidden: Tensor,
    mean: Tensor | None,
    factor: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of ``NormGradients``, and the cast, if there is a scale; empty if there is none."""
    source = hidden.contiguous()
    columns = source.shape[-1]
    count = source.numel() // columns
    rows = _rows_of_group(columns) if scale is None else ROWS
    programs = _programs(source.device, triton.cdiv(count, rows))
    to_hidden = torch.empty_like(source)
    weight_sums = source.new_empty((programs, columns), dtype=torch.float32)
    bias_sums = torch.empty_like(weight_sums) if mean is not None else weight_sums.new_empty((0, columns))
    casts = empty_casts(source, (count, columns), dtype) if scale is not None else _nothing(source, dtype)
    if count:
        wrap_triton(normalize_backward_kernel)[(programs,)](
            given.contiguous(),
            passed.contiguous(),
            source,
            weight if mean is None else mean,
            factor,
            weight,
            to_hidden,
            weight_sums,
            bias_sums,
            weight if scale is None else scale,
            *casts,
            count,
            columns,
            CENTERED=mean is not None,
            CASTS=scale is not None,
            LARGEST=torch.finfo(dtype).max,
            ROWS=rows,
            COLUMNS=TILE // rows,
            num_warps=WARPS,
        )
    return to_hidden, weight_sums.sum(0), bias_sums.sum(0), *casts


def normalize_backward(
    given: Tensor, passed: Tensor, hidden: Tensor, mean: Tensor | None, factor: Tensor, weight: Tensor
) -> NormGradients:
    """See ``norm.normalize_backward``: gradients and hidden: [..., columns]; mean, factor: [rows]."""
    to_hidden, to_weight, to_bias, *_ = _normalize_backward(
        given, passed, hidden, mean, factor, weight, None, torch.float8_e5m2
    )
    return NormGradients(to_hidden, to_weight, None if mean is None else to_bias)


def normalize_backward_and_cast(
    given: Tensor,
    passed: Tensor,
    hidden: Tensor,
    mean: Tensor | None,
    factor: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[NormGradients, BothWays]:
    """See ``norm.normalize_backward_and_cast``: shapes as in ``normalize_backward``."""
    to_hidden, to_weight, to_bias, values, transposed, amax = _normalize_backward(
        given, passed, hidden, mean, factor, weight, scale, dtype
    )
    return NormGradients(to_hidden, to_weight, None if mean is None else to_bias), (values, transposed, amax)
