# SPDX-License-Identifier: Apache-2.0
"""Plans of runs."""

import shlex
from typing import Any

from llmb.catalogue.layout_check import stage_layers
from llmb.catalogue.records import PARALLEL, unspecified_text
from llmb.metrics.throughput import checkpoint_bytes
from llmb.metrics.window import STEADY
from llmb.programs.engine.program import estimated
from llmb.report.recipe_report import identity_document, trained_text
from llmb.report.table import Table, interval_of, number, result_table, unknown
from llmb.runs.attention import fp8_product
from llmb.runs.choices import logits_text
from llmb.runs.failure import ranks_text
from llmb.runs.plan import EnginePlan, Plan, PredictedStep, scale_warnings
from llmb.runs.profiling import Profile
from llmb.runs.result import no_measurement


def plan_document(
    plan: EnginePlan, command: str, workers: tuple[str, ...], variables: dict[str, str]
) -> dict[str, Any]:
    return {
        **identity_document(plan.recipe),
        "origin": plan.origin.document(),
        "plan": plan.model_dump(mode="json"),
        "same_run": command,
        "command": list(workers),
        "variables": variables,
        "warnings": list(scale_warnings(plan)),
    }


def start_lines(plan: Plan) -> list[str]:
    """What a person has to know before the first step: what was left open, and what changes the run's meaning."""
    recipe = plan.recipe
    lines = [unspecified_text(recipe.unspecified)] if recipe.unspecified else []
    lines.append(f"{plan_title(plan)}, {plan.steps} steps")
    lines.append(plan.origin.text)
    if plan.start:
        lines.append(f"resumes from step {plan.start.step} of {plan.start.path}")
    if isinstance(plan, EnginePlan) and plan.fp8_recipe:
        product = fp8_product(plan.device, emulate=plan.emulate_fp8)
        lines.append(f"FP8 products are computed in {product.dtype}: {product.why}")
    if plan.predicted:
        lines.append(f"predicted: {predicted_text(plan.predicted)}")
    return [*lines, *recipe.decisions]


def predicted_text(predicted: PredictedStep) -> str:
    return f"{number(predicted.step_time_s)} s a step, 95 % within {interval_of(predicted.ci95_s)} s"


def plan_title(plan: Plan) -> str:
    recorded = ", profiled" if plan.profile else ", NCCL traced" if plan.nccl_trace else ""
    return f"{plan.recipe.title(_dtype(plan))}{_routing(plan)}{recorded}"


def _routing(plan: Plan) -> str:
    """How tokens reach routed experts; empty for a model without them."""
    if plan.recipe.model.moe is None or not isinstance(plan, EnginePlan):
        return ""
    if plan.force_load_balancing:
        return ", expert load forced to balance"
    return ", dropless" if plan.capacity_factor is None else f", token drop at capacity {plan.capacity_factor:g}"


def _dtype(plan: Plan) -> str:
    if plan.fp8_recipe is None:
        return plan.recipe.dtype
    emulated = ""
    if isinstance(plan, EnginePlan) and plan.emulate_fp8:
        emulated = f", emulated: the products are {fp8_product(plan.device, emulate=True).dtype}"
    return f"{plan.recipe.dtype} ({plan.fp8_recipe} scaling{emulated})"


def plan_table(plan: EnginePlan, workers: tuple[str, ...], variables: dict[str, str]) -> Table:
    """``workers`` is the command that starts them."""
    layout, window = plan.recipe.layout, plan.window
    table = result_table(f"Plan: {plan_title(plan)}", "", "")
    _add_origin(table, plan)
    for decision in plan.recipe.decisions:
        table.add_row("note", decision)
    if (rank := plan.recipe.pretended_rank) is not None:
        stage = layout.pp * rank // layout.gpus
        table.add_row("pretend", f"rank {rank}, on stage {stage}: collectives complete at once, with its own values")
    over = "the steady state" if window.rule == STEADY else f"steps {window.first}-{window.last}"
    table.add_row("steps", f"{plan.steps}, statistics over {over}")
    if reason := no_measurement(plan):
        table.add_row("not a measurement", reason)
    _add_published(table, plan)
    _add_layout(table, plan)
    table.add_row("data parallel", _sharing(plan))
    table.add_row("gradients", f"reduced in {plan.recipe.training.grad_reduce_dtype}")
    table.add_row("model", f"{layout.layers} layers" + (f", {plan.recipe.proxy_text}" if plan.recipe.proxy else ""))
    if plan.lora:
        table.add_row("trained", trained_text(plan.recipe.model, plan.lora))
    _add_foreseen(table, plan)
    table.add_row("seed", str(plan.seed))
    table.add_row("recompute", plan.recompute)
    table.add_row("logits", logits_text(plan.recipe, kept=plan.keep_logits))
    table.add_row("compiled", "block by block" if plan.compiled else "no")
    table.add_row("attention backend", plan.attention_backend)
    _add_saving(table, plan)
    if plan.profile:
        table.add_row("profile", profile_text(plan.profile))
    if plan.nccl_trace:
        table.add_row("NCCL's log", "every collective, on each rank")
    for name, value in variables.items():
        table.add_row("variable", f"{name}={value}")
    if workers:
        table.add_row("workers", shlex.join(workers))
    return table


