# SPDX-License-Identifier: Apache-2.0
"""Causal attention to keys that begin before the queries, without a mask, combined by log-sum-exp (Liu et al.,
2023)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmb.engine.collectives import Context

aten = torch.ops.aten


class TokenSpan(NamedTuple):
    """``length`` queries from index ``query``; their own keys begin at ``own_key``, the keys before them at ``key``."""

    query: int
    length: int
    key: int
    own_key: int


class SpanPart(NamedTuple):
    """Queries and keys. Each query attends to all keys or, if ``causal``, to the keys up to its own."""

    queries: slice
    keys: slice
    causal: bool


class Kernel(NamedTuple):
    """An attention kernel for [batch, heads, tokens, head_dim]; both functions have options ``causal`` and
    ``scale``."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """Maps query, key and value to the result and its log-sum-exp, [batch, heads, tokens]."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Maps gradient, query, key, value, result and log-sum-exp to the gradients of query, key and value."""


def span_attention(
    query: Tensor, key: Tensor, value: Tensor, spans: Sequence[TokenSpan], kernel: str, scale: float | None = None
) -> Tensor:
    """Return attention, [batch, queries, heads, head_dim]; ``spans`` must cover all queries. ``scale``: by default 1 /
    sqrt(head_dim)."""
    numbers = [number for span in spans for number in span]
    seen: Tensor = _SpanAttention.apply(query, key, value, numbers, kernel, scale)
    return seen


def _cudnn_forward(*heads: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    seen, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, causal, scale=scale)
    return seen, lse.view(seen.shape[:3])


def _cudnn_backward(*tensors: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    *heads, lse = tensors
    unused = torch.empty((), dtype=torch.int64, device=lse.device)  # of dropout
    lengths = (heads[1].shape[2], heads[2].shape[2])
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        *heads, lse.unsqueeze(-1), unused, unused, None, None, None, *lengths, 0.0, causal, scale=scale
    )
    return gradients


def _cpu_forward(*heads: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
    return result


def _cpu_backward(*tensors: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *tensors, 0.0, causal, scale=scale
    )
    return gradients


KERNELS: Mapping[str, Kernel] = MappingProxyType(
    {"cudnn": Kernel(_cudnn_forward, _cudnn_backward), "cpu-flash": Kernel(_cpu_forward, _cpu_backward)}
)


def _spans(numbers: Sequence[int]) -> list[TokenSpan]:
    return [TokenSpan(*numbers[start : start + 4]) for start in range(0, len(numbers), 4)]


def _parts(span: TokenSpan) -> Iterator[SpanPart]:
    queries = slice(span.query, span.query + span.length)
    yield SpanPart(queries, slice(span.own_key, span.own_key + span.length), causal=True)
    if span.key < span.own_key:
        yield SpanPart(queries, slice(span.key, span.own_key), causal=False)


@torch.library.custom_op("llmb::span_attention", mutates_args=())
def forward(
    query: Tensor, key: Tensor, value: Tensor, numbers: Sequence[int], kernel: str, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result, [batch, queries, heads, head_dim], and its log-sum-exp, [batch, heads, queries] fp32."""
    outputs, lse = _empty_results(query, value)
    query, key, value, into = (heads.transpose(1, 2) for heads in (query, key, value, outputs))
    for span in _spans(numbers):
        for part in _parts(span):
            queries, keys = part.queries, part.keys
            output, scores = KERNELS[kernel].forward(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], causal=part.causal, scale=scale
            )
            if part.causal:
                into[:, :, queries], lse[:, :, queries] = output, scores
            else:
                weight = torch.sigmoid(scores - lse[:, :, queries]).unsqueeze(-1)
                into[:, :, queries].lerp_(output, weight.to(output.dtype))
                lse[:, :, queries] = torch.logaddexp(lse[:, :, queries], scores)
    return outputs, lse


@forward.register_fake
def _(query, key, value, numbers, kernel, scale=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    return _empty_results(query, value)


def _empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = query.shape
    outputs = query.new_empty((batch, queries, heads, value.shape[-1]))
    return outputs, query.new_empty((batch, heads, queries), dtype=torch.float32)


@torch.library.custom_op("llmb::span_attention_backward", mutates_args=())
def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    lse: Tensor,
    numbers: Sequence[int],
    kernel: str,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value."""
    results = (query.new_empty(query.shape), key.new_zeros(key.shape), value.new_zeros(value.shape))
    to_query, to_key, to_value = (result.transpose(1, 2) for result in results)
    gradient, query, key, value, seen = (heads.transpose(1, 2) for heads in (gradient, query, key, value, seen))
    for span in _spans(numbers):
        for part in _parts(span):
            queries, keys = part.queries, part.keys
            of_query, of_key, of_value = KERNELS[kernel].backward(
                gradient[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                seen[:, :, queries],
                lse[:, :, queries].contiguous(),
                causal=part.causal,
                scale=scale,
            )
            if part.causal:
                to_query[:, :, queries] = of_query
            else:
                to_query[:, :, queries] += of_query
            to_key[:, :, keys] += of_key
            to_value[:, :, keys] += of_value
    return results


@backward.register_fake
def _(gradient, query, key, value, seen, lse, numbers, kernel, scale=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


class _Context(Context):
    numbers: list[int]
    kernel: str
    scale: float | None


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context, query: Tensor, key: Tensor, value: Tensor, numbers: list[int], kernel: str, scale: float | None
    ) -> Tensor:
        outputs: Tensor
        outputs, lse = forward(query, key, value, numbers, kernel, scale)
        ctx.save_for_backward(query, key, value, outputs, lse)
        ctx.numbers, ctx.kernel, ctx.scale = numbers, kernel, scale
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        return *backward(gradient, *ctx.saved_tensors, ctx.numbers, ctx.kernel, ctx.scale), None, None, None
