# SPDX-License-Identifier: Apache-2.0
"""Plans of runs as tables, lines and JSON documents."""

import shlex
from collections.abc import Iterator
from typing import Any

from llmb.base.shown_text import counted
from llmb.catalogue.layout_check import stage_layers
from llmb.catalogue.records import PARALLEL, unspecified_text
from llmb.catalogue.throughput import checkpoint_bytes
from llmb.catalogue.window import STEADY
from llmb.launch.programs.engine.program import estimated
from llmb.readers.logs.outcome import steps_span
from llmb.reports.formats import duration, interval_of, number, unknown
from llmb.reports.recipe_report import identity_document, origin_rows, trained_text
from llmb.reports.table import Table, facts_table
from llmb.runs.attention_choice import fp8_product
from llmb.runs.choices import logits_text
from llmb.runs.conclusion import no_measurement
from llmb.runs.failure import ranks_text
from llmb.runs.plan import EnginePlan, Plan, PredictedStep, scale_warnings
from llmb.runs.profiling import Profile


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
    """Return the lines to print before the first step: defaults, title, origin, prediction, and notable settings."""
    recipe = plan.recipe
    lines = [unspecified_text(recipe.unspecified)] if recipe.unspecified else []
    lines.append(f"{plan_title(plan)}, {plan.steps} steps")
    lines.append(plan.origin.text)
    if plan.start:
        lines.append(f"resumes from step {plan.start.step} of {plan.start.path}")
    if isinstance(plan, EnginePlan) and plan.fp8_recipe:
        product = fp8_product(plan.device, emulate=plan.emulate_fp8)
        lines.append(f"FP8 products are computed in {product.dtype}: {product.why}")
    if isinstance(plan, EnginePlan) and plan.deterministic:
        lines.append("deterministic algorithms only")
    if plan.predicted:
        lines.append(f"predicted: {predicted_text(plan.predicted)}")
    return [*lines, *recipe.decisions]


def predicted_text(predicted: PredictedStep) -> str:
    return f"{number(predicted.step_time_s)} s a step, 95 % within {interval_of(predicted.ci95_s)} s"


def plan_title(plan: Plan) -> str:
    recorded = ", profiled" if plan.profile else ", NCCL traced" if plan.nccl_trace else ""
    return f"{plan.recipe.title(_dtype(plan))}{_routing(plan)}{recorded}"


def _routing(plan: Plan) -> str:
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
    """Return a table of the plan; ``workers`` is the command that starts the workers."""
    window, use = plan.window, estimated(plan)
    over = "the steady state" if window.rule == STEADY else steps_span(window.first, window.last)
    proxy = f", {plan.recipe.proxy_text}" if plan.recipe.proxy else ""
    about = use and f"about {use.needed_gib:.1f} of {use.capacity_gib:g} GiB on rank {use.fullest.rank}"
    parallelism = plan.parallelism
    replicas = parallelism.replicas(plan.recipe.layout).dense
    sharing = parallelism.dp_sharding or "full"
    shared = {"full": "parameters and optimizer state", "optimizer": "optimizer state", "none": "nothing"}
    kept = f", {replicas} replicas" if replicas > 1 else ""
    synced = ", after each micro-batch" if plan.syncs_each_pass else ""
    return facts_table(
        f"Plan: {plan_title(plan)}",
        [
            *_origin_facts(plan),
            ("steps", f"{plan.steps}, statistics over {over}"),
            ("not a measurement", no_measurement(plan)),
            *_published_facts(plan),
            *_layout_facts(plan),
            ("data parallel", f"{sharing}: ranks shard {shared[sharing]}{kept}"),
            ("gradients", f"reduced in {plan.recipe.training.grad_reduce_dtype}{synced}"),
            ("model", f"{counted(plan.recipe.layout.layers, 'layer')}{proxy}"),
            ("trained", trained_text(plan.recipe.model, plan.lora) if plan.lora else None),
            ("memory", about),
            ("predicted", predicted_text(plan.predicted) if plan.predicted else None),
            ("seed", plan.seed),
            ("recompute", plan.recompute),
            ("logits", logits_text(plan.recipe, kept=plan.keep_logits)),
            ("compiled", "block by block" if plan.compiled else "no"),
            ("attention backend", plan.attention_backend),
            *_saving_facts(plan),
            ("profile", profile_text(plan.profile) if plan.profile else None),
            ("NCCL's log", "every collective, on each rank" if plan.nccl_trace else None),
            *(("variable", f"{name}={value}") for name, value in variables.items()),
            ("workers", shlex.join(workers) or None),
        ],
    )


