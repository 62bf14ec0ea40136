# SPDX-License-Identifier: Apache-2.0
"""Where a layer finds its scales, and leaves what it found in its tensors."""

from functools import partial

import torch
from torch import Tensor

from llmb.engine.precision.scaling import GRADIENT, INPUT, Scales


class LayerScales:
    """A layer's own part of ``Scales``, and how it gets there what it finds in its tensors.

    ``probe`` takes part in the layer's product without changing it. What comes as its "gradient", once for every
    backward pass, are the largest values of input and gradient: so nothing is written within the passes, which may be
    compiled, and are computed again by recomputation.
    """

    def __init__(self, scales: Scales, number: int) -> None:
        self.scales = scales
        self.scale = scales.scale[number]
        self.history = scales.history[number]
        self.probe = torch.zeros(2, device=scales.amax.device, requires_grad=True)
        found = scales.amax[number, INPUT : GRADIENT + 1 : GRADIENT - INPUT]
        self.probe.register_post_accumulate_grad_hook(partial(_record, found))  # type: ignore[no-untyped-call]


def _record(amax: Tensor, probe: Tensor) -> None:
    assert probe.grad is not None
    torch.maximum(amax, probe.grad, out=amax)
    probe.grad = None
