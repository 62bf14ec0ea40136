# SPDX-License-Identifier: Apache-2.0
"""Weights of layers with the same input in one memory, as a run's flat buffers have them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmb.engine.model.linear import Linear


def side_by_side(layers: Sequence[Linear]) -> Tensor:
    """Moves the weights of layers side by side."""
    whole = torch.cat([layer.weight.detach() for layer in layers])
    parts = whole.split([len(layer.weight) for layer in layers])
    for layer, part in zip(layers, parts, strict=True):
        layer.weight.data = part
    return whole
