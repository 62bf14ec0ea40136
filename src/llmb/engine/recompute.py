# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: what the backward pass computes again instead of keeping."""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmb.engine.model.decoder import Decoder

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)
"""What ``selective`` keeps: the results that cost most to compute for their size."""


def apply_recompute(model: Decoder, mode: Literal["none", "selective", "full"]) -> None:
    """Every block keeps its input only (``full``), or also the results of matrix products and attention."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in model.layers.values():
        # The method, not the module, is replaced: parameters keep their names.
        block.forward = partial(checkpoint, block.forward, **options)


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
