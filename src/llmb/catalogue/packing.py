# SPDX-License-Identifier: Apache-2.0
"""Packing of synthetic documents into sequences: document lengths, and the cost of attention within documents."""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import DocumentLengths, Model, Packing, Record

DATA = Path(__file__).with_name("squad_lengths.yaml")
CORRECTIONS = 2
SHORTEST_MEAN = 2
"""Minimum mean length: a document of one token predicts nothing."""


class SquadLengths(Record):
    """The content of ``squad_lengths.yaml``."""

    source: str
    seq_len: int
    mean_tokens: int
    """Mean length in packed sequences of ``seq_len`` tokens."""
    relative: tuple[float, ...]
    """Equally likely lengths, as multiples of the mean."""


@cache
def squad_lengths() -> SquadLengths:
    return read_file(DATA, SquadLengths)


def document_lengths(mean: int, kind: DocumentLengths = "uniform") -> Sequence[int]:
    """Return equally likely lengths of documents with about ``mean`` tokens on average, the longest last."""
    if kind == "uniform":
        return range(1, 2 * mean)
    return [max(1, round(mean * relative)) for relative in squad_lengths().relative]


def longest_document(mean: int, kind: DocumentLengths = "uniform") -> int:
    """Return the length of the longest document if documents have ``mean`` tokens on average."""
    return document_lengths(mean, kind)[-1]


def scaled_mean(seq_len: int) -> int:
    """Return SQuAD's mean document length, scaled from its sequence length to ``seq_len``."""
    squad = squad_lengths()
    return max(SHORTEST_MEAN, round(squad.mean_tokens * seq_len / squad.seq_len))


def synthetic_packing(model: Model, seq_len: int, mean: int, kind: DocumentLengths = "uniform") -> Packing:
    """Return the expected statistics of sequences packed from documents with ``mean`` tokens on average."""
    chunked = model.chunked_attention
    long = chunked is not None and min(seq_len, longest_document(mean, kind)) > chunked.chunk_size
    like = ", with lengths like SQuAD's" if kind == "squad" else ""
    return Packing(
        tokens=seq_len,
        sum_of_squares=expected_squares(seq_len, mean, kind=kind),
        chunked_sum_of_squares=expected_squares(seq_len, mean, chunked.chunk_size, kind) if chunked and long else None,
        source=f"expected for synthetic documents of {mean} tokens on average{like}",
    )


@cache
def expected_squares(
    seq_len: int, mean: int, chunk_size: int | None = None, kind: DocumentLengths = "uniform"
) -> float:
    """Return the expected sum of squared lengths of a sequence's documents or, with ``chunk_size``, of their attention
    chunks."""
    squares = [_square(length, chunk_size) for length in range(seq_len + 1)]
    return _of_uniform(squares, 2 * mean - 1) if kind == "uniform" else _of(squares, document_lengths(mean, kind))


def _of_uniform(squares: Sequence[int], longest: int) -> float:
    """Return the expected sum for lengths from 1 to ``longest``, with differences of prefix sums as inner sums."""
    squares_up_to = list(accumulate(squares))
    expected, expected_up_to = [0.0], [0.0]
    for n in range(1, len(squares)):
        whole = min(longest, n)
        rest = expected_up_to[n - 1] - (expected_up_to[n - 1 - whole] if n > whole else 0.0)
        total = squares_up_to[whole] + rest + (longest - whole) * squares[n]
        expected.append(total / longest)
        expected_up_to.append(expected_up_to[-1] + expected[-1])
    return expected[-1]


def _of(squares: Sequence[int], lengths: Sequence[int]) -> float:
    expected = [0.0]
    for n in range(1, len(squares)):
        total = sum(squares[length] + expected[n - length] if length < n else squares[n] for length in lengths)
        expected.append(total / len(lengths))
    return expected[-1]


@cache
def fitted_mean(squares: float, seq_len: int, kind: DocumentLengths = "uniform") -> int:
    """Return a mean document length for which the expected sum of squares is about ``squares``."""
    lengths = document_lengths(seq_len, kind)
    # The sum of squares is nearly proportional to the mean: it would be, if no document were truncated.
    spread = sum(length**2 for length in lengths) * len(lengths) / sum(lengths) ** 2
    mean = _possible(squares / seq_len / spread, seq_len)
    for _ in range(CORRECTIONS):
        mean = _possible(mean * squares / expected_squares(seq_len, mean, kind=kind), seq_len)
    near = {_possible(mean + change, seq_len) for change in (-1, 0, 1)}
    return min(sorted(near), key=lambda mean: abs(expected_squares(seq_len, mean, kind=kind) - squares))


def _possible(mean: float, seq_len: int) -> int:
    return min(max(SHORTEST_MEAN, round(mean)), seq_len)


def chunked_squares(lengths: Iterable[int], chunk_size: int) -> int:
    """Return the sum of squared lengths of the chunks into which documents are split."""
    return sum(_square(length, chunk_size) for length in lengths)


def _square(length: int, chunk_size: int | None) -> int:
    if chunk_size is None:
        return length**2
    chunks, rest = divmod(length, chunk_size)
    return chunks * chunk_size**2 + rest**2
