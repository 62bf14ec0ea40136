# SPDX-License-Identifier: Apache-2.0
"""Activation checkpointing: what the backward pass recomputes instead of keeping."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llmb.engine.kernels.span_attention import forward as span_attention
from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.precision.experts import expert_products

aten = torch.ops.aten
KEPT = frozenset(
    {
        aten.mm.default,
        aten._scaled_mm.default,
        aten._grouped_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._efficient_attention_forward.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.torch_attn._varlen_attn.default,
        expert_products._opoverload,
        span_attention._opoverload,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops._c10d_functional.wait_tensor.default,
    }
)
"""What ``selective`` keeps if it is needed again: the results that are most expensive to compute for their size.

What is reduced and scattered is a fraction of the products that are summed. An exchange of rows is kept as what waits
for it is: begun again, nothing would wait for it."""


def apply_recompute(model: Decoder, mode: Literal["none", "selective", "full"], *, by_part: bool = False) -> None:
    """Every block keeps only its input (``full``), or also results of matrix products and attention (``selective``).

    ``by_part`` treats the parts of a block that are compiled separately as blocks.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in model.blocks():
        for stage in MoEBlock.PARTS if by_part and isinstance(block, MoEBlock) else ("compute",):
            block.wrap(stage, lambda function: partial(checkpoint, function, **options))


def hide_gathering(model: Decoder) -> None:
    """Hides from ``selective`` what FSDP does before and after a module inside a block, such as routed experts.

    Recomputation has to run the same operations as the forward pass, but parameters may already be gathered then.
    """
    for block in model.blocks():
        for module in [part for part in block.modules() if part is not block and isinstance(part, FSDPModule)]:
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                hooks.update({key: _unseen(hook) for key, hook in hooks.items()})


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def unseen(*args: Any, **options: Any) -> Any:  # noqa: ANN401 (whatever the hook takes and returns)
        selective = isinstance(_get_current_dispatch_mode(), _CachingTorchDispatchMode | _CachedTorchDispatchMode)
        with _pop_mode_temporarily() if selective else nullcontext():
            return hook(*args, **options)

    return unseen


def _policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:  # noqa: ARG001
    return CheckpointPolicy.PREFER_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
