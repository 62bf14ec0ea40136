# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings, and their gradient in the cast of that of the product of query, key and value.

The product has one row for each token, with the heads of the queries, of the keys and of the values side by side.
``cast_rotated_gradient`` has a Triton kernel for GPUs, in ``rotary_triton``, and torch code, which is its reference.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from llmb.engine.kernels.fp8_cast import BothWays, cast_both_ways, has_kernel


class Heads(NamedTuple):
    """Query, key and value, or their gradients: [batch, seq, heads, head_dim] each, with any strides."""

    query: Tensor
    key: Tensor
    value: Tensor


class Rotation(NamedTuple):
    """cos and sin: [seq, pairs] or [batch, seq, pairs], fp32.

    A pair is elements (i, i + pairs) of a head, or (2i, 2i + 1) when ``interleaved``.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool


class RotaryFactors(NamedTuple):
    """A rotation of whole heads: each element times ``own``, plus the other of its pair times ``other``.

    [seq, 1, 2 * pairs] or [batch, seq, 1, 2 * pairs], fp32.
    """

    own: Tensor
    other: Tensor
    interleaved: bool


def factors_of(rotation: Rotation) -> RotaryFactors:
    cos, sin = rotation.cos.unsqueeze(-2), rotation.sin.unsqueeze(-2)
    if rotation.interleaved:
        return RotaryFactors(cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2), True)
    return RotaryFactors(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1), False)


def rotate(heads: Tensor, factors: RotaryFactors) -> Tensor:
    """The leading elements of each head: [batch, seq, heads, head_dim], same shape and dtype out."""
    size = factors.own.shape[-1]
    rotated, rest = heads[..., :size].float(), heads[..., size:]
    partners = (
        rotated.unflatten(-1, (-1, 2)).roll(1, -1).flatten(-2) if factors.interleaved else rotated.roll(size // 2, -1)
    )
    rotated = torch.addcmul(rotated * factors.own, partners, factors.other).to(heads.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat((rotated, rest), dim=-1)


def cast_rotated_gradient(gradients: Heads, rotation: Rotation, scale: Tensor, dtype: torch.dtype) -> BothWays:
    """``cast_both_ways`` of the gradient of a product, from those of its rotated heads; it is not stored in bf16."""
    if has_kernel(gradients.query):
        from llmb.engine.kernels import rotary_triton

        casts: BothWays = rotary_triton.cast_rotated_gradient(*gradients, *rotation, scale, dtype)
        return casts
    return cast_both_ways(rotated_back(gradients, rotation), scale, dtype)


def rotated_back(gradients: Heads, rotation: Rotation) -> Tensor:
    """The gradient of a product, [batch * seq, outputs], from those of its rotated heads."""
    back = factors_of(rotation._replace(sin=-rotation.sin))
    query, key = (rotate(part, back) for part in (gradients.query, gradients.key))
    joined = torch.cat((query, key, gradients.value), -2)
    return joined.flatten(0, 1).flatten(1)