def _add_foreseen(table: Table, plan: EnginePlan) -> None:
    if (use := estimated(plan)) is not None:
        table.add_row("memory", f"about {use.needed_gib:.1f} of {use.capacity_gib:g} GiB on rank {use.fullest.rank}")
    if plan.predicted:
        table.add_row("predicted", predicted_text(plan.predicted))


def _add_origin(table: Table, plan: Plan) -> None:
    origin = plan.origin
    for name, part in (("weights", origin.weights), ("data", origin.data)):
        table.add_row(name, part.text + (f", in {part.path}" if part.path else ""))


def _add_layout(table: Table, plan: EnginePlan) -> None:
    layout = plan.recipe.layout
    parallel = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in PARALLEL)
    table.add_row("parallel", f"{parallel}, DP {layout.dp}")
    without = "" if layout.sequence_parallel else ", no sequence parallelism"
    table.add_row("batch", f"MBS {layout.mbs}, GBS {layout.gbs}, GA {layout.ga}{without}")
    table.add_row("sequence", f"{layout.seq_len} tokens, {layout.gbs * layout.seq_len:,} tokens per step")
    if plan.recipe.training.document_tokens:
        table.add_row("documents", f"{plan.recipe.training.document_tokens} tokens on average, packed")
    if layout.pp > 1:
        sizes = [len(stage) for stage in stage_layers(layout)]
        table.add_row("pipeline", f"PP {layout.pp}, VP {layout.vp}, layers of the stages: {', '.join(map(str, sizes))}")


def _add_saving(table: Table, plan: EnginePlan) -> None:
    if plan.start:
        fresh = "" if plan.start.optimizer_state else ", with new optimizer state"
        table.add_row("resumes from", f"step {plan.start.step}: {plan.start.path}{fresh}")
    if plan.save_checkpoint:
        every = f"every {plan.checkpoint_interval} steps and " if plan.checkpoint_interval else ""
        size = number(checkpoint_bytes(plan.recipe.model, plan.lora) / 1e9)
        table.add_row("checkpoints", f"{every}at the end, about {size} GB each")
    for warning in scale_warnings(plan):
        table.add_row("warning", warning)


def _add_published(table: Table, plan: EnginePlan) -> None:
    """The published figure, and the time that the steps take at it."""
    expected = next(iter(plan.recipe.expectations), None)
    step_time_s = expected.step_time_s if expected else None
    if expected is None or step_time_s is None:
        reason = plan.recipe.expectations_reason or "the document has no step time"
        table.add_row("published", unknown(reason))
        table.add_row("duration", unknown("no published step time"))
        return
    table.add_row("published", f"{number(step_time_s)} s per step: {expected.source} line {expected.line}")
    minutes = plan.steps * step_time_s / 60
    table.add_row("duration", f"about {number(minutes)} min for {plan.steps} steps at that speed, after the start")


def profile_text(profile: Profile) -> str:
    """The profiled steps and ranks, and the profiler."""
    name = "Nsight Systems" if profile.profiler == "nsys" else "PyTorch's profiler"
    name += ", or PyTorch's profiler if 'nsys' is not on the PATH" if profile.or_torch else ""
    return f"steps {profile.first_step}-{profile.stop_step - 1}, ranks {ranks_text(profile.ranks)}, {name}"


def _sharing(plan: EnginePlan) -> str:
    parallelism = plan.parallelism
    replicas = parallelism.replicas(plan.recipe.layout).dense
    sharing = parallelism.dp_sharding or "full"
    shared = {"full": "parameters and optimizer state", "optimizer": "optimizer state", "none": "nothing"}
    kept = f", {replicas} replicas" if replicas > 1 else ""
    return f"{sharing}: ranks shard {shared[sharing]}{kept}"
