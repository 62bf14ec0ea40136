# SPDX-License-Identifier: Apache-2.0
"""Options that make a plan again, for those who have only its record."""

from collections.abc import Iterator
from typing import Any

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe, Record
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.options.option import arguments_of
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan, pretending

SETTINGS = (
    *("steps", "seed", "fp8_recipe", "emulate_fp8", "recompute", "compiled", "keep_logits", "attention_backend"),
    *("force_load_balancing", "save_checkpoint", "checkpoint_interval", "checkpoint_dir", "verify_checkpoint"),
    *("stall_limit_s", "parallelism"),
)
"""Choices that a plan has under the same name."""
OF_TRAINING = ("peak_lr", "warmup_steps", "grad_reduce_dtype")


def arguments_of_plan(catalogue: Catalogue, plan: EnginePlan) -> list[str]:
    """Arguments of ``llmb run`` and ``submit`` by which they train the same, without what is the default.

    Profiles are not recorded again. Raises UsageError if the catalogue does not have the recipe.
    """
    recipe, rank = plan.recipe, plan.recipe.pretended_rank
    request = _request(recipe)
    usual = resolve(catalogue, request)
    usual_plan = make_plan(usual if rank is None else pretending(usual, rank), Choices(), device=plan.device)
    choices = Choices(**dict(_choices(plan, usual_plan)))
    pretends = [] if rank is None else ["--pretend-scale", str(recipe.scale), "--rank", str(rank)]
    return [*arguments_of(request), *arguments_of(choices), *pretends]


def _request(recipe: Recipe) -> Request:
    return Request(
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype.value,
        scale=recipe.scale,
        gpu_type=recipe.gpu_type,
        release=recipe.release,
        overrides=Overrides(**{name: getattr(recipe.layout, name) for name in recipe.overridden}),
    )


def _choices(plan: EnginePlan, usual: EnginePlan) -> Iterator[tuple[str, Any]]:
    """Choices whose values are not what the recipe has without them."""
    pairs: list[tuple[str, Record, Record]] = [(name, plan, usual) for name in SETTINGS]
    pairs += [(name, plan.recipe.training, usual.recipe.training) for name in OF_TRAINING]
    for name, own, other in pairs:
        if getattr(own, name) != getattr(other, name):
            yield name, getattr(own, name)
    training = plan.recipe.training
    chose_documents = training.document_lengths == "uniform"  # others follow from the recipe
    if chose_documents and training.document_tokens != usual.recipe.training.document_tokens:
        yield "document_tokens", training.document_tokens
    if plan.window.rule != usual.window.rule:
        yield "window", plan.window.rule
    if plan.capacity_factor != usual.capacity_factor and not plan.force_load_balancing:
        yield "capacity_factor", plan.capacity_factor or 0.0
    if plan.resource_interval_s is None:
        yield "resources", False
    elif plan.resource_interval_s != usual.resource_interval_s:
        yield "resource_interval_s", plan.resource_interval_s
    for name, value in plan.lora or ():
        if value != getattr(usual.lora, name):
            yield f"lora_{name}", value
    yield from _inputs(plan)


def _inputs(plan: EnginePlan) -> Iterator[tuple[str, Any]]:
    fine_tunes = plan.recipe.task != "pretrain"
    if fine_tunes and plan.dataset is None:
        yield "synthetic", True
    elif plan.dataset:
        yield "dataset", plan.dataset.path
    if plan.start:
        yield "load_checkpoint", plan.start.path
        yield "steps", plan.steps  # by default one
    if plan.weights and (plan.lora or not plan.start):
        yield "weights", plan.weights.path
