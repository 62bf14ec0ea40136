# SPDX-License-Identifier: Apache-2.0
"""Recipes, their published figures and their metrics as tables and JSON documents."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from llmb.catalogue.catalogue import JobDefaults
from llmb.catalogue.layout_check import stage_counts
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import PARALLEL, Convention, Lora, Model, Recipe
from llmb.catalogue.resolve import bridge_releases_of, gpu_types_of, listed_tables, releases_of, sizes_of
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
from llmb.reports.table import Column, Table, facts_table, fields_of, numbers, rows_table, table_of, texts
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
"""Names of FLOP conventions in tables, where "published" only refers to published values."""
SCALE_LAYOUT = ("layers", "tp", "pp", "cp", "vp", "dp", "gbs", "ga")
SHOWN = ("layers", "tp", "pp", "cp", "vp", "gbs")
FIGURES = (
    *("step s: figure.step_time_s", "tokens/s: figure.tokens_per_s", "MFU %: figure.mfu_pct"),
    "days/1T: figure.days_per_1t_tokens",
)


def recipe_document(recipe: Recipe, job: JobDefaults, here: OriginHere) -> dict[str, Any]:
    """Return the JSON document of a recipe; its keys are a contract."""
    layout = recipe.layout
    total, active = parameter_count(recipe.model)
    return {
        **identity_document(recipe),
        "model": {**recipe.model.model_dump(mode="json"), "parameters": total, "active_parameters": active},
        "document": recipe.document,
        "layout": fields_of(layout, "gpus", *PARALLEL, "dp", "mbs", "gbs", "ga", "seq_len", "layers"),
        "stage_layers": stage_counts(layout),
        **fields_of(recipe, "layout.sequence_parallel", "training", "lora"),
        "flops_per_sequence": {item: flops_per_sequence(recipe, item) for item in Convention},
        **fields_of(recipe, "published_flops", "capacity_factor", "packing", "peak_tflops"),
        "logits": {"size_gb": logits_gb(recipe), "kept": keeps_logits(recipe)},
        "checkpoint_size_gb": checkpoint_size_gb(recipe),
        "checkpoint": recipe.checkpoint,
        "expectations": [expectation.model_dump(mode="json") for expectation in recipe.expectations],
        "expectations_reason": recipe.expectations_reason,
        "conditions": [condition.model_dump(mode="json") for condition in recipe.conditions],
        "origin": here.origin.document(),
        "not_prepared": here.problem,
        "job": job,
        "notes": [*recipe.decisions, *recipe.notes],
    }


def identity_document(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe and the options left at defaults: the first keys of every document about a recipe."""
    layers = {"layers": recipe.layout.layers, "full_layers": recipe.full_layers}
    file = {"config_file": recipe.config_file} if recipe.config_file else {}
    return {
        "title": recipe.title(),
        "recipe": {**fields_of(recipe, *IDENTITY), **(layers if recipe.proxy else {}), **file},
        "unspecified": recipe.unspecified,
    }


