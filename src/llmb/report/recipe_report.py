# SPDX-License-Identifier: Apache-2.0
"""Recipes, their published figures and their metrics as tables and JSON documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmb.catalogue.layout_check import stage_layers
from llmb.catalogue.load import JobDefaults
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import PARALLEL, Convention, Lora, Model, Recipe
from llmb.catalogue.resolve import gpu_types_of, releases_of, sizes_of
from llmb.catalogue.schema import LayoutTable, WorkloadFile
from llmb.checkpoints.origin import OriginHere
from llmb.metrics.throughput import (
    Throughput,
    checkpoint_bytes,
    flops_per_sequence,
    parameter_count,
    trainable_parameters,
    unpacked_reason,
)
from llmb.report.table import Column, Table, number, number_column, result_table, table_of, unknown
from llmb.runs.choices import keeps_logits, logits_gb, logits_text
from llmb.verdict.conditions import title_of

BILLION = 1e9
IDENTITY = ("workload", "size", "dtype", "gpu_type", "scale", "release", "task", "proxy")
CONVENTION_NAMES = {
    Convention.PUBLISHED: "document's formula",
    Convention.FULL: "full attention",
    Convention.CAUSAL: "causal attention",
    Convention.PACKED: "packed documents",
}
"""How FLOPs are counted, in tables; "published" is the word for figures alone."""
SCALE_LAYOUT = ("layers", "tp", "pp", "cp", "vp", "dp", "gbs", "ga")
SHOWN = ("layers", "tp", "pp", "cp", "vp", "gbs")
FIGURES = ("step_time_s", "tokens_per_s", "mfu_pct", "days_per_1t_tokens")
HEADERS = ("step s", "tokens/s", "MFU %", "days/1T")


def recipe_document(recipe: Recipe, job: JobDefaults, here: OriginHere) -> dict[str, Any]:
    """The JSON form of a recipe; its keys are a contract."""
    layout = recipe.layout
    total, active = parameter_count(recipe.model)
    names = ("gpus", *PARALLEL, "dp", "mbs", "gbs", "ga", "seq_len", "layers")
    return {
        **identity_document(recipe),
        "model": {**recipe.model.model_dump(mode="json"), "parameters": total, "active_parameters": active},
        "document": recipe.document and recipe.document.model_dump(mode="json"),
        "layout": {name: getattr(layout, name) for name in names},
        "stage_layers": [len(stage) for stage in stage_layers(layout)],
        "sequence_parallel": layout.sequence_parallel,
        "training": recipe.training.model_dump(mode="json"),
        "lora": recipe.lora and recipe.lora.model_dump(mode="json"),
        "flops_per_sequence": {item.value: flops_per_sequence(recipe, item) for item in Convention},
        "published_flops": recipe.published_flops and recipe.published_flops.model_dump(mode="json"),
        "capacity_factor": recipe.capacity_factor,
        "packing": recipe.packing and recipe.packing.model_dump(mode="json"),
        "peak_tflops": recipe.peak_tflops,
        "logits": {"size_gb": logits_gb(recipe), "kept": keeps_logits(recipe)},
        "checkpoint_size_gb": checkpoint_size_gb(recipe),
        "checkpoint": recipe.checkpoint and recipe.checkpoint.model_dump(mode="json"),
        "expectations": [expectation.model_dump(mode="json") for expectation in recipe.expectations],
        "expectations_reason": recipe.expectations_reason,
        "conditions": [condition.model_dump(mode="json") for condition in recipe.conditions],
        "origin": here.origin.document(),
        "not_prepared": here.problem,
        "job": job.model_dump(mode="json"),
        "notes": [*recipe.decisions, *recipe.notes],
    }


def identity_document(recipe: Recipe) -> dict[str, Any]:
    """Which recipe it is, and what the request left open; every document that holds figures of a recipe begins so."""
    layers = {"layers": recipe.layout.layers, "full_layers": recipe.full_layers}
    return {
        "title": recipe.title(),
        "recipe": {**{name: getattr(recipe, name) for name in IDENTITY}, **(layers if recipe.proxy else {})},
        "unspecified": [asdict(choice) for choice in recipe.unspecified],
    }


def recipe_tables(recipe: Recipe, job: JobDefaults, here: OriginHere) -> Iterator[Table]:
    """A recipe as a few tables."""
    yield _summary(recipe, here)
    yield _expectation_table(recipe.expectations, recipe.expectations_reason)
    if recipe.conditions:
        yield _conditions_table(recipe)
    yield _job_table(job)
    of_figures = (note for item in recipe.expectations for note in item.notes)
    notes = list(dict.fromkeys([*recipe.decisions, *recipe.notes, *of_figures]))
    if recipe.published_flops:
        notes += [note for note in recipe.published_flops.notes if note not in notes]
    if notes:
        yield table_of("Notes", notes, [Column("", lambda note: f"- {note}")])


def _summary(recipe: Recipe, here: OriginHere) -> Table:
    model, layout = recipe.model, recipe.layout
    total, active = parameter_count(model)
    parameters = f"{total / BILLION:.4g} billion" + (f" ({active / BILLION:.3g} active)" if active != total else "")
    table = result_table(recipe.title(), "", "")
    document = recipe.document
    table.add_row("release", f"{document.release}, {document.title}" if document else "none (a recipe of llmb)")
    table.add_row("model", f"{model.model}, {parameters}" + (f", {recipe.proxy_text}" if recipe.proxy else ""))
    table.add_row(
        "shape",
        f"{model.layers} layers, hidden {model.hidden_size}, FFN {model.ffn_hidden_size}, "
        f"{model.attention_heads} heads, {model.kv_heads} KV heads, vocabulary {model.vocab_size}",
    )
    table.add_row("parallel", " ".join(f"{name.upper()} {getattr(layout, name)}" for name in (*PARALLEL, "dp")))
    table.add_row("batch", f"MBS {layout.mbs} GBS {layout.gbs} GA {layout.ga}, sequence length {layout.seq_len}")
    if recipe.lora:
        table.add_row("trained", trained_text(model, recipe.lora))
    for convention in Convention:
        flops = flops_per_sequence(recipe, convention)
        if flops is None and convention == Convention.PACKED and recipe.task == "pretrain":
            continue
        why = unpacked_reason(recipe) if convention == Convention.PACKED else "not in any reference document"
        text = unknown(why) if flops is None else f"{flops:.5g}"
        table.add_row(f"FLOPs per sequence, {CONVENTION_NAMES[convention]}", text)
    table.add_row(
        "peak", f"{number(recipe.peak_tflops)} TFLOPS" if recipe.peak_tflops else unknown("not in the catalogue")
    )
    table.add_row("logits", logits_text(recipe, kept=keeps_logits(recipe)))
    for name, text in (*_checkpoint_rows(recipe), *_origin_rows(here)):
        table.add_row(name, text)
    return table


def _checkpoint_rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    published, saved_by_llmb = recipe.checkpoint, "adapters" if recipe.lora else "weights"
    size = number(checkpoint_size_gb(recipe))
    yield "checkpoint", f"{size} GB, saved by llmb: fp32 {saved_by_llmb} and optimizer state"
    if published:
        saved = "saved by {} to {} GPUs".format(*published.save_scales) if published.save_scales else ""
        loaded = f"loaded by {published.min_load_scale} or more" if published.min_load_scale else ""
        yield "published checkpoint", ", ".join(part for part in (f"{published.size_gb:g} GB", saved, loaded) if part)


def checkpoint_size_gb(recipe: Recipe) -> float:
    """What a run of the recipe saves: of LoRA, only adapters."""
    return checkpoint_bytes(recipe.model, recipe.lora) / BILLION


def _origin_rows(here: OriginHere) -> Iterator[tuple[str, str]]:
    """What a run here would start from."""
    for name, part in (("weights", here.origin.weights), ("data", here.origin.data)):
        yield name, part.text + (f", in {part.path}" if part.path else "")
    for line in (here.problem or "").splitlines():
        yield "", line.strip()


def _expectation_table(expectations: Sequence[Expectation], reason: str | None) -> Table:
    if not expectations:
        return table_of("Published", [unknown(reason or "no published figure")], [Column("")])
    columns: list[Column[Expectation]] = [
        Column("kind", lambda item: item.kind),
        number_column("step time s", lambda item: item.step_time_s),
        number_column("tokens/s", lambda item: item.tokens_per_s),
        number_column("MFU %", lambda item: item.mfu_pct),
        Column("convention", lambda item: item.convention),
        Column("window", _window_text),
        Column("source", lambda item: item.source),
        number_column("line", lambda item: item.line, str),
    ]
    return table_of("Published", expectations, columns)


def _window_text(item: Expectation) -> str:
    return item.window if item.averaged_steps == 1 else f"{item.window}, a mean of {item.averaged_steps}"


def _conditions_table(recipe: Recipe) -> Table:
    """Ways of the published runs that a run here may not share."""
    table = result_table("How the published runs trained", "", "", "without it", "source")
    for condition in recipe.conditions:
        slower = "{:g} to {:g} % slower".format(*condition.slower_pct) if condition.slower_pct else ""
        table.add_row(title_of(condition.key), condition.value, slower, condition.source)
    table.caption = "What of it a run does not share, its verdict names: llmb docs what-is-the-same"
    return table


def _job_table(job: JobDefaults) -> Table:
    """The defaults of a job on a cluster."""
    table = result_table("On a cluster", "", "", "source")
    table.add_row("time limit", f"{job.time_limit_min} min", job.time_limit_source)
    for variable in job.variables:
        table.add_row("variable", f"{variable.name}={variable.value}", variable.source)
    if job.vboost is not None:
        table.add_row("with --vboost recipe", f"level {job.vboost}", job.vboost_source or "")
    return table


def metrics_document(recipe: Recipe, result: Throughput) -> dict[str, Any]:
    """The JSON of ``llmb metrics``; its keys are a contract."""
    return {**identity_document(recipe), **asdict(result)}


def throughput_table(recipe: Recipe, result: Throughput) -> Table:
    counted = [item for item in Convention if item != Convention.PACKED or recipe.task != "pretrain"]
    conventions = tuple(CONVENTION_NAMES[item] for item in counted)
    table = result_table(recipe.title(), "metric", *conventions, right=conventions)
    table.add_row("step time s", number(result.step_time_s))
    packing = recipe.packing
    padded = ", padded" if packing else ""
    table.add_row(f"tokens/s{padded}", number(result.tokens_per_s))
    table.add_row(f"tokens/s per GPU{padded}", number(result.tokens_per_s_per_gpu))
    if packing:
        table.add_row("tokens/s, real", number(result.real_tokens_per_s))
    table.add_row("TFLOPS per GPU", *(number(result.tflops_per_gpu[item]) for item in counted))
    table.add_row("MFU %", *(number(result.mfu_pct[item]) for item in counted))
    table.add_row("days per 1T tokens", number(result.days_per_1t_tokens))
    if packing:
        real = f"{number(packing.tokens)} of {recipe.layout.seq_len} tokens of a sequence are real"
        table.caption = f"assumed: {real}, squared lengths {number(packing.sum_of_squares)}: {packing.source}"
    for name, reason in result.reasons.items():
        if name != Convention.PACKED or recipe.task != "pretrain":
            table.add_row(f"{name}: {unknown(reason)}")
    return table


def scales_document(recipes: Iterable[Recipe]) -> dict[str, Any]:
    """Every figure is as published; null with its reason where none is."""
    return {"scales": [_scale_document(recipe) for recipe in recipes]}


def _scale_document(recipe: Recipe) -> dict[str, Any]:
    identity = ("workload", "size", "dtype", "gpu_type", "scale", "release", "proxy")
    figure = _first_figure(recipe)
    return {
        **{name: getattr(recipe, name) for name in identity},
        "layout": {name: getattr(recipe.layout, name) for name in SCALE_LAYOUT},
        "published": figure and figure.model_dump(mode="json"),
        "published_reason": recipe.expectations_reason,
    }


def scales_table(recipes: Sequence[Recipe]) -> Table:
    """One line for each scale of a dtype, as wide as a terminal of 80 columns."""
    first = recipes[0]
    title = f"{first.workload} {first.size} {first.dtype} on {first.gpu_type}, published figures"
    names = [name if name == "layers" else name.upper() for name in SHOWN]
    table = result_table(title, "GPUs", *names, *HEADERS, "", right=("GPUs", *names, *HEADERS))
    for column in table.columns:
        column.wrap = False
    for recipe in recipes:
        figure = _first_figure(recipe)
        values = [number(getattr(figure, name) if figure else None) for name in FIGURES]
        layout = [str(getattr(recipe.layout, name)) for name in SHOWN]
        table.add_row(str(recipe.scale), *layout, *values, "PROXY" if recipe.proxy else "")
    found = dict.fromkeys(
        f"{figure.source}, {figure.kind}, line {figure.line}" for figure in map(_first_figure, recipes) if figure
    )
    notes = [f"source: {source}" for source in found] or ["no figures are published"]
    if any(recipe.proxy for recipe in recipes):
        notes.append("PROXY: fewer layers than the model has; its figures are not those of the model")
    table.caption = "\n".join(notes)
    return table


def _first_figure(recipe: Recipe) -> Expectation | None:
    """Tables come before examples."""
    return next(iter(recipe.expectations), None)


def lora_text(lora: Lora) -> str:
    return f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {lora.targets}"


def trained_text(model: Model, lora: Lora) -> str:
    """With the number of parameters."""
    return f"{trainable_parameters(model, lora):,} parameters: {lora_text(lora)}"


LEGEND = (
    "(n): a PROXY, with fewer layers than the model; +: doublings of the largest scale too; llmb: no document;"
    " all: every GPU type"
)


def list_document(workloads: Iterable[WorkloadFile]) -> dict[str, Any]:
    return {"workloads": [_workload_document(workload) for workload in workloads]}


def _workload_document(workload: WorkloadFile) -> dict[str, Any]:
    return {
        "workload": workload.workload,
        "title": workload.title,
        "task": workload.task,
        "sizes": {
            size: {
                "releases": releases_of(workload, size),
                "gpu_types": gpu_types_of(workload, size),
                "layouts": [_table_document(table) for table in _layout_tables(workload, size)],
            }
            for size in sizes_of(workload)
        },
    }


def _table_document(table: LayoutTable) -> dict[str, Any]:
    return {
        "release": table.release,
        "gpu_types": list(table.gpu_types),
        "dtypes": list(table.dtypes),
        "scales": [row.gpus for row in table.rows if not row.proxy],
        "proxy_scales": [row.gpus for row in table.rows if row.proxy],
        "above_largest": table.above_largest,
    }


def list_table(workloads: Iterable[WorkloadFile], gpu_types: Collection[str]) -> Table:
    """``gpu_types`` are all that the catalogue has."""
    table = result_table("Recipes", "workload", "size", "release", "GPU types", "dtypes", "scales")
    for workload in workloads:
        for size in sizes_of(workload):
            for (release, dtypes, scales), gpus in _grouped_types(_layout_tables(workload, size)).items():
                table.add_row(workload.workload, size, release, _types_text(gpus, gpu_types), dtypes, scales)
    table.caption = LEGEND
    return table


def _types_text(types: Sequence[str], known: Collection[str]) -> str:
    rest = [name for name in types if name not in known]
    return " ".join(["all", *rest] if {*known} <= {*types} else types)


def _grouped_types(tables: Iterable[LayoutTable]) -> dict[tuple[str, str, str], list[str]]:
    """GPU types grouped by release, dtypes and scales."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for table in tables:
        key = (table.release or "llmb", " ".join(table.dtypes), _scales_text(table))
        groups.setdefault(key, []).extend(table.gpu_types)
    return groups


def _layout_tables(workload: WorkloadFile, size: str) -> list[LayoutTable]:
    return [table for table in workload.layouts if table.size == size]


def _scales_text(table: LayoutTable) -> str:
    if table.above_largest == "any":
        return "any"
    scales = " ".join(f"({row.gpus})" if row.proxy else str(row.gpus) for row in table.rows)
    return f"{scales} +" if table.above_largest == "double" else scales
