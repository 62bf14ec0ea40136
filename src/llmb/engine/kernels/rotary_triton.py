# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of ``elementwise.cast_rotated_gradient``. Intermediate values are rounded to bf16 where torch does
so."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from llmb.engine.kernels.fp8_cast_triton import empty_casts, largest_bits, round_to_bf16, saturated, store_cast

ROWS, COLUMNS = 64, 64
"""Size of each of two tiles: of the first and of the second elements of pairs."""
HEADS = 4
"""Number of heads per program."""
WARPS = 8


@triton.jit
def _tables(cos, sin, table, live_row, piece: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    pair = piece * COLUMNS + tl.arange(0, COLUMNS)
    place, inside = table[:, None] * PAIRS + pair[None, :], live_row[:, None] & (pair[None, :] < PAIRS)
    return tl.load(cos + place, mask=inside, other=0.0), tl.load(sin + place, mask=inside, other=0.0)


@triton.jit
def _columns(
    piece: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the columns of a piece's two tiles, and each tile's end. Pieces from ROTATED on contain no pairs."""
    numbers = tl.arange(0, COLUMNS)
    if piece < ROTATED:
        return piece * COLUMNS + numbers, piece * COLUMNS + PAIRS + numbers, PAIRS, 2 * PAIRS
    else:  # noqa: RET505 (Triton would take what follows for a second result)
        start = 2 * PAIRS + (piece - ROTATED) * 2 * COLUMNS
        return start + numbers, start + COLUMNS + numbers, HEAD, HEAD


@triton.jit
def _columns_of_pairs(
    piece: tl.constexpr, ROTATED: tl.constexpr, PAIRS: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return ``_columns`` for interleaved pairs, counted in pairs: both tiles have the same pairs."""
    if piece < ROTATED:
        start, end = piece * COLUMNS, PAIRS
    else:
        start, end = PAIRS + (piece - ROTATED) * COLUMNS, HEAD // 2
    pairs = start + tl.arange(0, COLUMNS)
    return pairs, pairs, end, end


@triton.jit
def _rows_of(part, sequence, position, head, batch_stride, row_stride, head_stride):
    """Return pointers to the first elements of these rows in one head; strides may have 32 or 64 bits."""
    begin = sequence * batch_stride + position * row_stride + head.to(tl.int64) * head_stride
    return part + begin[:, None]


@triton.jit
def _load_both(source, first, second, live, live_second, INTERLEAVED: tl.constexpr):
    """Load the first and the second elements of pairs as fp32, of which bf16 is the upper half."""
    if INTERLEAVED:
        both = tl.load(source + first[None, :], mask=live, other=0)
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 (Triton would take what follows for a second result)
        one = tl.load(source + first[None, :], mask=live, other=0.0).to(tl.float32)
        return one, tl.load(source + second[None, :], mask=live_second, other=0.0).to(tl.float32)


@triton.jit
def _store_pairs(one, two, scale, values, transposed, row, pair, values_row, transposed_row, live, LARGEST):
    """Store interleaved pairs as ``store_cast`` does: ``pair`` and ``values_row`` count pairs."""
    first = saturated(one, scale, values.dtype.element_ty, LARGEST)
    second = saturated(two, scale, values.dtype.element_ty, LARGEST)
    low, high = first.to(tl.uint8, bitcast=True).to(tl.uint16), second.to(tl.uint8, bitcast=True).to(tl.uint16)
    place = values.to(tl.pointer_type(tl.uint16)) + row[:, None] * values_row + pair[None, :]
    tl.store(place, low | (high << 8), mask=live)
    place_transposed = transposed + 2 * pair[:, None] * transposed_row + row[None, :]
    tl.store(place_transposed, tl.trans(first), mask=tl.trans(live))
    tl.store(place_transposed + transposed_row, tl.trans(second), mask=tl.trans(live))


@triton.jit
def _store_both(
    one,
    two,
    scale,
    values,
    transposed,
    row,
    begin,
    first,
    second,
    values_row,
    transposed_row,
    live,
    live_second,
    LARGEST,
    INTERLEAVED: tl.constexpr,
):
    if INTERLEAVED:
        pair = begin + first
        _store_pairs(one, two, scale, values, transposed, row, pair, values_row, transposed_row, live, LARGEST)
    else:
        column, beside = begin + first, begin + second
        store_cast(one, scale, values, transposed, row, column, values_row, transposed_row, live, LARGEST)
        store_cast(two, scale, values, transposed, row, beside, values_row, transposed_row, live_second, LARGEST)


@triton.jit
def cast_rotated_kernel(
    query,
    key,
    value,
    cos,
    sin,
    scale,
    values,
    transposed,
    amax,
    rows,
    seq,
    table_rows,
    query_heads,
    rotated_heads,
    heads,
    query_batch,
    query_row,
    query_head,
    key_batch,
    key_row,
    key_head,
    value_batch,
    value_row,
    value_head,
    values_row,
    transposed_row,
    PAIRS: tl.constexpr,
    HEAD: tl.constexpr,
    LARGEST: tl.constexpr,
    PIECES: tl.constexpr,
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    EACH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rotate gradients of queries and keys back; cast them and values' gradients. ``rotated_heads``: of queries and
    keys; ``heads``: of all."""
    if INTERLEAVED:
        query, key = query.to(tl.pointer_type(tl.int32)), key.to(tl.pointer_type(tl.int32))
        value = value.to(tl.pointer_type(tl.int32))
    groups = tl.cdiv(heads, EACH)
    group = tl.program_id(0) % groups
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    live_row = row < rows
    sequence, position, table = (row // seq).to(tl.int64), (row % seq).to(tl.int64), (row % table_rows).to(tl.int64)
    row = row.to(tl.int64)
    factor = tl.load(scale)
    largest = 0
    for piece in tl.static_range(PIECES):
        if INTERLEAVED:
            first, second, end, second_end = _columns_of_pairs(piece, ROTATED, PAIRS, HEAD, COLUMNS)
        else:
            first, second, end, second_end = _columns(piece, ROTATED, PAIRS, HEAD, COLUMNS)
        for number in range(EACH):
            head = group * EACH + number
            live = live_row[:, None] & (first[None, :] < end) & (head < heads)
            live_second = live_row[:, None] & (second[None, :] < second_end) & (head < heads)
            if head < query_heads:
                source = _rows_of(query, sequence, position, head, query_batch, query_row, query_head)
            elif head < rotated_heads:
                source = _rows_of(key, sequence, position, head - query_heads, key_batch, key_row, key_head)
            else:
                source = _rows_of(value, sequence, position, head - rotated_heads, value_batch, value_row, value_head)
            one, two = _load_both(source, first, second, live, live_second, INTERLEAVED)
            if piece < ROTATED:  # noqa: SIM102 (known when it is compiled, and the other is not)
                if head < rotated_heads:
                    cosine, sine = _tables(cos, sin, table, live_row, piece, PAIRS, COLUMNS)
                    one, two = round_to_bf16(one * cosine + two * sine), round_to_bf16(two * cosine - one * sine)
            largest = tl.maximum(largest, tl.maximum(largest_bits(one), largest_bits(two)))
            begin = head.to(tl.int64) * (HEAD // 2 if INTERLEAVED else HEAD)
            _store_both(one, two, factor, values, transposed, row, begin, first, second, values_row, transposed_row,
                        live, live_second, LARGEST, INTERLEAVED)  # fmt: skip
    tl.atomic_max(amax.to(tl.pointer_type(tl.int32)), largest, sem="relaxed")


def _tile(pairs: int) -> tuple[int, int]:
    columns = min(COLUMNS, triton.next_power_of_2(pairs))
    return (2 * ROWS if columns < COLUMNS else ROWS), columns


def _contiguous_heads(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _heads_of_pairs(part: Tensor) -> Tensor:
    """Return ``part``, copied unless its layout allows loading both elements of a pair together."""
    assert part.shape[-1] % 2 == 0
    even = part.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in part.stride()[:3])
    # Not contiguous(), which makes no copy of a contiguous tensor that begins at an odd offset.
    return part if even and part.stride(-1) == 1 else part.clone(memory_format=torch.contiguous_format)


@triton_op("llmb::cast_rotated_gradient", mutates_args={})
def cast_rotated_gradient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scale: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Implement ``elementwise.cast_rotated_gradient``; results: [batch * seq, outputs], its transpose, and the amax."""
    unit, ordered = (2, _heads_of_pairs) if interleaved else (1, _contiguous_heads)
    parts = [ordered(part) for part in (query, key, value)]
    cosine, sine = cos.contiguous(), sin.contiguous()
    batch, seq, _, head_dim = query.shape
    of_query, of_key, of_value = (part.shape[2] for part in parts)
    rows, heads, pairs = batch * seq, of_query + of_key + of_value, cos.shape[-1]
    high, wide = _tile(pairs)
    rotated = triton.cdiv(pairs, wide)
    values, transposed, amax = empty_casts(query, (rows, heads * head_dim), dtype)
    if values.numel():
        wrap_triton(cast_rotated_kernel)[(triton.cdiv(rows, high) * triton.cdiv(heads, HEADS),)](
            *parts,
            cosine,
            sine,
            scale,
            values,
            transposed,
            amax,
            rows,
            seq,
            cosine.numel() // pairs,
            of_query,
            of_query + of_key,
            heads,
            *(stride // unit for part in parts for stride in part.stride()[:3]),
            values.stride(0) // unit,
            transposed.stride(0),
            PAIRS=pairs,
            HEAD=head_dim,
            LARGEST=torch.finfo(dtype).max,
            PIECES=rotated + triton.cdiv(head_dim - 2 * pairs, 2 * wide),
            ROTATED=rotated,
            INTERLEAVED=interleaved,
            EACH=HEADS,
            ROWS=high,
            COLUMNS=wide,
            num_warps=WARPS,
        )
    return values, transposed, amax
