# SPDX-License-Identifier: Apache-2.0
"""Compiles a model block by block."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from llmb.engine.data.batches import MicroBatch
from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.model.loss import Softmax

CompilerBackend = str | Callable[..., Any]
"""The name of one of torch's backends, or a function that is one."""
INDUCTOR = "inductor"


def apply_compile(model: Decoder, backend: CompilerBackend = INDUCTOR) -> None:
    """Compiles the forward pass of every block, and the part of the loss between its matrix products.

    Blocks of the same kind share their code. Of experts only the activation is compiled, whose number of rows depends
    on the tokens.
    """
    compiled = partial(torch.compile, dynamic=False, backend=backend)
    for block in model.blocks():
        if isinstance(block, MoEBlock):
            block.wrap("before_experts", compiled)
            experts = block.mlp.experts
            experts.activate = torch.compile(experts.activate, dynamic=True, backend=backend)
            if block.mlp.shared_expert is not None:
                block.wrap("run_shared_expert", compiled)
            block.wrap("after_experts", compiled)
        else:
            block.wrap("compute", compiled)
    if model.lm_head is not None:
        model.lm_head.softmax = Softmax(backend)


def with_varying_segments(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Passes micro-batches on; their segments, whose number differs, do not make blocks compile again."""
    for batch in batches:
        if batch.segments is not None:
            for part in {*batch.segments.document, *batch.segments.chunk}:
                for tensor in part:
                    if tensor is not None:
                        torch._dynamo.mark_dynamic(tensor, 0)
        yield batch
