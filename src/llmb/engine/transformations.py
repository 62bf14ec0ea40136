# SPDX-License-Identifier: Apache-2.0
"""The transformations of a model before training, in the only order that works; comments explain the order."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from llmb.catalogue.records import ADAPTED, Lora
from llmb.engine.data.batches import MicroBatch
from llmb.engine.kernels.span_attention import forward as span_attention
from llmb.engine.model.adapter import OWN, Adapter, Dropout, FusedAdapter, TokenKeys
from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Decoder, MoEBlock
from llmb.engine.model.loss import Softmax
from llmb.engine.model.moe import BalancedRouter, MoELayer
from llmb.engine.parallel.context_parallel import apply_context_parallel
from llmb.engine.parallel.data_parallel import compute_dtype, precision_policy, shard
from llmb.engine.parallel.expert_parallel import apply_expert_parallel
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.tensor_parallel import apply_tensor_parallel
from llmb.engine.precision.apply import apply_fp8
from llmb.engine.precision.experts import expert_products
from llmb.runs.plan import EnginePlan

CompilerBackend = str | Callable[..., Any]
"""The name of one of torch's compiler backends, or a backend function."""
INDUCTOR = "inductor"


aten = torch.ops.aten
SAVED = frozenset(
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
"""Operators whose results ``selective`` recompute saves; an all-to-all, too, because nothing would wait for a
recomputed one."""


def transform(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks, backend: CompilerBackend) -> None:
    """Transform this rank's stages, on the meta device, as the plan requires; raise EnvironmentProblem for unsupported
    FP8."""
    layout, path = plan.recipe.layout, plan.compute_path
    for stage in stages:
        # Before expert parallelism, which does not exchange token counts if routers are balanced.
        set_routing(stage, plan, ranks)
        # Before FP8 and data parallelism, which apply to the experts that a rank holds.
        apply_expert_parallel(stage, ranks.expert_mesh["ep", "etp"])
    # After expert parallelism; before selective recompute and compile, which change blocks that it replaces, and tensor
    # parallelism, which shards the weights of the new layers. All stages at once: their scales are one tensor.
    apply_fp8(stages, plan, ranks)
    for stage in stages:
        # Before parameters are sharded: their all-gathers stay outside of compiled blocks, where the compiler does not
        # reorder them. Selective recompute is inside, where only the compiler can decide what is kept.
        if plan.recompute == "selective":
            apply_recompute(stage, plan.recompute, by_part=path.compiled)
        if path.compiled:
            apply_compile(stage, backend)
        if plan.recompute == "full":
            # Around compiled blocks: inside, torch 2.13 fails for tensor-parallel parameters.
            apply_recompute(stage, plan.recompute)
        # After expert parallelism and FP8, which make new parameters and layers: everything that exists is frozen, and
        # adapters do not use FP8. Before tensor parallelism, which shards them, and reduces after they are added.
        if plan.lora:
            apply_lora(stage, plan.lora, compute_dtype(plan.recipe.dtype))
            add_dropout(stage, plan.lora.dropout, plan.seed)
        # Before data parallelism, which shards the remaining part of a rank.
        apply_tensor_parallel(
            stage,
            ranks.mesh["tp"],
            sequence_parallel=layout.sequence_parallel,
            sums_in_products=path.gathers_fp8_gradients or path.fuses_tp,
            fused=path.fuses_tp,
        )
        # Before data parallelism, which wraps modules: attention is replaced.
        apply_context_parallel(stage, ranks.mesh["cp"], layout.seq_len)
        # After everything that adds, replaces or shards a parameter: it wraps the existing ones.
        if path.shards_parameters:
            shard(stage, ranks.fsdp, ranks.expert_fsdp, precision_policy(plan), keep_whole=path.keeps_gathered)
        if plan.recompute == "selective":
            hide_gathering(stage)  # hooks of data parallelism
        if plan.keep_logits and stage.lm_head is not None:
            stage.lm_head.smallest_bytes = math.inf  # a size that only the loss uses


def set_routing(stage: Decoder, plan: EnginePlan, ranks: Ranks) -> None:
    """Set up MoE layers: capacity factor, overlap and parts of the dispatch and, to force load balancing, routers."""
    for layer in stage.moe_layers().values():
        layer.capacity_factor = plan.capacity_factor
        layer.overlaps_dispatch = plan.compute_path.overlaps_dispatch
        layer.parts = plan.compute_path.dispatch_parts
        if plan.force_load_balancing:
            layer.router = BalancedRouter(layer.router, ranks.rank % (ranks.world_size // ranks.mesh["pp"].size()))


def apply_compile(model: Decoder, backend: CompilerBackend = INDUCTOR) -> None:
    """Compile every block's forward pass, except routed experts' products, and the loss between its products."""
    compiled = partial(torch.compile, dynamic=False, backend=backend)
    for block in model.blocks():
        if isinstance(block, MoEBlock):
            block.wrap("before_experts", compiled)
            experts = block.mlp.experts
            experts.activate = torch.compile(experts.activate, dynamic=True, backend=backend)
            if block.mlp.shared_expert is not None:
                for part in MoELayer.SHARED:
                    block.wrap(part, compiled)
            block.wrap("after_experts", compiled)
        else:
            block.wrap("compute", compiled)
    if model.lm_head is not None:
        model.lm_head.softmax = Softmax(backend)


def with_varying_segments(batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Yield the micro-batches with the number of segments marked as dynamic, so that blocks are compiled only once."""
    for batch in batches:
        if batch.segments is not None:
            for part in {*batch.segments.document, *batch.segments.chunk}:
                for tensor in part:
                    if tensor is not None:
                        torch._dynamo.mark_dynamic(tensor, 0)
        yield batch


def apply_recompute(model: Decoder, mode: Literal["none", "selective", "full"], *, by_part: bool = False) -> None:
    """Make every block save only its input (``full``) or also what ``_policy`` saves (``selective``); ``by_part``:
    per MoE part."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in model.blocks():
        for stage in MoEBlock.PARTS if by_part and isinstance(block, MoEBlock) else ("compute",):
            block.wrap(stage, lambda function: partial(checkpoint, function, **options))


def hide_gathering(model: Decoder) -> None:
    """Hide FSDP's hooks within blocks from ``selective`` recompute, which must run the same operations as the forward
    pass."""
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
    saves = op in SAVED or getattr(op, "namespace", "") == "symm_mem"  # fused products
    return CheckpointPolicy.PREFER_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def apply_lora(model: Decoder, lora: Lora, dtype: torch.dtype) -> None:
    """Freeze parameters, convert them to ``dtype`` and add fp32 adapters in place, before parameters are sharded or
    have values."""
    freeze(model, dtype)
    names = ADAPTED[lora.targets]
    for block in model.layers.values():
        for owner in list(block.modules()):
            children = {name: layer for name, layer in owner.named_children() if name in names}
            layers = {name: layer for name, layer in children.items() if isinstance(layer, nn.Linear)}
            if lora.fused and isinstance(owner, Attention):
                owner.qkv_adapter = FusedAdapter(layers, lora)
            elif not lora.fused:
                for layer in layers.values():
                    setattr(layer, OWN, Adapter(layer, lora))


def add_dropout(model: Decoder, probability: float, seed: int) -> None:
    """Add input dropout to all adapters of ``model``, with common ``TokenKeys``, unless ``probability`` is 0."""
    tokens = TokenKeys()
    for name, module in model.named_modules():
        if probability and isinstance(module, Adapter | FusedAdapter):
            module.dropout = Dropout(probability, name, seed, tokens)


def token_keys(model: Decoder) -> TokenKeys | None:
    """Return the token keys of the model's adapter dropout; None if it has no dropout."""
    return next((module.tokens for module in model.modules() if isinstance(module, Dropout)), None)


def freeze(model: Decoder, dtype: torch.dtype) -> None:
    """Freeze all parameters and convert them to ``dtype``: without updates they need no fp32 master weights."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
    model.tie()
