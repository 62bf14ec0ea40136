# SPDX-License-Identifier: Apache-2.0
"""Attention of any reach, scale and head sizes is the softmax of the scores within the reach."""

import math

import pytest
import torch
from torch import Tensor

from llmb.catalogue.records import Model
from llmb.engine.collectives import Group
from llmb.engine.model.attention import CausalAttention, Documents, Reach, document_masks, document_segments
from llmb.engine.parallel.context_parallel import SpanAttention, rank_positions, rank_ranges

SEQ = 48
CPU = torch.device("cpu")
REACHES = [Reach(), Reach(chunk=20), Reach(window=7), Reach(chunk=20, window=7), Reach(window=SEQ)]


def softmax(heads: list[Tensor], seen: Tensor, scale: float | None) -> Tensor:
    """The definition. seen: [batch, queries, keys] bool."""
    query, key, value = heads
    key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], 2) for part in (key, value))
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * (scale or 1 / math.sqrt(query.shape[-1]))
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen.unsqueeze(1), -math.inf).softmax(-1), value)


def seen_keys(reach: Reach, places: Tensor, starts: Tensor) -> Tensor:
    """Pair by pair: the same document, the same chunk of it, and not too far back."""
    begins, places, keys, size = starts[:, places, None], places[:, None], torch.arange(SEQ), reach.chunk or SEQ
    same_chunk = (keys - begins) // size == (places - begins) // size
    return (keys >= begins) & (keys <= places) & same_chunk & (places - keys < (reach.window or SEQ))


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("sizes", [(16, 16), (24, 16), (12, 20)], ids=str)
@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("packed", ["whole", "masks", "segments"])
def test_attention_is_the_softmax_of_what_is_in_reach(
    packed: str, ranks: int, reach: Reach, sizes: tuple[int, int], scale: float | None, models: dict[str, Model]
) -> None:
    model = models["llama4"] if reach.chunk else models["llama"]
    if reach.chunk:
        chunked = model.chunked_attention.model_copy(update={"chunk_size": reach.chunk})
        model = model.model_copy(update={"chunked_attention": chunked})
    generator = torch.Generator().manual_seed(1)
    starts = torch.zeros(2, SEQ, dtype=torch.int64)
    if packed != "whole":
        starts[0, 9:], starts[1, 41:] = 9, 41
    for rank in range(ranks):
        places = rank_positions(SEQ, rank, ranks, CPU)
        shapes = (len(places), 6, sizes[0]), (SEQ, 2, sizes[0]), (SEQ, 2, sizes[1])
        heads = [torch.randn(2, *shape, generator=generator, requires_grad=True) for shape in shapes]
        core = SpanAttention(Group("", ranks, rank), SEQ, reach, scale) if ranks > 1 else CausalAttention(reach, scale)
        seen = core(*heads, documents(packed, model, places, starts, rank_ranges(SEQ, rank, ranks)))
        both = seen, softmax(heads, seen_keys(reach, places, starts), scale)
        results = [(each, *torch.autograd.grad(each.square().sum(), heads)) for each in both]
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def documents(packed: str, model: Model, places: Tensor, starts: Tensor, ranges: list[range]) -> Documents | None:
    if packed == "masks":
        return document_masks(model, places, places - starts[:, places], SEQ)
    return document_segments(model, starts, ranges, SEQ) if packed == "segments" else None


def test_limits_that_no_query_gets_to_are_left_out() -> None:
    assert [Reach(20, 7).within(tokens) for tokens in (7, 8, 21)] == [Reach(), Reach(None, 7), Reach(20, 7)]
