# SPDX-License-Identifier: Apache-2.0
"""Compiles a model block by block."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.model.softmax import Softmax


def apply_compile(model: Decoder, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compiles the forward pass of every block, and the part of the loss between its matrix products.

    Blocks of the same kind share their code. The method is replaced, not the module: parameters keep their names, and
    the gathering of parameters before a block stays outside, where the compiler cannot reorder it. The same holds for
    experts, except their activation: its number of rows depends on the tokens.
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


def with_varying_segments(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """The same micro-batches; their segments, whose number differs, do not make blocks compile again."""
    for batch in batches:
        if batch.segments is not None:
            for part in {*batch.segments.document, *batch.segments.chunk}:
                for tensor in part:
                    if tensor is not None:
                        torch._dynamo.mark_dynamic(tensor, 0)
        yield batch
