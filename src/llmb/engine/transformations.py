# SPDX-License-Identifier: Apache-2.0
"""The transformations of a model before training, in this order.

Stages are on the meta device; afterwards only this rank's shards are materialized.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmb.engine.compile import apply_compile
from llmb.engine.expert_load import force_load_balancing, set_capacity
from llmb.engine.lora import add_dropout, apply_lora
from llmb.engine.model.decoder import Decoder
from llmb.engine.parallel.context_parallel import apply_context_parallel
from llmb.engine.parallel.data_parallel import compute_dtype, is_sharded, precision_policy, shard
from llmb.engine.parallel.expert_parallel import apply_expert_parallel
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.tensor_parallel import apply_tensor_parallel
from llmb.engine.precision.apply import apply_fp8
from llmb.engine.recompute import apply_recompute, hide_gathering
from llmb.runs.plan import EnginePlan

Apply = Callable[[Sequence[Decoder], EnginePlan, Ranks], None]


@dataclass(frozen=True, slots=True)
class Transformation:
    """One transformation. ``apply`` changes this rank's stages in place if the plan requires it."""

    name: str
    reason: str
    """Reason for its position in the order."""
    apply: Apply


def transform(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    """Applies all ``TRANSFORMATIONS``. Raises EnvironmentProblem if a GPU has no FP8."""
    for step in TRANSFORMATIONS:
        step.apply(stages, plan, ranks)


def keeps_parameters(plan: EnginePlan, ranks: Ranks) -> bool:
    """True if parameters stay gathered between a step's micro-batches."""
    whole = not is_sharded(plan.recipe.model, ranks)
    return whole or plan.parallelism.keeps_parameters or plan.recipe.layout.pp > 1


def _selective_recompute(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    if plan.recompute == "selective":
        for stage in stages:
            apply_recompute(stage, plan.recompute, by_part=plan.compiled)


def _compile(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    if plan.compiled:
        for stage in stages:
            apply_compile(stage)


def _full_recompute(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    if plan.recompute == "full":
        for stage in stages:
            apply_recompute(stage, plan.recompute)


def _routing(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    for stage in stages:
        if plan.force_load_balancing:
            force_load_balancing(stage, ranks)
        if plan.capacity_factor is not None:
            set_capacity(stage, plan.capacity_factor)


def _expert_parallel(stages: Sequence[Decoder], _plan: EnginePlan, ranks: Ranks) -> None:
    for stage in stages:
        apply_expert_parallel(stage, ranks.expert_mesh["ep", "etp"])


def _fp8(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    apply_fp8(stages, plan, ranks, keep_weights=keeps_parameters(plan, ranks))


def _adapters(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    if plan.lora:
        for stage in stages:
            apply_lora(stage, plan.lora, compute_dtype(plan.recipe.dtype))
            if plan.lora.dropout:
                add_dropout(stage, plan.lora.dropout, plan.seed)


def _tensor_parallel(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    for stage in stages:
        apply_tensor_parallel(stage, ranks.tp, sequence_parallel=plan.recipe.layout.sequence_parallel)


def _context_parallel(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    for stage in stages:
        apply_context_parallel(stage, ranks.cp, plan.recipe.layout.seq_len)


def _data_parallel(stages: Sequence[Decoder], plan: EnginePlan, ranks: Ranks) -> None:
    policy = precision_policy(plan.recipe.dtype, plan.recipe.training.grad_reduce_dtype)
    for stage in stages if is_sharded(plan.recipe.model, ranks) else ():
        shard(stage, ranks.fsdp, ranks.expert_fsdp, policy, keep_whole=keeps_parameters(plan, ranks))


def _hidden_gathering(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    if plan.recompute == "selective":
        for stage in stages:
            hide_gathering(stage)


def _whole_logits(stages: Sequence[Decoder], plan: EnginePlan, _ranks: Ranks) -> None:
    for stage in stages:
        if plan.keep_logits and stage.lm_head is not None:
            stage.lm_head.smallest_bytes = math.inf


TRANSFORMATIONS = (
    Transformation(
        "forced balance",
        "Before expert parallelism, which does not exchange token counts if routers are balanced.",
        _routing,
    ),
    Transformation(
        "expert parallel",
        "Before FP8 and data parallelism, which apply to the experts that a rank holds.",
        _expert_parallel,
    ),
    Transformation(
        "FP8",
        "After expert parallelism; before selective recompute and compile, which change blocks that it replaces, and "
        "tensor parallelism, which shards the weights of the new layers.",
        _fp8,
    ),
    Transformation(
        "selective recompute",
        "Before compile, so that it is inside compiled blocks, where only the compiler can decide what is kept.",
        _selective_recompute,
    ),
    Transformation(
        "compile",
        "Before parameters are sharded: their all-gathers stay outside, where the compiler does not reorder them.",
        _compile,
    ),
    Transformation(
        "full recompute",
        "After compile, around compiled blocks: inside, torch 2.13 fails for tensor-parallel parameters.",
        _full_recompute,
    ),
    Transformation(
        "adapters",
        "After expert parallelism and FP8, which make new parameters and layers: everything that exists is frozen, and "
        "adapters stay in bf16. Before tensor parallelism, which shards them, and reduces after they are added.",
        _adapters,
    ),
    Transformation(
        "tensor parallel",
        "Before data parallelism, which shards the remaining part of a rank.",
        _tensor_parallel,
    ),
    Transformation(
        "context parallel",
        "Before data parallelism, which wraps modules: attention is replaced.",
        _context_parallel,
    ),
    Transformation(
        "data parallel",
        "After everything that adds, replaces or shards a parameter: it wraps the existing ones.",
        _data_parallel,
    ),
    Transformation(
        "hidden gathering",
        "After data parallelism, whose hooks it hides from selective recomputation.",
        _hidden_gathering,
    ),
    Transformation(
        "whole logits",
        "At any position: it sets a size that only the loss uses.",
        _whole_logits,
    ),
)
"""Each transformation gets the result of the earlier ones."""
