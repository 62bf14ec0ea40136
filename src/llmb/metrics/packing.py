# SPDX-License-Identifier: Apache-2.0
"""Sequences packed from synthetic documents: document lengths, and the cost of attention within documents. Pure.

Lengths are uniform between one token and ``longest_document``. Documents fill a sequence one after the other; the last
one is truncated at the end of the sequence.
"""

from collections.abc import Iterable
from itertools import accumulate

from llmb.catalogue.records import Model, Packing

SHORTEST_MEAN = 2
"""A document of one token predicts nothing."""


def longest_document(mean: int) -> int:
    """The longest of documents with ``mean`` tokens on average."""
    return 2 * mean - 1


def synthetic_packing(model: Model, seq_len: int, mean: int) -> Packing:
    """The expected statistics of sequences packed from documents of ``mean`` tokens on average."""
    chunked = model.chunked_attention
    cut = chunked is not None and min(seq_len, longest_document(mean)) > chunked.chunk_size
    return Packing(
        tokens=seq_len,
        sum_of_squares=expected_squares(seq_len, mean),
        chunked_sum_of_squares=expected_squares(seq_len, mean, chunked.chunk_size) if chunked and cut else None,
        source=f"expected of synthetic documents of {mean} tokens on average",
    )


def expected_squares(seq_len: int, mean: int, chunk_size: int | None = None) -> float:
    """The mean sum of squared document lengths of a sequence, or of the lengths of their chunks.

    A sequence of n tokens begins with a document of l tokens, which leaves one of n - l tokens: with M the longest
    document, E(n) = sum over l = 1..M of (square(min(l, n)) + E(n - min(l, n))) / M.
    """
    longest = longest_document(mean)
    squares = [_square(length, chunk_size) for length in range(seq_len + 1)]
    squares_up_to = list(accumulate(squares))
    expected, expected_up_to = [0.0], [0.0]
    for n in range(1, seq_len + 1):
        whole = min(longest, n)
        rest = expected_up_to[n - 1] - (expected_up_to[n - 1 - whole] if n > whole else 0.0)
        total = squares_up_to[whole] + rest + (longest - whole) * squares[n]
        expected.append(total / longest)
        expected_up_to.append(expected_up_to[-1] + expected[-1])
    return expected[-1]


def fitted_mean(packing: Packing, seq_len: int) -> int:
    """The mean document length whose sequences come closest to the published sum of squares of a packed sequence."""
    low, high = SHORTEST_MEAN, seq_len
    while low < high:
        middle = (low + high) // 2
        if expected_squares(seq_len, middle) < packing.sum_of_squares:
            low = middle + 1
        else:
            high = middle
    near = (max(SHORTEST_MEAN, low - 1), low)
    return min(near, key=lambda mean: abs(expected_squares(seq_len, mean) - packing.sum_of_squares))


def chunked_squares(lengths: Iterable[int], chunk_size: int) -> int:
    """The sum of squared lengths of documents that are split into chunks."""
    return sum(_square(length, chunk_size) for length in lengths)


def _square(length: int, chunk_size: int | None) -> int:
    if chunk_size is None:
        return length**2
    chunks, rest = divmod(length, chunk_size)
    return chunks * chunk_size**2 + rest**2
