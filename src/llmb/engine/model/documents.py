# SPDX-License-Identifier: Apache-2.0
"""The documents of packed sequences as variable-length attention takes them: segments of queries with their own keys.

A segment is the part of a document, or of an attention chunk of it, that a range of queries covers. Its last query sees
all of the segment's keys, the one before it all but one, etc. All this is computed on the host, from the positions at
which documents begin, so that nothing waits for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.catalogue.records import Model


class Segments(NamedTuple):
    """The segments of a range of queries of every sequence in a micro-batch, one sequence after the other.

    queries, keys: [segments + 1] int32, where each segment begins among all queries and among all keys of the range.
    seen: [keys] int64, the places of these keys in the flattened micro-batch; None if they are all keys, in order.
    """

    queries: Tensor
    keys: Tensor
    seen: Tensor | None


class DocumentSegments(NamedTuple):
    """Segments of each range of queries: within documents, and also within their attention chunks.

    longest: the most tokens that a document can have, the same in all steps of a run.
    """

    document: tuple[Segments, ...]
    chunk: tuple[Segments, ...]
    longest: int


def document_segments(model: Model, starts: Tensor, ranges: Sequence[range], longest: int) -> DocumentSegments:
    """The segments of queries at the places in ``ranges``, of sequences whose documents begin at ``starts``.

    starts: [batch, seq] int64, on the host: for each token of the full sequences, where its document begins.
    """
    document = tuple(_segments(starts, queries) for queries in ranges)
    chunked, seq_len = model.chunked_attention, starts.shape[1]
    if chunked is None or seq_len <= chunked.chunk_size:
        return DocumentSegments(document, document, longest)
    places = torch.arange(seq_len)
    of_chunks = places - (places - starts) % chunked.chunk_size
    return DocumentSegments(document, tuple(_segments(of_chunks, queries) for queries in ranges), longest)


def _segments(first_keys: Tensor, queries: range) -> Segments:
    """``first_keys``: [batch, seq], the first key that each query sees."""
    batch, seq_len = first_keys.shape
    own = first_keys[:, queries.start : queries.stop]
    begins = torch.ones_like(own, dtype=torch.bool)
    begins[:, 1:] = own[:, 1:] != own[:, :-1]
    numbers = begins.flatten().nonzero().flatten()
    ends = torch.cat((numbers[1:], torch.tensor([own.numel()])))
    lengths = (ends - 1) % len(queries) + queries.start + 1 - own.flatten()[numbers]
    whole = len(queries) == seq_len
    rows = [torch.arange(int(own[row, 0]), queries.stop) + row * seq_len for row in range(batch)]
    return Segments(_cumulative(ends - numbers), _cumulative(lengths), None if whole else torch.cat(rows))


def _cumulative(lengths: Tensor) -> Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()
