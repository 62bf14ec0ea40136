# SPDX-License-Identifier: Apache-2.0
"""The parts of an experiment's name that say how a run differs from its recipe. Pure."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from llmb.catalogue.records import Dtype, Recipe
from llmb.runs.logits import keeps_logits
from llmb.runs.parallelism import Parallelism

if TYPE_CHECKING:
    from llmb.runs.plan import Plan

ENGINE = "engine"
OVERRIDES = {"seq_len": "seq{}", "first_stage_layers": "first{}", "last_stage_layers": "last{}"}
"""Overrides of the layout that the rest of the name does not have."""
LONGEST = 60
"""Together with the rest it has to fit into the name of a file, which may have 255 characters."""
DIGITS = 6


def name_parts(plan: "Plan", program: str, arguments: Mapping[str, str]) -> str:
    """Each with an underscore before it; of a recipe without changes on GPUs only their type, on a CPU nothing."""
    parts = [*_layout_parts(plan.recipe), *_program_parts(program, arguments)]
    settings = "_".join([*_data_parts(plan), *_engine_parts(plan)])
    parts.append(settings if len(settings) <= LONGEST else f"set-{_digest(settings)}")
    return "".join(f"_{part}" for part in parts if part)


def _layout_parts(recipe: Recipe) -> Iterator[str]:
    if recipe.gpu_type != "cpu":
        yield recipe.gpu_type
    layout = recipe.layout
    for name in recipe.overridden:
        if name in OVERRIDES:
            yield OVERRIDES[name].format(getattr(layout, name))
    if not layout.sequence_parallel and "sequence_parallel" in recipe.overridden:
        yield "no-sp"
    if recipe.proxy:
        yield f"proxy{layout.layers}of{recipe.full_layers}"


def _program_parts(program: str, arguments: Mapping[str, str]) -> Iterator[str]:
    if program != ENGINE:
        yield program
    if arguments:
        yield f"args-{_digest(repr(sorted(arguments.items())))}"


def _data_parts(plan: "Plan") -> Iterator[str]:
    """Where data and adapters are not those of the recipe."""
    recipe, data = plan.recipe, plan.origin.data
    if data.kind != ("synthetic" if recipe.task == "pretrain" else "dataset"):
        yield data.kind
    if plan.lora and recipe.lora and plan.lora != recipe.lora:
        before, after = recipe.lora.model_dump(), plan.lora.model_dump()
        yield from (f"{name}{value}" for name, value in after.items() if value != before[name])
    if plan.checkpoint_interval:
        yield f"save{plan.checkpoint_interval}"


def _engine_parts(plan: "Plan") -> Iterator[str]:
    """Settings of llmb's engine; other programs do not have them."""
    from llmb.runs.choices import Choices  # which import what imports this
    from llmb.runs.plan import EnginePlan

    if not isinstance(plan, EnginePlan):
        return
    recipe, training = plan.recipe, plan.recipe.training
    kept = keeps_logits(recipe)
    named = {
        str(plan.fp8_recipe): plan.fp8_recipe not in (None, Choices().fp8_recipe_of(recipe)),
        "emulated": plan.emulate_fp8,
        f"recompute-{plan.recompute}": plan.recompute != "none",
        "compiled": plan.compiled and plan.device == "cpu",
        "eager": not plan.compiled and plan.device == "cuda",
        f"attention-{plan.attention_backend}": plan.attention_backend != "auto",
        "logits": plan.keep_logits and not kept,
        "chunked-logits": kept and not plan.keep_logits,
        "balanced": plan.force_load_balancing,
        "dropless": plan.capacity_factor is None and recipe.capacity_factor and not plan.force_load_balancing,
        f"capacity{plan.capacity_factor or 0:g}": plan.capacity_factor not in (None, recipe.capacity_factor),
        f"reduce-{training.grad_reduce_dtype}": training.grad_reduce_dtype == "fp32" and recipe.dtype is not Dtype.FP32,
        f"documents{training.document_tokens}": training.document_tokens is not None
        and training.document_lengths == "uniform",
    }
    yield from (text for text, differs in named.items() if differs)
    chosen, usual = plan.parallelism.settled(recipe), Parallelism().settled(recipe)
    if chosen.dp_sharding != usual.dp_sharding:
        yield f"shard-{chosen.dp_sharding}"
    if chosen.dp_shard_size:
        yield f"shards{chosen.dp_shard_size}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]
