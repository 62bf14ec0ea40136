# SPDX-License-Identifier: Apache-2.0
"""Recipes, their published figures and their metrics as tables and JSON documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from llmb.catalogue.catalogue import JobDefaults
from llmb.catalogue.layout_check import stage_layers
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import PARALLEL, Convention, Lora, Model, Recipe
from llmb.catalogue.resolve import gpu_types_of, releases_of, sizes_of
from llmb.catalogue.schema import LayoutTable, WorkloadFile
from llmb.catalogue.throughput import (
    Throughput,
    checkpoint_bytes,
    flops_per_sequence,
    parameter_count,
    trainable_parameters,
    unpacked_reason,
)
from llmb.reports.formats import number, unknown
from llmb.reports.table import Column, Table, facts_table, fields_of, numbers, result_table, rows_table, table_of, texts
from llmb.runs.checkpoints.origin import Origin, OriginHere
from llmb.runs.choices import keeps_logits, logits_gb, logits_text
from llmb.runs.conditions import title_of

BILLION = 1e9
IDENTITY = ("workload", "size", "dtype", "gpu_type", "scale", "release", "task", "proxy")
CONVENTION_NAMES = {
    Convention.PUBLISHED: "document's formula",
    Convention.FULL: "full attention",
    Convention.CAUSAL: "causal attention",
    Convention.PACKED: "packed documents",
}
"""Names of FLOP conventions in tables, where "published" is only used for figures."""
SCALE_LAYOUT = ("layers", "tp", "pp", "cp", "vp", "dp", "gbs", "ga")
SHOWN = ("layers", "tp", "pp", "cp", "vp", "gbs")
FIGURES = ("step_time_s", "tokens_per_s", "mfu_pct", "days_per_1t_tokens")
HEADERS = ("step s", "tokens/s", "MFU %", "days/1T")


def recipe_document(recipe: Recipe, job: JobDefaults, here: OriginHere) -> dict[str, Any]:
    """The JSON form of a recipe; its keys are a contract."""
    layout = recipe.layout
    total, active = parameter_count(recipe.model)
    return {
        **identity_document(recipe),
        "model": {**recipe.model.model_dump(mode="json"), "parameters": total, "active_parameters": active},
        "document": recipe.document and recipe.document.model_dump(mode="json"),
        "layout": fields_of(layout, "gpus", *PARALLEL, "dp", "mbs", "gbs", "ga", "seq_len", "layers"),
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
    """Return the recipe and the defaults of the request, the beginning of every document with figures of a recipe."""
    layers = {"layers": recipe.layout.layers, "full_layers": recipe.full_layers}
    return {
        "title": recipe.title(),
        "recipe": {**fields_of(recipe, *IDENTITY), **(layers if recipe.proxy else {})},
        "unspecified": [asdict(choice) for choice in recipe.unspecified],
    }


def recipe_tables(recipe: Recipe, job: JobDefaults, here: OriginHere) -> Iterator[Table]:
    """A recipe as a few tables."""
    yield _summary(recipe, here)
    yield _expectation_table(recipe.expectations, recipe.expectations_reason)
    if recipe.conditions:
        slower = "{:g} to {:g} % slower"
        rows = (
            (title_of(one.key), one.value, slower.format(*one.slower_pct) if one.slower_pct else "", one.source)
            for one in recipe.conditions
        )
        caption = "What of it a run does not share, its verdict names: llmb docs what-is-the-same"
        yield rows_table("How the published runs trained", ("", "", "without it", "source"), rows, caption=[caption])
    yield _job_table(job)
    of_figures = (note for item in recipe.expectations for note in item.notes)
    notes = list(dict.fromkeys([*recipe.decisions, *recipe.notes, *of_figures]))
    if recipe.published_flops:
        notes += [note for note in recipe.published_flops.notes if note not in notes]
    if notes:
        yield table_of("Notes", notes, [Column("", lambda note: f"- {note}")])


def _summary(recipe: Recipe, here: OriginHere) -> Table:
    model, layout, document, peak = recipe.model, recipe.layout, recipe.document, recipe.peak_tflops
    total, active = parameter_count(model)
    parameters = f"{total / BILLION:.4g} billion" + (f" ({active / BILLION:.3g} active)" if active != total else "")
    shape = (
        f"{model.layers} layers, hidden {model.hidden_size}, FFN {model.ffn_hidden_size}, "
        f"{model.attention_heads} heads, {model.kv_heads} KV heads, vocabulary {model.vocab_size}"
    )
    facts = [
        ("release", f"{document.release}, {document.title}" if document else "none (a recipe of llmb)"),
        ("model", f"{model.model}, {parameters}" + (f", {recipe.proxy_text}" if recipe.proxy else "")),
        ("shape", shape),
        ("parallel", " ".join(f"{name.upper()} {getattr(layout, name)}" for name in (*PARALLEL, "dp"))),
        ("batch", f"MBS {layout.mbs} GBS {layout.gbs} GA {layout.ga}, sequence length {layout.seq_len}"),
        ("trained", trained_text(model, recipe.lora) if recipe.lora else None),
        *_flops_rows(recipe),
        ("peak", f"{number(peak)} TFLOPS" if peak else unknown("not in the catalogue")),
        ("logits", logits_text(recipe, kept=keeps_logits(recipe))),
        *_checkpoint_rows(recipe),
        *origin_rows(here.origin),
        *(("", line.strip()) for line in (here.problem or "").splitlines()),
    ]
    return facts_table(recipe.title(), facts)


def _flops_rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for convention, name in CONVENTION_NAMES.items():
        flops = flops_per_sequence(recipe, convention)
        if flops is not None or convention != Convention.PACKED or recipe.task != "pretrain":
            why = unpacked_reason(recipe) if convention == Convention.PACKED else "not in any reference document"
            yield f"FLOPs per sequence, {name}", unknown(why) if flops is None else f"{flops:.5g}"


def _checkpoint_rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    published, saved_by_llmb = recipe.checkpoint, "adapters" if recipe.lora else "weights"
    size = number(checkpoint_size_gb(recipe))
    yield "checkpoint", f"{size} GB, saved by llmb: fp32 {saved_by_llmb} and optimizer state"
    if published:
        saved = "saved by {} to {} GPUs".format(*published.save_scales) if published.save_scales else ""
        loaded = f"loaded by {published.min_load_scale} or more" if published.min_load_scale else ""
        yield "published checkpoint", ", ".join(filter(None, (f"{published.size_gb:g} GB", saved, loaded)))


def checkpoint_size_gb(recipe: Recipe) -> float:
    """Return the size of a checkpoint, which with LoRA has only adapters."""
    return checkpoint_bytes(recipe.model, recipe.lora) / BILLION


def origin_rows(origin: Origin) -> Iterator[tuple[str, str]]:
    """Yield the rows about the weights and data that a run starts from."""
    for name, part in (("weights", origin.weights), ("data", origin.data)):
        yield name, part.text + (f", in {part.path}" if part.path else "")


def _expectation_table(expectations: Sequence[Expectation], reason: str | None) -> Table:
    if not expectations:
        return table_of("Published", [unknown(reason or "no published figure")], [Column("")])
    columns: list[Column[Expectation]] = [
        *texts("kind"),
        *numbers("step time s: step_time_s", "tokens/s: tokens_per_s", "MFU %: mfu_pct"),
        *texts("convention"),
        Column("window", _window_text),
        *texts("source"),
        *numbers("line", form=str),
    ]
    return table_of("Published", expectations, columns)


def _window_text(item: Expectation) -> str:
    return item.window if item.averaged_steps == 1 else f"{item.window}, a mean of {item.averaged_steps}"


def _job_table(job: JobDefaults) -> Table:
    """The defaults of a job on a cluster."""
    rows = [
        ("time limit", f"{job.time_limit_min} min", job.time_limit_source),
        *(("variable", f"{one.name}={one.value}", one.source) for one in job.variables),
        *([] if job.vboost is None else [("with --vboost recipe", f"level {job.vboost}", job.vboost_source or "")]),
    ]
    return rows_table("On a cluster", ("", "", "source"), rows)


def metrics_document(recipe: Recipe, step_time_s: float, result: Throughput) -> dict[str, Any]:
    """The JSON of ``llmb metrics``; its keys are a contract."""
    return {**identity_document(recipe), "step_time_s": step_time_s, **asdict(result)}


def throughput_table(recipe: Recipe, step_time_s: float, result: Throughput) -> Table:
    counted = [item for item in Convention if item != Convention.PACKED or recipe.task != "pretrain"]
    conventions = tuple(CONVENTION_NAMES[item] for item in counted)
    table = result_table(recipe.title(), "metric", *conventions, right=conventions)
    table.add_row("step time s", number(step_time_s))
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
    """Return the published figures of each scale; null with a reason if there is none."""
    figures = [(recipe, recipe.figure) for recipe in recipes]
    return {
        "scales": [
            {
                **fields_of(recipe, *(name for name in IDENTITY if name != "task")),
                "layout": fields_of(recipe.layout, *SCALE_LAYOUT),
                "published": figure and figure.model_dump(mode="json"),
                "published_reason": recipe.expectations_reason,
            }
            for recipe, figure in figures
        ]
    }


def scales_table(recipes: Sequence[Recipe]) -> Table:
    """One line for each scale of a dtype, as wide as a terminal of 80 columns."""
    first = recipes[0]
    figures = [recipe.figure for recipe in recipes]
    what = "published figures" if any(figures) else "layouts; no figure is published"
    title = f"{first.workload} {first.size} {first.dtype} on {first.gpu_type}, {what}"
    headers = HEADERS if any(figures) else ()
    names = [name if name == "layers" else name.upper() for name in SHOWN]
    table = result_table(title, "GPUs", *names, *headers, "", right=("GPUs", *names, *headers))
    for column in table.columns:
        column.wrap = False
    for recipe, figure in zip(recipes, figures, strict=True):
        values = [_published(getattr(figure, name) if figure else None) for name in FIGURES] if headers else []
        layout = [str(getattr(recipe.layout, name)) for name in SHOWN]
        table.add_row(str(recipe.scale), *layout, *values, "PROXY" if recipe.proxy else "")
    found = dict.fromkeys(f"{figure.source}, {figure.kind}, line {figure.line}" for figure in figures if figure)
    notes = [f"source: {source}" for source in found]
    if any(recipe.proxy for recipe in recipes):
        notes.append("PROXY: fewer layers than the model has; its figures are not those of the model")
    table.caption = "\n".join(notes)
    return table


def _published(value: float | None) -> str:
    """Format a published figure with the decimals that documents print."""
    return number(value) if value is None or value >= 1000 else f"{value:.2f}"


def lora_text(lora: Lora) -> str:
    return f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {lora.targets}"


def trained_text(model: Model, lora: Lora) -> str:
    """Describe the adapters, with their number of parameters."""
    return f"{trainable_parameters(model, lora):,} parameters: {lora_text(lora)}"


LEGEND = (
    "(n): a PROXY, with fewer layers than the model; +: doublings of the largest scale too; llmb: no document;"
    " all: every GPU type"
)


def list_document(workloads: Iterable[WorkloadFile]) -> dict[str, Any]:
    return {"workloads": [_workload_document(workload) for workload in workloads]}


def _workload_document(workload: WorkloadFile) -> dict[str, Any]:
    return {
        **fields_of(workload, "workload", "title", "task"),
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
