# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention with grouped key and value heads and rotary positions (Su et al., 2021)."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from llmb.catalogue.records import Model
from llmb.engine.kernels.elementwise import RotaryFactors, Rotation, factors_of, rotate
from llmb.engine.model.adapter import FusedAdapter
from llmb.engine.model.layers import RMSNorm, bias_if
from llmb.engine.model.linear import Joined, Linear
from llmb.runs.attention_choice import AttentionBackend


class Reach(NamedTuple):
    """Limits of how far back queries attend within their document."""

    chunk: int | None = None
    """Number of tokens in the document's attention chunks; None means no limit."""
    window: int | None = None
    """Maximum number of keys, including the query's own; None means no limit."""

    def first_keys(self, places: Tensor, starts: Tensor) -> Tensor:
        """Return the first key that each query at ``places`` attends to, if its document begins at ``starts``."""
        first = starts if self.chunk is None else places - (places - starts) % self.chunk
        return first if self.window is None else torch.maximum(first, places - self.window + 1)

    def within(self, seq_len: int) -> "Reach":
        """Return the reach without the limits that have no effect on sequences of ``seq_len`` tokens."""
        return Reach(*(None if limit is None or seq_len <= limit else limit for limit in self))


FULL = Reach()


class Segments(NamedTuple):
    """Parts of documents that a range of queries covers; a segment's last query attends to all its keys."""

    queries: Tensor
    """Index of each segment's first query within the range, then the total: [segments + 1] int32."""
    keys: Tensor
    """Index of each segment's first key within the range, then the total: [segments + 1] int32."""
    seen: Tensor | None
    """The range's keys as indices of the flattened micro-batch, [keys] int64; None if they are all keys."""


class DocumentSegments(NamedTuple):
    """Segments of each range of queries."""

    document: tuple[Segments, ...]
    """Segments within documents."""
    chunk: tuple[Segments, ...]
    """Segments within documents and attention chunks."""
    longest: int
    """Maximum number of tokens in a document or padding of any step."""


def document_segments(model: Model, starts: Tensor, ranges: Sequence[range], longest: int) -> DocumentSegments:
    """Return the segments of the queries in ``ranges``. ``starts``: [batch, full seq] int64 on the host, where
    tokens' documents begin."""
    document = tuple(_segments(starts, queries) for queries in ranges)
    reach = chunks_of(model).within(starts.shape[1])
    first_keys = reach.first_keys(torch.arange(starts.shape[1]), starts)
    chunk = document if reach.chunk is None else tuple(_segments(first_keys, queries) for queries in ranges)
    return DocumentSegments(document, chunk, longest)


def chunks_of(model: Model) -> Reach:
    """Return the reach of the model's layers with chunked attention; unlimited if the model has no such layers."""
    return Reach() if model.chunked_attention is None else Reach(model.chunked_attention.chunk_size)


def _segments(first_keys: Tensor, queries: range) -> Segments:
    """Return the segments of ``queries``. first_keys: [batch, seq], the first key that each query attends to."""
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


class Rotary(NamedTuple):
    """Positions of tokens, [seq] or [batch, seq], and the rotations of ``2 * pairs`` elements of a head."""

    positions: Tensor
    rotation: Rotation
    factors: RotaryFactors


def rotary_tables(model: Model, positions: Tensor) -> Rotary:
    angles = positions[..., None].float() * frequencies(model, positions.device)
    rotation = Rotation(angles.cos(), angles.sin(), model.rotary_pairs == "interleaved")
    return Rotary(positions, rotation, factors_of(rotation))


def frequencies(model: Model, device: torch.device) -> Tensor:
    """Return radians per position of each rotated pair: [pairs], fp32."""
    size = int(model.head_dim * model.rotary_fraction)
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    plain, scaling = 1.0 / model.rope_theta**exponents, model.rope_scaling
    if scaling is None:
        return plain
    # Llama 3.1: slow frequencies are divided by ``factor``, fast ones kept, those in between blended linearly.
    turns = scaling.original_max_position * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0, 1)
    return plain * (blend + (1 - blend) / scaling.factor)


class Masks(NamedTuple):
    """Attention masks of packed sequences, causal within documents or within their chunks: [batch, 1, queries, keys]
    bool."""

    document: Tensor
    chunk: Tensor


Documents = Masks | DocumentSegments
"""The documents of packed sequences, as masks or as segments."""


def document_masks(model: Model, places: Tensor, positions: Tensor, keys: int) -> Masks:
    """Return the masks of queries at ``places``, [queries]. ``positions``: [batch, queries], each query's position in
    its document."""
    starts, reach = places - positions, chunks_of(model).within(keys)
    document = between(starts, places, keys)
    chunk = document if reach.chunk is None else between(reach.first_keys(places, starts), places, keys)
    return Masks(document, chunk)


