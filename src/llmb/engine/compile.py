# SPDX-License-Identifier: Apache-2.0
"""Compiles a model block by block."""

import torch

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.softmax import Softmax


def apply_compile(model: Decoder, backend: str = "inductor") -> None:
    """Replaces the forward pass of every block by a compiled one, and what the loss does between its products.

    Blocks of the same kind share their code. The method is replaced, not the module: parameters keep their names, and
    what gathers parameters before a block stays outside, where no compiler reorders it.
    """
    for block in model.layers.values():
        block.forward = torch.compile(block.forward, dynamic=False, backend=backend)
    if model.lm_head is not None:
        model.lm_head.softmax = Softmax(backend)