def recipe_tables(recipe: Recipe, job: JobDefaults, here: OriginHere) -> Iterator[Table]:
    """Yield the tables of a recipe."""
    yield _summary(recipe, here)
    yield _expectation_table(recipe.expectations, recipe.expectations_reason)
    if recipe.conditions:
        columns = [
            *texts(": key", form=title_of),
            *texts(": value", form=lambda value: value or "n/a"),
            *texts("without it: slower_pct", form=lambda by: "{:g} to {:g} % slower".format(*by) if by else ""),
            *texts("source"),
        ]
        caption = "A run's verdict lists what differs from this: llmb docs what-is-the-same"
        yield table_of("How the published runs trained", recipe.conditions, columns, caption=caption)
    yield rows_table("On a cluster", ("", "", "source"), _job_rows(job))
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
    origin = "the model is from a file" if recipe.config_file else "a recipe of llmb"
    facts = [
        ("release", f"{document.release}, {document.title}" if document else f"none ({origin})"),
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
        yield "published checkpoint", ", ".join(filter(None, (f"{published.size_gb:g} GiB", saved, loaded)))


def checkpoint_size_gb(recipe: Recipe) -> float:
    """Return the size of a checkpoint in 10^9 bytes; with LoRA, it contains only adapters."""
    return checkpoint_bytes(recipe.model, recipe.lora) / BILLION


def origin_rows(origin: Origin) -> Iterator[tuple[str, str]]:
    """Yield the table rows about the weights and data that a run starts from."""
    for name, part in (("weights", origin.weights), ("data", origin.data)):
        yield name, part.text + (f", in {part.path}" if part.path else "")


def _expectation_table(expectations: Sequence[Expectation], reason: str | None) -> Table:
    if not expectations:
        return table_of("Published", [unknown(reason or "no published figure")], [Column("")])
    columns: list[Column[Expectation]] = [
        *texts("kind"),
        *numbers("step time s: step_time_s", "tokens/s: tokens_per_s", "MFU %: mfu_pct"),
        *texts("convention"),
        Column("window", lambda item: item.window_text or unknown(item.window_reason or "not stated")),
        *texts("source"),
        *numbers("line", form=str),
    ]
    return table_of("Published", expectations, columns)


def _job_rows(job: JobDefaults) -> Iterator[tuple[str, str, str]]:
    yield "time limit", f"{job.time_limit_min} min", job.time_limit_source
    yield from (("variable", f"{one.name}={one.value}", one.source) for one in job.variables)
    if job.vboost is not None:
        yield "with --vboost recipe", f"level {job.vboost}", job.vboost_source or ""


def throughput_table(recipe: Recipe, step_time_s: float, result: Throughput) -> Table:
    counted = [item for item in Convention if item != Convention.PACKED or recipe.task != "pretrain"]
    conventions = tuple(CONVENTION_NAMES[item] for item in counted)
    rows: list[tuple[str, ...]] = [("step time s", number(step_time_s))]
    packing = recipe.packing
    padded = ", padded" if packing else ""
    rows.append((f"tokens/s{padded}", number(result.tokens_per_s)))
    rows.append((f"tokens/s per GPU{padded}", number(result.tokens_per_s_per_gpu)))
    if packing:
        rows.append(("tokens/s, real", number(result.real_tokens_per_s)))
    rows.append(("TFLOPS per GPU", *(number(result.tflops_per_gpu[item]) for item in counted)))
    rows.append(("MFU %", *(number(result.mfu_pct[item]) for item in counted)))
    rows.append(("days per 1T tokens", number(result.days_per_1t_tokens)))
    caption = ""
    if packing:
        real = f"{number(packing.tokens)} of {recipe.layout.seq_len} tokens of a sequence are real"
        caption = f"assumed: {real}, squared lengths {number(packing.sum_of_squares)}: {packing.source}"
    for name, reason in result.reasons.items():
        if name != Convention.PACKED or recipe.task != "pretrain":
            rows.append((f"{name}: {unknown(reason)}",))
    return rows_table(recipe.title(), ("metric", *conventions), rows, right=conventions, caption=caption)


def scales_document(recipes: Iterable[Recipe]) -> dict[str, Any]:
    """Return the JSON of each scale's layout and published values, which are null with a reason if there are none."""
    scales = [
        {
            **fields_of(recipe, *(name for name in IDENTITY if name != "task")),
            "layout": fields_of(recipe.layout, *SCALE_LAYOUT),
            **fields_of(recipe, "published: figure", "published_reason: expectations_reason"),
        }
        for recipe in recipes
    ]
    return {"scales": scales}


def scales_table(recipes: Sequence[Recipe]) -> Table:
    """Return a table, at most 80 columns wide, with one row per scale of a recipe."""
    first = recipes[0]
    figures = [recipe.figure for recipe in recipes if recipe.figure]
    what = "published figures" if figures else "layouts, none published"
    title = f"{first.workload} {first.size} {first.dtype} on {first.gpu_type}, {what}"
    names = (f"{name if name == 'layers' else name.upper()}: layout.{name}" for name in SHOWN)
    columns = [
        *texts("GPUs: scale", *names, right=True, wrap=False),
        *(numbers(*FIGURES, form=_published, wrap=False) if figures else ()),
        *texts(": proxy", form=lambda proxy: "PROXY" if proxy else "", wrap=False),
    ]
    notes = [*dict.fromkeys(f"source: {figure.source}, {figure.kind}, line {figure.line}" for figure in figures)]
    if any(recipe.proxy for recipe in recipes):
        notes.append("PROXY: fewer layers than the model has; its figures are not those of the model")
    return table_of(title, recipes, columns, caption=notes)


def _published(value: float | None) -> str:
    """Format a published value with the decimals that documents print."""
    return number(value) if value is None or value >= 1000 else f"{value:.2f}"


def lora_text(lora: Lora) -> str:
    return f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {lora.targets}"


def trained_text(model: Model, lora: Lora) -> str:
    """Describe the adapters, with their number of parameters."""
    return f"{trainable_parameters(model, lora):,} parameters: {lora_text(lora)}"


LEGEND = (
    "(n): a PROXY, with fewer layers than the model; +: doublings of the largest scale too; llmb: no document;"
    " mb: Megatron-Bridge's tables; all: every GPU type"
)


def list_document(workloads: Iterable[WorkloadFile]) -> dict[str, Any]:
    return {"workloads": [_workload_document(workload) for workload in workloads]}


def _workload_document(workload: WorkloadFile) -> dict[str, Any]:
    return {
        **fields_of(workload, "workload", "title", "task"),
        "sizes": {
            size: {
                "releases": [*releases_of(workload, size), *bridge_releases_of(workload, size)],
                "gpu_types": gpu_types_of(workload, size),
                "layouts": [
                    {
                        **fields_of(table, "release", "gpu_types", "dtypes"),
                        "scales": [row.gpus for row in table.rows if not row.proxy],
                        "proxy_scales": [row.gpus for row in table.rows if row.proxy],
                        "above_largest": table.above_largest,
                    }
                    for table in workload.layouts
                    if table.size == size
                ],
            }
            for size in sizes_of(workload)
        },
    }


def list_table(workloads: Iterable[WorkloadFile], gpu_types: Collection[str], more: str = "") -> Table:
    """Return the table of workloads; ``gpu_types`` are all GPU types of the catalogue."""
    groups: dict[tuple[str, str, str, str, str], list[str]] = {}
    for workload in workloads:
        for size in sizes_of(workload):
            for release, table in listed_tables(workload, size):
                key = (workload.workload, size, release, " ".join(table.dtypes), _scales_text(table))
                groups.setdefault(key, []).extend(table.gpu_types)
    rows, heads = [], ("workload", "size", "release", "GPU types", "dtypes", "scales")
    for (name, size, release, dtypes, scales), types in groups.items():
        rest = [each for each in types if each not in gpu_types]
        every = " ".join(["all", *rest] if {*gpu_types} <= {*types} else types)
        rows.append((name, size, release, every, dtypes, scales))
    return rows_table("Recipes", heads, rows, caption=[LEGEND, more])


def _scales_text(table: LayoutTable) -> str:
    if table.above_largest == "any":
        return "any"
    scales = " ".join(f"({row.gpus})" if row.proxy else str(row.gpus) for row in table.rows)
    return f"{scales} +" if table.above_largest == "double" else scales
