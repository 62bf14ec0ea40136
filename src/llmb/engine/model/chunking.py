# SPDX-License-Identifier: Apache-2.0
"""Chunk sizes of logits, which are never computed in full. Pure."""

from collections.abc import Iterator

LARGEST_CHUNK = 1 / 16
"""Largest chunk, as a fraction of the size of all logits in fp32."""
LARGEST_SLICE = 1 / 64
"""Likewise: largest part of a chunk that is in fp32 at a time."""
SMALLEST_BYTES = 2**20
"""Smaller logits are not chunked."""
ALIGNED = 64
"""Chunk lengths are multiples of it if possible, because matrix units prefer them."""


def chunk_bytes(rows: int, columns: int, at_least: float = SMALLEST_BYTES) -> float:
    """Maximum bytes of a chunk of [rows, columns] logits."""
    return max(LARGEST_CHUNK * 4 * rows * columns, at_least)


def slice_bytes(rows: int, columns: int) -> float:
    """Maximum bytes of the values of a chunk that are computed in fp32 at a time."""
    return max(LARGEST_SLICE * 4 * rows * columns, SMALLEST_BYTES)


def chunk_length(length: int, width: int, itemsize: int, most_bytes: float) -> int:
    """Length of a chunk along ``length`` with at most ``most_bytes``, with ``width`` values for each element.

    Chunks are as even as alignment permits, and at least 1 long, whatever its size.
    """
    longest = max(1, int(min(length, most_bytes / (width * itemsize))))
    if longest >= length:
        return length
    if longest < ALIGNED:
        return longest
    longest -= longest % ALIGNED
    even = -(-length // -(-length // longest))
    return min(longest, -(-even // ALIGNED) * ALIGNED)


def chunk_slices(length: int, chunk: int) -> Iterator[slice]:
    """Consecutive chunks; the last may be shorter."""
    for first in range(0, length, chunk):
        yield slice(first, min(first + chunk, length))