def _origin_facts(plan: EnginePlan) -> Iterator[tuple[str, str]]:
    yield from origin_rows(plan.origin)
    yield from (("note", decision) for decision in plan.recipe.decisions)
    layout = plan.recipe.layout
    if (rank := plan.recipe.pretended_rank) is not None:
        stage = layout.pp * rank // layout.gpus
        yield "pretend", f"rank {rank}, on stage {stage}: collectives complete immediately, with its own values"


def _layout_facts(plan: EnginePlan) -> Iterator[tuple[str, str]]:
    layout = plan.recipe.layout
    parallel = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in PARALLEL)
    yield "parallel", f"{parallel}, DP {layout.dp}"
    without = "" if layout.sequence_parallel else ", no sequence parallelism"
    yield "batch", f"MBS {layout.mbs}, GBS {layout.gbs}, GA {layout.ga}{without}"
    yield "sequence", f"{layout.seq_len} tokens, {layout.gbs * layout.seq_len:,} tokens per step"
    if plan.recipe.training.document_tokens:
        yield "documents", f"{plan.recipe.training.document_tokens} tokens on average, packed"
    if layout.pp > 1:
        sizes = [len(stage) for stage in stage_layers(layout)]
        text = f"{sizes[0]} each" if len({*sizes}) == 1 else ", ".join(map(str, sizes))
        yield "pipeline", f"PP {layout.pp}, VP {layout.vp}, layers of the stages: {text}"


def _saving_facts(plan: EnginePlan) -> Iterator[tuple[str, str]]:
    if plan.start:
        fresh = "" if plan.start.optimizer_state else ", with new optimizer state"
        yield "resumes from", f"step {plan.start.step}: {plan.start.path}{fresh}"
    if plan.save_checkpoint:
        every = f"every {plan.checkpoint_interval} steps and " if plan.checkpoint_interval else ""
        size = number(checkpoint_bytes(plan.recipe.model, plan.lora) / 1e9)
        yield "checkpoints", f"{every}at the end, about {size} GB each"
    yield from (("warning", warning) for warning in scale_warnings(plan))


def _published_facts(plan: EnginePlan) -> Iterator[tuple[str, str]]:
    expected = plan.recipe.figure
    if expected is None:
        yield "published", unknown(plan.recipe.expectations_reason or "the document has no figure")
    else:
        yield "published", f"{number(expected.step_time_s)} s per step: {expected.source} line {expected.line}"
    if (basis := expected or plan.predicted) is None:
        yield "duration", unknown("no published or predicted step time")
        return
    whole, speed = duration(plan.steps * basis.step_time_s), "published" if expected else "predicted"
    yield "duration", f"about {whole} for {counted(plan.steps, 'step')} at the {speed} speed, after the start"


def profile_text(profile: Profile) -> str:
    """Describe the profiled steps and ranks, and the profiler."""
    name = "Nsight Systems" if profile.profiler == "nsys" else "PyTorch's profiler"
    name += ", or PyTorch's profiler if 'nsys' is not on the PATH" if profile.or_torch else ""
    return f"steps {profile.first_step}-{profile.stop_step - 1}, ranks {ranks_text(profile.ranks)}, {name}"
