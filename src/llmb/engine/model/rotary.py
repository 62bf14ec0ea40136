# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding (Su et al., 2021): tables computed on the fly in fp32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.catalogue.records import Model, RopeScaling
from llmb.engine.kernels.arguments import Rotation
from llmb.engine.kernels.rotary import rotate


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
    """Rotates queries or keys, see ``kernels.rotary.rotate``."""
    return rotate(heads, Rotation(rotary.cos, rotary.sin, interleaved))
