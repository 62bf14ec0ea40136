# SPDX-License-Identifier: Apache-2.0
"""A plan and a run's result as tables and JSON documents."""

import shlex
from collections.abc import Iterator
from typing import Any

from llmb.catalogue.pipeline_stages import stage_layers
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import Convention
from llmb.catalogue.unspecified import unspecified_text
from llmb.metrics.parameters import checkpoint_bytes
from llmb.metrics.window import STEADY
from llmb.report.lora_text import trained_text
from llmb.report.numbers import interval_of, number, unknown
from llmb.report.output import result_table
from llmb.report.recipe_report import CONVENTION_NAMES, identity_document, origin_document
from llmb.report.resources_report import resource_rows
from llmb.report.table import Table
from llmb.report.trace_report import shown_parts
from llmb.runs.checkpoint_report import CheckpointReport
from llmb.runs.checkpoint_scales import scale_warnings
from llmb.runs.folder import RunFolder
from llmb.runs.fp8_product import fp8_product
from llmb.runs.logits import logits_text
from llmb.runs.plan import EnginePlan, Plan
from llmb.runs.profiling import Profile
from llmb.runs.result import Result, no_measurement
from llmb.runs.short_id import short_id
from llmb.runs.stall import ranks_text
from llmb.traces.summary import shares
from llmb.verdict.sentence import headline


def plan_document(
    plan: EnginePlan, command: str, workers: tuple[str, ...], variables: dict[str, str]
) -> dict[str, Any]:
    return {
        **identity_document(plan.recipe),
        "origin": origin_document(plan.origin),
        "plan": plan.model_dump(mode="json"),
        "same_run": command,
        "command": list(workers),
        "variables": variables,
        "warnings": list(scale_warnings(plan)),
    }


