# SPDX-License-Identifier: Apache-2.0
"""Documents as segments of variable length: what masks compute, without the pairs that masks leave out."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from llmb.catalogue.records import Model
from llmb.engine.collectives import Group
from llmb.engine.data.batches import MicroBatch
from llmb.engine.model import attention
from llmb.engine.model.attention import (
    CausalAttention,
    SegmentOptions,
    Segments,
    attend_one_by_one,
    document_masks,
    document_segments,
)
from llmb.engine.parallel.context_parallel import SpanAttention, rank_positions, rank_ranges
from llmb.engine.transformations import with_varying_segments

SEQ = 80
CPU = torch.device("cpu")
ROWS = [[1, 40, 7, 32], [33, 2, 45]]
"""Lengths in each sequence; some are longer than the 32 tokens of an attention chunk, and than a rank's part."""


def starts_of(rows: list[list[int]]) -> Tensor:
    lengths = [torch.tensor(row) for row in rows]
    return torch.stack([torch.repeat_interleave(row.cumsum(0) - row, row) for row in lengths])


def seen_pairs(segments: Segments, queries: range, batch: int, seq: int) -> set[tuple[int, int, int]]:
    """Row, query and key of each pair that variable-length attention multiplies, by its definition."""
    keys = list(range(batch * seq)) if segments.seen is None else segments.seen.tolist()
    pairs = set()
    bounds = zip(segments.queries.tolist(), segments.keys.tolist(), strict=True)
    for (first, first_key), (end, end_key) in pairwise(bounds):
        for query in range(first, end):
            row, place = divmod(query, len(queries))
            last = end_key - (end - 1 - query)
            pairs |= {(row, queries.start + place, keys[key] - row * seq) for key in range(first_key, last)}
    return pairs


@given(
    cuts=st.lists(st.lists(st.integers(1, 15), max_size=6), min_size=1, max_size=3),
    ranks=st.sampled_from([1, 2, 4]),
    chunk_size=st.sampled_from([5, 16]),
)
def test_segments_are_the_pairs_of_the_masks(
    cuts: list[list[int]], ranks: int, chunk_size: int, models: dict[str, Model]
) -> None:
    model = with_chunks(models, chunk_size)
    starts = torch.stack([begins(row) for row in cuts])
    for rank in range(ranks):
        ranges = rank_ranges(16, rank, ranks)
        places = rank_positions(16, rank, ranks, CPU)
        masks = document_masks(model, places, places - starts[:, places], 16)
        found = document_segments(model, starts, ranges, 16)
        for mask, parts in ((masks.document, found.document), (masks.chunk, found.chunk)):
            expected = {(row, int(places[query]), key) for row, _, query, key in mask.nonzero().tolist()}
            pairs = [
                pair
                for part, queries in zip(parts, ranges, strict=True)
                for pair in seen_pairs(part, queries, len(cuts), 16)
            ]
            assert set(pairs) == expected
            assert len(pairs) == len(expected)


def begins(cuts: list[int]) -> Tensor:
    """Where documents begin in a sequence of 16 tokens, if they begin at ``cuts`` too."""
    return torch.tensor([max([0, *(cut for cut in cuts if cut <= place)]) for place in range(16)])


def test_a_rank_takes_no_more_keys_than_its_queries_see(models: dict[str, Model]) -> None:
    """Of 80 tokens, rank 1 of 2 has 20 to 59: the first row's begin in its document of 40, at 1."""
    segments = document_segments(models["llama"], starts_of(ROWS), rank_ranges(SEQ, 1, 2), longest=45)
    first, second = segments.document
    assert first.seen.tolist() == [*range(1, 40), *range(SEQ, SEQ + 40)]
    assert second.seen.tolist() == [*range(1, 60), *range(SEQ + 35, SEQ + 60)]
    assert segments.longest == 45
    assert first.queries.dtype == first.keys.dtype == torch.int32


def with_chunks(models: dict[str, Model], size: int) -> Model:
    chunked = models["llama4"].chunked_attention.model_copy(update={"chunk_size": size})
    return models["llama4"].model_copy(update={"chunked_attention": chunked})


def heads(batch: int, rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query of a rank, and key and value of the full sequence, with grouped heads."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(batch, SEQ, 6, 8, generator=generator)[:, rank_positions(SEQ, rank, ranks, CPU)]
    key, value = (torch.randn(batch, SEQ, 2, 8, generator=generator, requires_grad=True) for _ in range(2))
    return query.requires_grad_(), key, value


@torch.library.custom_op("llmb_test::varlen", mutates_args=())
def opaque(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, longest: int) -> Tensor:
    """In the place of the GPU's kernel, into which the compiler cannot see either."""
    return attend_one_by_one(query, key, value, Segments(queries, keys, None), SegmentOptions(longest))


@opaque.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, queries: Tensor, keys: Tensor, longest: int) -> Tensor:
    return torch.empty_like(query)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_is_compiled_once_for_all_documents(
    ranks: int, models: dict[str, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: SegmentOptions) -> Tensor:
        return opaque(query, key, value, segments.queries, segments.keys, options.longest)

    core = SpanAttention(Group("", 2, 1), SEQ) if ranks == 2 else CausalAttention()
    inputs, counter, found = heads(1, ranks - 1, ranks), CompileCounter(), []
    rows = [[[40, 40]], [[1, 9, 30, 40]], [[20, 5, 5, 50]], [[3] * 26 + [2]], [[80]]]
    steps = [
        document_segments(models["llama"], starts_of(row), rank_ranges(SEQ, ranks - 1, ranks), SEQ) for row in rows
    ]
    expected = [core(*inputs, segments) for segments in steps]
    monkeypatch.setattr(attention, "attend_one_by_one", kernel)
    torch.compiler.reset()
    compiled = torch.compile(core, dynamic=False, fullgraph=True, backend=counter)
    empty = torch.empty(0)
    batches = [MicroBatch(empty, empty, None, segments=segments) for segments in steps]
    with torch.no_grad():
        found = [compiled(*inputs, batch.segments) for batch in with_varying_segments(batches)]
    torch.testing.assert_close(found, expected)
    assert counter.frame_count == 1