def between(first: Tensor, last: Tensor, keys: int) -> Tensor:
    """Return the mask, [batch, 1, queries, keys], of queries that attend to keys ``first`` to ``last``, inclusive."""
    numbers = torch.arange(keys, device=first.device)
    return ((numbers >= first.unsqueeze(-1)) & (numbers <= last.unsqueeze(-1))).unsqueeze(1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    repeats_heads: bool = False,
    in_fp32: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return attention, causal without ``mask``; tensors are [batch, tokens, heads, head_dim]. ``scale``: by default 1
    / sqrt(head_dim of queries)."""
    if repeats_heads:
        key, value = repeated(query, key, value)
    grouped, dtype = query.shape[2] != key.shape[2], query.dtype
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    if in_fp32:
        query, key, value = query.float(), key.float(), value.float()
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped, scale=scale
    )
    return output.to(dtype).transpose(1, 2)


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with a head for each query head: [..., heads, head_dim]."""
    group = query.shape[-2] // key.shape[-2]
    return (key, value) if group == 1 else (key.repeat_interleave(group, -2), value.repeat_interleave(group, -2))


class SegmentOptions(NamedTuple):
    """Options of attention by segments. ``longest``: the maximum number of tokens in a segment."""

    longest: int
    window: int | None = None
    scale: float | None = None


def attend_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    options: SegmentOptions,
    *,
    repeats_heads: bool = False,
) -> Tensor:
    """Return attention of each segment's queries to its keys. All tensors are [batch, tokens, heads, head_dim]."""
    shape, (query, key, value) = query.shape, (heads.flatten(0, 1) for heads in (query, key, value))
    if segments.seen is not None:
        key, value = key.index_select(0, segments.seen), value.index_select(0, segments.seen)
    if repeats_heads:
        key, value = repeated(query, key, value)
    kernel = varlen_kernel if query.is_cuda else attend_one_by_one
    return kernel(query, key, value, segments, options).view(*shape[:-1], value.shape[-1])


def varlen_kernel(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: SegmentOptions) -> Tensor:
    """Run variable-length flash attention; its causal mask aligns each segment's last query with its last key."""
    lengths = (segments.queries, segments.keys, options.longest, options.longest)
    # torch 2.11 has no grouped heads here, nor an option for them.
    kernel = varlen_attn if query.shape[1] == key.shape[1] else partial(varlen_attn, enable_gqa=True)
    before = -1 if options.window is None else options.window - 1
    output = kernel(query, key, value, *lengths, scale=options.scale, window_size=(before, 0))
    assert isinstance(output, Tensor)  # a tuple if more results were requested
    return output


def attend_one_by_one(query: Tensor, key: Tensor, value: Tensor, segments: Segments, options: SegmentOptions) -> Tensor:
    """Compute attention segment by segment, on a CPU. It cannot be compiled once for all steps."""
    queries, keys = segments.queries.diff().tolist(), segments.keys.diff().tolist()
    parts = zip(torch.split(query, queries), torch.split(key, keys), torch.split(value, keys), strict=True)
    outputs = []
    for own, of_keys, of_values in parts:
        bias: Tensor | None = causal_lower_right(len(own), len(of_keys)) if len(own) < len(of_keys) else None
        if options.window is not None:
            last = torch.arange(len(of_keys) - len(own), len(of_keys))[None]
            bias = between(last - options.window + 1, last, len(of_keys))
        outputs.append(attend(own[None], of_keys[None], of_values[None], mask=bias, scale=options.scale)[0])
    return torch.cat(outputs)


