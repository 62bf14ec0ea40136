# SPDX-License-Identifier: Apache-2.0
"""How logits are cut, so that they are never whole. Pure."""

from collections.abc import Iterator

LARGEST_CHUNK = 1 / 16
"""Of the bytes that all logits take in fp32."""
LARGEST_SLICE = 1 / 64
"""Likewise: what of a piece is in fp32 at a time."""
SMALLEST_BYTES = 2**20
"""What takes no more is not cut."""
ALIGNED = 64
"""Lengths of pieces are multiples of it where they can be, as matrix units like them."""


def chunk_bytes(rows: int, columns: int, at_least: float = SMALLEST_BYTES) -> float:
    """The most that a piece of [rows, columns] logits may take."""
    return max(LARGEST_CHUNK * 4 * rows * columns, at_least)


def slice_bytes(rows: int, columns: int) -> float:
    """The most that the values may take that are computed of a piece in fp32 at a time."""
    return max(LARGEST_SLICE * 4 * rows * columns, SMALLEST_BYTES)


def chunk_length(length: int, width: int, itemsize: int, most_bytes: float) -> int:
    """How much of ``length`` a piece takes, so that with ``width`` values to each it has ``most_bytes`` or less.

    Pieces are as even as alignment lets them. A piece takes 1 at least, whatever that has.
    """
    longest = max(1, int(min(length, most_bytes / (width * itemsize))))
    if longest >= length:
        return length
    if longest < ALIGNED:
        return longest
    longest -= longest % ALIGNED
    even = -(-length // -(-length // longest))
    return min(longest, -(-even // ALIGNED) * ALIGNED)


def chunk_slices(length: int, piece: int) -> Iterator[slice]:
    """Pieces one after the other; the last may be shorter."""
    for first in range(0, length, piece):
        yield slice(first, min(first + piece, length))
