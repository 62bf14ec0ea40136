# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: every rank holds a shard of each sequence, and gathers the keys and values of the others.

A sequence is split into twice as many parts as there are ranks. A rank takes one part from the front and the mirrored
part from the back, so that the ranks attend to the same number of keys.
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
    """Changes the attention of ``model`` in place; it then takes the positions that ``rank_positions`` selects."""
    if mesh.size() == 1:
        return
    group = group_of(mesh)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        assert isinstance(attention.core, CausalAttention)
        attention.core = ContextParallelAttention(group, seq_len, attention.core.chunk_size)


def rank_parts(rank: int, ranks: int) -> tuple[int, int]:
    """The two of 2 * ``ranks`` parts that a rank takes."""
    return rank, 2 * ranks - 1 - rank


def rank_positions(seq_len: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """The positions of a sequence that a rank takes, in order: [seq_len / ranks] int64."""
    parts = torch.arange(seq_len, device=device).chunk(2 * ranks)
    return torch.cat([parts[part] for part in rank_parts(rank, ranks)])


class Span(NamedTuple):
    """Queries from ``first`` to ``stop`` (exclusive) attend to the keys from ``first_key`` up to themselves."""

    first: int
    stop: int
    first_key: int


def spans(first: int, stop: int, chunk_size: int | None) -> list[Span]:
    """Splits queries where attention chunks end: the queries of one span have the same first key."""
    if chunk_size is None:
        return [Span(first, stop, 0)]
    starts = range(first - first % chunk_size, stop, chunk_size)
    return [Span(max(first, start), min(stop, start + chunk_size), start) for start in starts]


class ContextParallelAttention(nn.Module):
    """Each query attends to the keys of all ranks up to its own position, within its attention chunk if it has one."""

    def __init__(self, group: Group, seq_len: int, chunk_size: int | None) -> None:
        super().__init__()
        self.group = group
        self.core = SpanAttention(group, seq_len, chunk_size)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks | None = None) -> Tensor:
        """[batch, seq_len / ranks, heads, head_dim] in and out."""
        keys, values = self._full_sequence(torch.cat((key, value), dim=2)).chunk(2, dim=2)
        seen: Tensor = self.core(query, keys, values, masks)
        return seen

    def _full_sequence(self, shard: Tensor) -> Tensor:
        """The shards of all ranks in the order of their positions."""
        gathered = all_gather(shard, 1, self.group).chunk(2 * self.group.size, dim=1)
        ranks = range(self.group.size)
        order = [part for rank in ranks for part in rank_parts(rank, self.group.size)]
        return torch.cat([gathered[order.index(part)] for part in range(len(order))], dim=1)


class SpanAttention(CausalAttention):
    """Attention of a rank's queries to the full sequence, span by span. Does not communicate."""

    def __init__(self, group: Group, seq_len: int, chunk_size: int | None) -> None:
        super().__init__()
        self.chunk_size = chunk_size
        size = seq_len // (2 * group.size)
        self.views: list[View] = []
        for place, part in enumerate(rank_parts(group.rank, group.size)):
            part_spans = spans(part * size, (part + 1) * size, chunk_size)
            self.views += [View(span, moved_by=(place - part) * size) for span in part_spans]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks | None = None) -> Tensor:
        """query and result: [batch, seq_len / ranks, heads, head_dim]; key, value: [batch, seq_len, ...]."""
        if masks is not None:
            mask = masks.document if self.chunk_size is None else masks.chunk
            return attend(query, key, value, mask=mask, repeats_heads=self.repeats_heads)
        parts = [view.attend(query, key, value, repeats_heads=self.repeats_heads) for view in self.views]
        return torch.cat(parts, dim=1)


class View:
    """The keys of a span's queries; the index of a query on this rank is its position plus ``moved_by``."""

    def __init__(self, span: Span, moved_by: int) -> None:
        self.queries = slice(span.first + moved_by, span.stop + moved_by)
        self.keys = slice(span.first_key, span.stop)
        # The last query attends to all keys, the one before it to all but one, etc. Made here: it cannot be compiled.
        self.bias = causal_lower_right(span.stop - span.first, span.stop - span.first_key)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, repeats_heads: bool) -> Tensor:
        parts = (query[:, self.queries], key[:, self.keys], value[:, self.keys])
        return attend(*parts, mask=self.bias, repeats_heads=repeats_heads)
