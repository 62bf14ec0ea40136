# SPDX-License-Identifier: Apache-2.0
"""Scales of one layer, and how the largest values of its tensors are recorded."""

from functools import partial

import torch
from torch import Tensor

from llmb.engine.precision.scaling import GRADIENT, INPUT, WEIGHT, Scales


class LayerScales:
    """One layer's part of ``Scales``, with a hook that records largest values.

    ``probe`` is an operand of the layer's product that does not change it. Its "gradient", once per backward pass,
    holds the largest values of input and gradient. So nothing is written within the passes, which may be compiled or
    recomputed.
    """

    def __init__(self, scales: Scales, number: int) -> None:
        self.scales = scales
        self.scale = scales.scale[number]
        self.factors = scales.of_layer(number)
        self.history = scales.history[number]
        self.weight_amax = scales.amax[number, WEIGHT]
        self.probe = torch.zeros(2, device=scales.amax.device, requires_grad=True)
        found = scales.amax[number, INPUT : GRADIENT + 1 : GRADIENT - INPUT]
        self.probe.register_post_accumulate_grad_hook(partial(_record, found))


def _record(amax: Tensor, probe: Tensor) -> None:
    assert probe.grad is not None
    torch.maximum(amax, probe.grad, out=amax)
    probe.grad = None
