# SPDX-License-Identifier: Apache-2.0
"""The transformations of a model before training, in the one order that works, with the reason for each place in it."""

import math
from collections.abc import Sequence

from llmb.engine.compile import CompilerBackend, apply_compile
from llmb.engine.expert_load import force_load_balancing, set_capacity
from llmb.engine.lora import add_dropout, apply_lora
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.context_parallel import apply_context_parallel
from llmb.engine.parallel.data_parallel import compute_dtype, precision_policy, shard, uses_fsdp
from llmb.engine.parallel.expert_parallel import apply_expert_parallel
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.tensor_parallel import apply_tensor_parallel
from llmb.engine.precision.apply import apply_fp8
from llmb.engine.recompute import apply_recompute, hide_gathering
from llmb.runs.plan import EnginePlan


def transform(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks, backend: CompilerBackend) -> None:
    """Changes this rank's stages in place as the plan requires. They are on the meta device: afterwards only this
    rank's shards are materialized. Raises EnvironmentProblem if a GPU has no FP8.
    """
    for stage in stages:
        # Before expert parallelism, which does not exchange token counts if routers are balanced.
        set_routing(stage, plan, ranks)
        # Before FP8 and data parallelism, which apply to the experts that a rank holds.
        apply_expert_parallel(stage, ranks.expert_mesh["ep", "etp"])
    # After expert parallelism; before selective recompute and compile, which change blocks that it replaces, and tensor
    # parallelism, which shards the weights of the new layers. All stages at once: their scales are one tensor.
    apply_fp8(stages, plan, ranks, keep_weights=keeps_parameters(plan, ranks))
    for stage in stages:
        recompute_and_compile(stage, plan, backend)
        # After expert parallelism and FP8, which make new parameters and layers: everything that exists is frozen, and
        # adapters stay in bf16. Before tensor parallelism, which shards them, and reduces after they are added.
        add_adapters(stage, plan)
        # Before data parallelism, which shards the remaining part of a rank.
        apply_tensor_parallel(stage, ranks.mesh["tp"], sequence_parallel=plan.recipe.layout.sequence_parallel)
        # Before data parallelism, which wraps modules: attention is replaced.
        apply_context_parallel(stage, ranks.mesh["cp"], plan.recipe.layout.seq_len)
        # After everything that adds, replaces or shards a parameter: it wraps the existing ones.
        shard_parameters(stage, plan, ranks)
        if plan.keep_logits and stage.lm_head is not None:
            stage.lm_head.smallest_bytes = math.inf  # a size that only the loss uses


def set_routing(stage: Decoder, plan: EnginePlan, ranks: Ranks) -> None:
    if plan.force_load_balancing:
        force_load_balancing(stage, ranks)
    if plan.capacity_factor is not None:
        set_capacity(stage, plan.capacity_factor)


def recompute_and_compile(stage: Decoder, plan: EnginePlan, backend: CompilerBackend) -> None:
    """Before parameters are sharded: their all-gathers stay outside of compiled blocks, where the compiler does not
    reorder them."""
    if plan.recompute == "selective":
        # Inside compiled blocks, where only the compiler can decide what is kept.
        apply_recompute(stage, plan.recompute, by_part=plan.compiled)
    if plan.compiled:
        apply_compile(stage, backend)
    if plan.recompute == "full":
        # Around compiled blocks: inside, torch 2.13 fails for tensor-parallel parameters.
        apply_recompute(stage, plan.recompute)


def add_adapters(stage: Decoder, plan: EnginePlan) -> None:
    if plan.lora:
        apply_lora(stage, plan.lora, compute_dtype(plan.recipe.dtype))
        if plan.lora.dropout:
            add_dropout(stage, plan.lora.dropout, plan.seed)


def shard_parameters(stage: Decoder, plan: EnginePlan, ranks: Ranks) -> None:
    if uses_fsdp(plan, ranks):
        policy = precision_policy(plan)
        shard(stage, ranks.fsdp, ranks.expert_fsdp, policy, keep_whole=keeps_parameters(plan, ranks))
    if plan.recompute == "selective":
        hide_gathering(stage)  # hooks of data parallelism


def keeps_parameters(plan: EnginePlan, ranks: Ranks) -> bool:
    """True if parameters stay gathered between a step's micro-batches."""
    return not uses_fsdp(plan, ranks) or plan.recipe.layout.pp > 1