def run_document(folder: RunFolder, plan: Plan, result: Result, label: str | None = None) -> dict[str, Any]:
    """The JSON of ``llmb run``; its keys are a contract."""
    return {
        **identity_document(plan.recipe),
        "id": short_id(folder.path),
        "label": label,
        "run_dir": str(folder.path),
        "origin": origin_document(plan.origin),
        **result.document(),
        "window": (result.window or plan.window).model_dump(mode="json"),
        "expectations": [expectation.model_dump(mode="json") for expectation in plan.recipe.expectations],
        "expectations_reason": plan.recipe.expectations_reason,
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
    return [*lines, *recipe.decisions]


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


def _add_origin(table: Table, plan: Plan) -> None:
    origin = plan.origin
    for name, part in (("weights", origin.weights), ("data", origin.data)):
        table.add_row(name, part.text + (f", in {part.path}" if part.path else ""))


def _add_layout(table: Table, plan: EnginePlan) -> None:
    layout = plan.recipe.layout
    parallel = ", ".join(f"{name.upper()} {getattr(layout, name)}" for name in ("tp", "pp", "vp", "cp", "ep", "etp"))
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


def run_table(plan: Plan, result: Result) -> Table:
    """The verdict, then measured and published values, one row per metric."""
    window = result.window or plan.window
    title = f"{plan_title(plan)}, steps {window.first}-{window.last} of {plan.last_step + 1}"
    table = result_table(
        "\n".join(filter(None, (title, headline(result.verdict) if result.verdict else ""))),
        "metric",
        "measured",
        "published",
        "note",
        right=("measured", "published"),
    )
    table.columns[1].wrap = False
    expected = next(iter(plan.recipe.expectations), None)
    if result.measurement_reason:
        table.add_row("NOT A MEASUREMENT", "", "", result.measurement_reason)
    if result.note:
        table.add_row("note", "", "", result.note)
    if result.other_work and result.other_work.disturbing:
        table.add_row("OTHER WORK", "", "", "; ".join(result.other_work.disturbing))
    table.add_row("weights", "", "", plan.origin.weights.text)
    table.add_row("data", "", "", plan.origin.data.text)
    for name, text in _content_rows(plan, result):
        table.add_row(name, "", "", text)
    _add_step_time(table, result, expected, plan.recipe.expectations_reason)
    _add_throughput(table, result, expected)
    if result.loss:
        table.add_row("loss", f"{number(result.loss.first)} -> {number(result.loss.last)}", "", "first -> last step")
    table.add_row("peak memory GiB", number(result.peak_memory_gib), "", _memory_note(plan))
    for name, text, note in resource_rows(result.resources) if result.resources else ():
        table.add_row(name, text, "", note)
    _add_counters(table, result)
    if result.attention_backend:
        table.add_row("attention backend", result.attention_backend)
    _add_expert_load(table, result)
    _add_fp8(table, result)
    _add_checkpoint(table, result)
    _add_profile(table, result)
    return table


def _content_rows(plan: Plan, result: Result) -> Iterator[tuple[str, str]]:
    """What sequences hold, and how much of the model is trained."""
    if plan.dataset:
        packed = plan.dataset.packed
        yield "dataset", f"template {packed.template}, tokenizer {packed.tokenizer.name}, {packed.packs:,} packs"
    if packing := result.packing:
        tokens, squares = number(packing.tokens), number(packing.sum_of_squares)
        of = plan.recipe.layout.seq_len
        yield "sequences", f"{tokens} of {of} tokens real, squared lengths {squares}: {packing.source}"
    count = result.parameters
    if count:
        active = f" ({count.active:,} active)" if count.active != count.total else ""
        yield "parameters", f"{count.trainable:,} trainable of {count.total:,}{active}"


def _add_step_time(table: Table, result: Result, expected: Expectation | None, reason: str | None) -> None:
    times = result.step_time_s
    if times is None:
        table.add_row("step time s", "n/a", "", result.step_time_reason or "")
        return
    source = f"{expected.source} line {expected.line}" if expected else reason or "no published figure"
    table.add_row("step time s, mean", number(times.mean), number(expected.step_time_s) if expected else "n/a", source)
    table.add_row("step time s, median", number(times.median))
    if times.std is not None and times.cv is not None and times.ci95 is not None:
        table.add_row("step time s, std", number(times.std), "", f"coefficient of variation {100 * times.cv:.2g} %")
        table.add_row("step time s, 95 %", interval_of(times.ci95), "", "confidence interval of the mean")


def _add_throughput(table: Table, result: Result, expected: Expectation | None) -> None:
    if result.tokens_per_s is None:
        return
    tflops_per_gpu, mfu_pct, reasons = result.tflops_per_gpu or {}, result.mfu_pct or {}, result.reasons or {}
    padded = ", padded" if result.packing else ""
    published_tokens = number(expected.tokens_per_s) if expected else "n/a"
    table.add_row(f"tokens/s{padded}", number(result.tokens_per_s), published_tokens)
    if result.packing:
        table.add_row("tokens/s, real", number(result.real_tokens_per_s), "", "without padding")
    table.add_row(f"tokens/s per GPU{padded}", number(result.tokens_per_s_per_gpu))
    for convention in Convention:
        tflops = tflops_per_gpu.get(convention)
        if tflops is not None:
            table.add_row(f"TFLOPS per GPU, {CONVENTION_NAMES[convention]}", number(tflops))
    for convention in Convention:
        mfu = mfu_pct.get(convention)
        if mfu is not None:
            published = expected.mfu_pct if expected and convention == Convention.PUBLISHED else None
            table.add_row(f"MFU %, {CONVENTION_NAMES[convention]}", number(mfu), number(published) if published else "")
    if "mfu_pct" in reasons:
        table.add_row("MFU %", "n/a", "", reasons["mfu_pct"])
    days = result.days_per_1t_tokens
    expected_days = number(expected.days_per_1t_tokens) if expected and expected.days_per_1t_tokens else "n/a"
    table.add_row("days per 1T tokens", number(days), expected_days, reasons.get("days_per_1t_tokens", ""))


def _add_counters(table: Table, result: Result) -> None:
    counters = result.counters
    if counters is None:
        return
    table.add_row("non-finite steps", str(counters.non_finite_steps), "", "loss or gradient norm; the first ends a run")
    table.add_row("skipped steps", str(counters.skipped_steps), "", "parameters not updated")


def _add_expert_load(table: Table, result: Result) -> None:
    load = result.expert_load
    if load is None:
        return
    chosen = "forced to balance" if load.forced else "as the routers chose"
    table.add_row("busiest expert / mean", number(load.max_over_mean), "", f"tokens per step, worst layer; {chosen}")
    table.add_row("experts without tokens", number(load.idle_experts), "", "all layers, mean of the steps")
    if load.capacity_factor is not None:
        limit = f"beyond capacity {load.capacity_factor:g} of an expert; every expert computes as many rows"
        table.add_row("dropped tokens", number(load.dropped_pct), "%", limit)


def _add_fp8(table: Table, result: Result) -> None:
    fp8 = result.fp8
    if fp8 is None:
        return
    if fp8.product:
        table.add_row("FP8 products", fp8.product.dtype, "", fp8.product.why)
    table.add_row("FP8 tensors saturated", number(fp8.saturated_tensors), "", "beyond their scale, mean of the steps")
    table.add_row("FP8 tensors not finite", number(fp8.not_finite_tensors), "", "mean of the steps")


def _add_checkpoint(table: Table, result: Result) -> None:
    checkpoint = result.checkpoint
    if checkpoint is None:
        return
    if checkpoint.load_s is not None:
        table.add_row("checkpoint load s", number(checkpoint.load_s), "", _verification(checkpoint))
    if checkpoint.save_s:
        longest = number(max(checkpoint.save_s))
        table.add_row("checkpoint save s", longest, "", f"longest of {len(checkpoint.save_s)}, not in the step times")
    if checkpoint.overlapped_steps:
        note = f"while a checkpoint was written; {checkpoint.overlapped_steps_in_window} of them in the window"
        table.add_row("steps slowed down", str(checkpoint.overlapped_steps), "", note)
    if checkpoint.size_bytes is not None:
        table.add_row("checkpoint size GB", number(checkpoint.size_bytes / 1e9))


def _verification(checkpoint: CheckpointReport) -> str:
    if checkpoint.verify_s is not None:
        return f"verified before, in {number(checkpoint.verify_s)} s"
    return "not verified: --no-verify-checkpoint" if checkpoint.verification == "skipped" else ""


def _add_profile(table: Table, result: Result) -> None:
    profile = result.profile
    if profile is None:
        return
    if profile.breakdown:
        step = profile.breakdown
        of_step = shares(step)
        for part, name in shown_parts([step]).items():
            table.add_row(f"{name} %", number(100 * of_step[part]), "", f"of step {step.step}, rank {step.rank}")
    for warning in profile.warnings:
        table.add_row("profile", "n/a", "", warning)


def _memory_note(plan: Plan) -> str:
    return "largest rank, allocator" if plan.device == "cuda" else "largest rank, resident set"