class CausalAttention(nn.Module):
    """Attention of each query to the keys from the first in its ``reach`` to its own: [batch, seq, heads, head_dim]."""

    backend: AttentionBackend = "flash"
    repeats_heads = False
    in_fp32 = False

    def __init__(self, reach: Reach = FULL, scale: float | None = None) -> None:
        super().__init__()
        self.reach = reach
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
        """Return attention of queries to keys and values of the same tokens, or of the full sequence."""
        if isinstance(documents, DocumentSegments):
            return self.by_document(query, key, value, documents)
        if documents is not None or self.reach.within(key.shape[1]).window is not None:
            return self.masked(query, key, value, self.mask(key, documents))
        return self.whole(query, key, value)

    def places(self, key: Tensor) -> Tensor:
        """Return the places of the queries in the sequence of the keys."""
        return torch.arange(key.shape[1], device=key.device)

    def mask(self, key: Tensor, documents: Masks | None) -> Tensor:
        places, keys = self.places(key)[None], key.shape[1]
        if documents is None:
            return between(self.reach.first_keys(places, torch.zeros_like(places)), places, keys)
        mask = documents.document if self.reach.chunk is None else documents.chunk
        return mask if self.reach.window is None else mask & between(places - self.reach.window + 1, places, keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        options = {"repeats_heads": self.repeats_heads, "in_fp32": self.in_fp32}
        return attend(query, key, value, mask=mask, scale=self.scale, **options)

    def masked(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return self.attend(query, key, value, mask)

    def whole(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attention if there are no documents and no window, so that no mask is needed."""
        batch, seq = query.shape[:2]
        size = self.reach.chunk or seq
        if seq > size:
            # Chunks become separate sequences, which need no mask. Only the last chunk can be padded, and no query that
            # is kept attends to padding at its end.
            query, key, value = (self.chunks(heads, size) for heads in (query, key, value))
        output = self.attend(query, key, value)
        return torch.unflatten(output, 0, (batch, -1)).flatten(1, 2)[:, :seq] if seq > size else output

    @staticmethod
    def chunks(heads: Tensor, size: int) -> Tensor:
        """Reshape [batch, seq, heads, head_dim] to [batch * chunks, size, heads, head_dim], padded with zeros."""
        padding = -heads.shape[1] % size
        padded = functional.pad(heads, (0, 0, 0, 0, 0, padding)) if padding else heads
        return torch.unflatten(padded, 1, (-1, size)).flatten(0, 1)

    def by_document(self, query: Tensor, key: Tensor, value: Tensor, documents: DocumentSegments) -> Tensor:
        """Return attention by segments, computed for one range of queries at a time."""
        ranges, longest = documents.document, documents.longest
        if self.reach.chunk is not None:
            ranges, longest = documents.chunk, min(longest, self.reach.chunk)
        options = SegmentOptions(longest, self.reach.window, self.scale)
        outputs = [
            attend_segments(part, key, value, segments, options, repeats_heads=self.repeats_heads)
            for part, segments in zip(query.chunk(len(ranges), 1), ranges, strict=True)
        ]
        return torch.cat(outputs, dim=1)


class RotaryPosition(nn.Module):
    """Rotates queries and keys."""

    def forward(self, query: Tensor, key: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        return rotate(query, rotary.factors), rotate(key, rotary.factors)


class TemperaturePosition(nn.Module):
    """Scales queries by a factor that grows with their position, instead of rotating them (Nakanishi, 2025)."""

    def __init__(self, floor_scale: float, attn_scale: float) -> None:
        super().__init__()
        self.floor_scale = floor_scale
        self.attn_scale = attn_scale

    def forward(self, query: Tensor, key: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        passed = torch.floor((rotary.positions.float() + 1) / self.floor_scale)
        factor = torch.log1p(passed) * self.attn_scale + 1
        return (query * factor[..., None, None]).to(query.dtype), key


class Attention(nn.Module):
    """Attention with projections and norms. This rank's number of heads follows from the size of the projections."""

    def __init__(self, model: Model, layer: int) -> None:
        super().__init__()
        queries, keys = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
        self.q_proj = Linear(model.hidden_size, queries)
        self.k_proj = Linear(model.hidden_size, keys)
        self.v_proj = Linear(model.hidden_size, keys)
        self.qkv = Joined(self, "q_proj", "k_proj", "v_proj")
        self.o_proj = Linear(queries, model.hidden_size)
        self.qkv_adapter: FusedAdapter | None = None
        self.head_dim = model.head_dim
        self.q_norm, self.k_norm = (RMSNorm(model.head_dim, model.norm_eps) if model.qk_norm else None for _ in "qk")
        self.position: nn.Module = RotaryPosition()
        self.core: nn.Module = CausalAttention()
        chunked = model.chunked_attention
        if chunked is not None and model.is_global_layer(layer):
            self.position = TemperaturePosition(chunked.floor_scale, chunked.attn_scale)
        elif chunked is not None:
            self.core = CausalAttention(chunks_of(model))
        self.biased = model.qkv_bias or model.attention_output_bias
        self.q_bias = bias_if(model.qkv_bias, queries)
        self.k_bias, self.v_bias = bias_if(model.qkv_bias, keys), bias_if(model.qkv_bias, keys)
        self.o_bias = bias_if(model.attention_output_bias, model.hidden_size)

    def forward(self, hidden: Tensor, rotary: Rotary, documents: Documents | None = None) -> Tensor:
        output: Tensor = self.o_bias(self.o_proj(self.attended(hidden, rotary, documents)))
        return output

    def attended(self, hidden: Tensor, rotary: Rotary, documents: Documents | None) -> Tensor:
        """Return the input of the output projection, [batch, seq, heads * head_dim]."""
        query, key, value = self.rotated(hidden, rotary)
        attended: Tensor = self.core(query, key, value, documents).flatten(-2)
        return attended

    def projected(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return query, key and value: [batch, seq, heads, head_dim] each."""
        projected = self.qkv(hidden, self.head_dim)
        query, key, value = projected if self.qkv_adapter is None else self.qkv_adapter(hidden, projected)
        return self.q_bias(query), self.k_bias(key), self.v_bias(value)

    def rotated(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys with positions applied, and values: [batch, seq, heads, head_dim] each."""
        query, key, value = self.projected(hidden)
        value = value.contiguous()  # a view would keep queries and keys for the backward pass, from before the rotation
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return *self.position(query, key, rotary), value
