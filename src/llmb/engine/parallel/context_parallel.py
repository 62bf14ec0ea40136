# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: every rank holds two mirrored parts of each sequence, and gathers all keys and values."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from llmb.engine.collectives import Group, all_gather, group_of
from llmb.engine.kernels.span_attention import TokenSpan, span_attention
from llmb.engine.model.attention import FULL, Attention, CausalAttention, Documents, Reach, attend, repeated
from llmb.engine.model.decoder import Decoder
from llmb.runs.attention_choice import AttentionBackend


def apply_context_parallel(model: Decoder, mesh: DeviceMesh, seq_len: int) -> None:
    """Replace the attention cores of ``model``; inputs must then be the tokens at this rank's ``rank_positions``."""
    if mesh.size() == 1:
        return
    group = group_of(mesh)
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        assert isinstance(attention.core, CausalAttention)
        attention.core = ContextParallelAttention(group, seq_len, attention.core.reach, attention.core.scale)


def rank_parts(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the two parts, out of 2 * ``ranks``, that a rank holds."""
    return rank, 2 * ranks - 1 - rank


def rank_ranges(seq_len: int, rank: int, ranks: int) -> list[range]:
    """Return the positions of a sequence that a rank holds, as ranges in order."""
    if ranks == 1:
        return [range(seq_len)]
    size = seq_len // (2 * ranks)
    return [range(part * size, (part + 1) * size) for part in rank_parts(rank, ranks)]


def rank_positions(seq_len: int, rank: int, ranks: int, device: torch.device) -> Tensor:
    """Return the positions of a sequence that a rank holds, as a tensor: [seq_len / ranks] int64."""
    return torch.cat([torch.arange(part.start, part.stop, device=device) for part in rank_ranges(seq_len, rank, ranks)])


def spans(positions: range, query: int, chunk: int | None) -> list[TokenSpan]:
    """Return the spans of queries at ``positions``, split where chunks end; the first query has the index ``query``."""
    size = chunk or positions.stop
    starts = range(positions.start - positions.start % size, positions.stop, size)
    ranges = [range(max(positions.start, start), min(positions.stop, start + size)) for start in starts]
    return [
        TokenSpan(query + own.start - positions.start, len(own), start, own.start)
        for own, start in zip(ranges, starts, strict=True)
    ]


class ContextParallelAttention(nn.Module):
    """Attention of this rank's queries to the keys of all ranks, each query to the keys within its ``reach``."""

    def __init__(self, group: Group, seq_len: int, reach: Reach, scale: float | None) -> None:
        super().__init__()
        self.group = group
        self.core = SpanAttention(group, seq_len, reach, scale)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        """Gather keys and values; return attention. Arguments and result: [batch, seq_len / ranks, heads, head_dim]."""
        rows, sizes = (
            torch.cat((key.flatten(2), value.flatten(2)), dim=2),
            [part[0, 0].numel() for part in (key, value)],
        )
        gathered = all_gather(rows, 1, self.group).chunk(2 * self.group.size, dim=1)
        order = [part for rank in range(self.group.size) for part in rank_parts(rank, self.group.size)]
        by_position = torch.cat([gathered[order.index(part)] for part in range(len(order))], dim=1)
        keys, values = (torch.unflatten(part, -1, (key.shape[2], -1)) for part in by_position.split(sizes, dim=2))
        output: Tensor = self.core(query, keys, values, documents)
        return output


class SpanAttention(CausalAttention):
    """Attention of a rank's queries, [batch, seq_len / ranks, ...], to the full sequence's keys, [batch, seq_len,
    ...]."""

    def __init__(self, group: Group, seq_len: int, reach: Reach = FULL, scale: float | None = None) -> None:
        super().__init__(reach, scale)
        self.group = group
        self.ranges = rank_ranges(seq_len, group.rank, group.size)
        self.spans = [
            span for place, own in enumerate(self.ranges) for span in spans(own, place * len(own), reach.chunk)
        ]
        # The last query attends to all keys, the one before it to all but one, etc. Made here: it cannot be compiled.
        self.biases = [causal_lower_right(span.length, span.own_key + span.length - span.key) for span in self.spans]

    def places(self, key: Tensor) -> Tensor:
        return rank_positions(key.shape[1], self.group.rank, self.group.size, key.device)

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kernel = span_kernel(self.backend, query.device)
        if kernel and (kernel == "cudnn" or key.shape[-1] == value.shape[-1]):
            if self.repeats_heads:
                key, value = repeated(query, key, value)
            return span_attention(query, key, value, self.spans, kernel, self.scale)
        outputs = []
        for span, bias in zip(self.spans, self.biases, strict=True):
            queries, keys = query[:, span.query : span.query + span.length], slice(span.key, span.own_key + span.length)
            outputs.append(self._attend(queries, key[:, keys], value[:, keys], bias))
        return torch.cat(outputs, dim=1)

    def masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Return masked attention, computed for each part of the queries without the keys after its last query."""
        parts = zip(query.chunk(len(self.ranges), 1), mask.chunk(len(self.ranges), 2), self.ranges, strict=True)
        outputs = [
            self._attend(part, key[:, : own.stop], value[:, : own.stop], of_part[..., : own.stop])
            for part, of_part, own in parts
        ]
        return torch.cat(outputs, dim=1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return attend(query, key, value, mask=mask, repeats_heads=self.repeats_heads, scale=self.scale)


def span_kernel(backend: AttentionBackend, device: torch.device) -> str | None:
    """Return the ``span_attention`` kernel; None if the backend's causal masks can align at the last query and key."""
    if backend == "cudnn":
        return "cudnn"
    return "cpu-flash" if backend == "flash" and device.type == "cpu" else None
