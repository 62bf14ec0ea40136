# SPDX-License-Identifier: Apache-2.0
"""Compiles a model block by block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.model.softmax import Softmax


def apply_compile(model: Decoder, backend: str | Callable[..., Any] = "inductor") -> None:
    """Replaces the forward pass of every block by a compiled one, and what the loss does between its products.

    Blocks of the same kind share their code. The method is replaced, not the module: parameters keep their names, and
    what gathers parameters before a block stays outside, where no compiler reorders it. So do experts, but for their
    activation: how many rows it has depends on the tokens.
    """
    for block in model.layers.values():
        if isinstance(block, MoEBlock):
            compile_method(block, "before_experts", backend)
            compile_method(block.mlp.experts, "activate", backend, rows_vary=True)
            compile_method(block, "after_experts", backend)
        else:
            compile_method(block, "forward", backend)
    if model.lm_head is not None:
        model.lm_head.softmax = Softmax(backend)


def compile_method(module: nn.Module, name: str, backend: str | Callable[..., Any], *, rows_vary: bool = False) -> None:
    setattr(module, name, torch.compile(getattr(module, name), dynamic=rows_vary, backend=backend))
