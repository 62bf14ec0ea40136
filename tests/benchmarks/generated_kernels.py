# SPDX-License-Identifier: Apache-2.0
"""Kernels that use rows in several loops, for ``generated_worker``. They are never launched."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _load(matrix, row, column, columns):
    return tl.load(matrix + row[:, None] * columns + column[None, :], mask=column[None, :] < columns, other=0.0)


@triton.jit
def _store(matrix, row, column, columns, tile):
    tl.store(matrix + row[:, None] * columns + column[None, :], tile, mask=column[None, :] < columns)


@triton.jit
def _load_twice(matrix, row, column, columns):
    tile = _load(matrix, row, column, columns)
    return tile, tile * 2


@triton.jit
def read_twice(source, result, rows, columns):
    """Groups of 16 rows, the second time from the end."""
    for group in range(tl.program_id(0), rows // 16, tl.num_programs(0)):
        row = group * 16 + tl.arange(0, 16)
        total = tl.zeros([16], tl.float32)
        for start in range(0, columns, 256):
            total += tl.sum(_load(source, row, start + tl.arange(0, 256), columns).to(tl.float32), 1)
        for start in range(0, columns, 256):
            column = columns - 256 - start + tl.arange(0, 256)
            _store(result, row, column, columns, _load(source, row, column, columns) * total[:, None])


@triton.jit
def written_and_read(source, result, rows, columns):
    """Reads again what it wrote in the loop before, of 8 rows."""
    row = tl.program_id(0) * 8 + tl.arange(0, 8)
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)
        _store(result, row, column, columns, _load(source, row, column, columns) * 2)
    tl.debug_barrier()
    for start in range(0, columns, 256):
        column = start + tl.arange(0, 256)
        _store(result, row, column, columns, _load(result, row, column, columns) + 1)


@triton.jit
def unrolled(source, result, rows, columns):
    """Two loops, each over half of the columns, that are one in the program. What they load is named in one of them."""
    row = tl.program_id(0) * 16 + tl.arange(0, 16)
    for half in tl.static_range(2):
        for start in range(0, columns // 2, 256):
            column = half * (columns // 2) + start + tl.arange(0, 256)
            tile, twice = _load_twice(source, row, column, columns)
            if half == 0:  # noqa: SIM102 (known when it is compiled, and the other is not)
                if start < rows:
                    tile, twice = tile + 1, twice + 1
            _store(result, row, column, columns, tile + twice)


@triton.jit
def sum_columns(source, sums, rows, columns):
    """Each program adds its rows to sums of its own, [programs, columns]."""
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        for start in range(0, columns, 256):
            column = start + tl.arange(0, 256)
            place = sums + tl.program_id(0) * columns + column
            before = tl.load(place, mask=(row >= tl.num_programs(0)) & (column < columns), other=0.0)
            tl.store(place, before + tl.load(source + row * columns + column), mask=column < columns)
