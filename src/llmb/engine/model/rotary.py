# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., 2021): tables computed on the fly in fp32, and their application."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.catalogue.records import Model, RopeScaling


class Rotary(NamedTuple):
    """Positions of tokens, and the corresponding rotations.

    positions: [seq] or [batch, seq], integers. cos and sin: [*positions.shape, pairs] in fp32, where 2 * pairs of a
    head's elements are rotated, and the others unchanged.
    """

    positions: Tensor
    cos: Tensor
    sin: Tensor


def rotary_tables(model: Model, positions: Tensor) -> Rotary:
    angles = positions[..., None].float() * frequencies(model, positions.device)
    return Rotary(positions, angles.cos(), angles.sin())


def frequencies(model: Model, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair: [pairs], fp32."""
    size = int(model.head_dim * model.rotary_fraction)
    exponents = torch.arange(0, size, 2, device=device, dtype=torch.float32) / size
    plain = 1.0 / model.rope_theta**exponents
    return plain if model.rope_scaling is None else _scaled(plain, model.rope_scaling)


def _scaled(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: slow frequencies are divided by ``factor``, fast ones kept, those in between blended linearly."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def apply_rotary(heads: Tensor, rotary: Rotary, *, interleaved: bool) -> Tensor:
    """Rotate the leading elements of each head: [batch, seq, heads, head_dim], same shape and dtype out.

    A pair is elements (i, i + pairs), or (2i, 2i + 1) when ``interleaved``.
    """
    cos, sin = rotary.cos.unsqueeze(-2), rotary.sin.unsqueeze(-2)
    size = 2 * cos.shape[-1]
    turned, passed = heads[..., :size].float(), heads[..., size:]
    first, second = torch.unflatten(turned, -1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = (torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)).to(heads.dtype)
    return turned if passed.shape[-1] == 0 else torch.cat((turned, passed), dim=-1)
