# SPDX-License-Identifier: Apache-2.0
"""Context parallel: every rank takes a part of each sequence, and gathers the keys and values of the others.

A sequence is cut into twice as many pieces as there are ranks; a rank takes one from the front and its mirror image
from the back, so that all have the same number of keys to see.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from llmb.engine.model.attention import Attention, CausalAttention, Masks, attend
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.collectives import Group, all_gather, group_of


def apply_context_parallel(model: Decoder, mesh: DeviceMesh, seq_len: int) -> None:
    """Changes attention of ``model`` in place; it then takes the positions that ``rank_positions`` selects."""
    if mesh.size() == 1:
        return
    group = group_of(mesh)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        assert isinstance(attention.core, CausalAttention)
        attention.core = ContextParallelAttention(group, seq_len, attention.core.chunk_size)


def rank_pieces(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2 * ``ranks`` pieces that a rank takes."""
    return rank, 2 * ranks - 1 - rank


def rank_positions(seq_len: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """The positions of a sequence that a rank takes, in the order it takes them: [seq_len / ranks] int64."""
    pieces = torch.arange(seq_len, device=device).chunk(2 * ranks)
    return torch.cat([pieces[piece] for piece in rank_pieces(rank, ranks)])


class Span(NamedTuple):
    """Queries ``first`` up to ``stop`` see the keys from ``first_key`` up to themselves."""

    first: int
    stop: int
    first_key: int


def spans(first: int, stop: int, chunk_size: int | None) -> list[Span]:
    """Cuts queries where attention chunks end: those of one span begin to see at the same key."""
    if chunk_size is None:
        return [Span(first, stop, 0)]
    starts = range(first - first % chunk_size, stop, chunk_size)
    return [Span(max(first, start), min(stop, start + chunk_size), start) for start in starts]


class ContextParallelAttention(nn.Module):
    """Each query sees the keys of all ranks up to its own position, in its own chunk where there are chunks."""

    def __init__(self, group: Group, seq_len: int, chunk_size: int | None) -> None:
        super().__init__()
        self.group = group
        self.core = SpanAttention(group, seq_len, chunk_size)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks | None = None) -> Tensor:
        """[batch, seq_len / ranks, heads, head_dim] in and out."""
        keys, values = self._whole_sequence(torch.cat((key, value), dim=2)).chunk(2, dim=2)
        seen: Tensor = self.core(query, keys, values, masks)
        return seen

    def _whole_sequence(self, part: Tensor) -> Tensor:
        """The parts of all ranks in the order of their positions."""
        gathered = all_gather(part, 1, self.group).chunk(2 * self.group.size, dim=1)
        ranks = range(self.group.size)
        order = [piece for rank in ranks for piece in rank_pieces(rank, self.group.size)]
        return torch.cat([gathered[order.index(piece)] for piece in range(len(order))], dim=1)


class SpanAttention(CausalAttention):
    """What a rank's queries see of the whole sequence, span by span. Talks to nobody."""

    def __init__(self, group: Group, seq_len: int, chunk_size: int | None) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        size = seq_len // (2 * group.size)
        self.views: list[View] = []
        for place, piece in enumerate(rank_pieces(group.rank, group.size)):
            piece_spans = spans(piece * size, (piece + 1) * size, chunk_size)
            self.views += [View(span, moved_by=(place - piece) * size) for span in piece_spans]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks | None = None) -> Tensor:
        """query: [batch, seq_len / ranks, heads, head_dim], as the result; key, value: [batch, seq_len, ...]."""
        if masks is not None:
            mask = masks.document if self.chunk_size is None else masks.chunk
            return attend(query, key, value, mask=mask, repeats_heads=self.repeats_heads)
        parts = [view.attend(query, key, value, repeats_heads=self.repeats_heads) for view in self.views]
        return torch.cat(parts, dim=1)


class View:
    """What the queries of a span see; their place on this rank is their position, moved."""

    def __init__(self, span: Span, moved_by: int) -> None:
        self.queries = slice(span.first + moved_by, span.stop + moved_by)
        self.keys = slice(span.first_key, span.stop)
        # The last query sees all keys, the one before it all but one, and so on. Made here, as no compiler can.
        self.bias = causal_lower_right(span.stop - span.first, span.stop - span.first_key)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, repeats_heads: bool) -> Tensor:
        parts = (query[:, self.queries], key[:, self.keys], value[:, self.keys])
        return attend(*parts, mask=self.bias, repeats_heads=repeats_heads)
