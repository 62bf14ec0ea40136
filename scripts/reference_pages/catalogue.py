# SPDX-License-Identifier: Apache-2.0
"""docs/reference/catalogue.md: all data that ships with llmb."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from llmb.catalogue.catalogue import Catalogue, PublishedFigure, layout_of
from llmb.catalogue.published import Document
from llmb.catalogue.records import SOURCED, Fabric, Gpu, Model
from llmb.catalogue.resolve import sizes_of
from llmb.catalogue.schema import JobEntry, LayoutTable, WorkloadFile
from llmb.catalogue.throughput import parameter_count
from reference_pages.markdown import bullets, page, table

INTRO = """The content of `src/llmb/catalogue/data`. Unless a section says otherwise, an empty cell means that there is
no value, or that no source states it. Sources and errata: [published figures](../explanation/published-figures.md).

[Workloads](#workloads), [documents](#documents), [models](#models), [layouts](#layouts),
[published figures](#published-figures), [FLOPs as published](#flops-as-published),
[packed sequences](#packed-sequences), [training](#training), [checkpoint sizes](#checkpoint-sizes),
[jobs](#jobs), [fabrics](#fabrics), [hardware](#hardware)."""
LAYOUTS = """`line` is the row's line in the document. DP and GA are derived from the other columns. If vocabulary or
experts are empty, the model's value applies."""
ABOVE_LARGEST = {
    "double": "Doublings of the largest scale can be run too, with the batch size doubled as well.",
    "refuse": "Other scales need `--gbs`.",
    "any": "Other scales can be run too, if the batch size is divisible by MBS x DP.",
}


def catalogue_page(catalogue: Catalogue) -> str:
    workloads = list(catalogue.workloads.values())
    return page(
        "# Catalogue",
        INTRO,
        workload_section(workloads),
        document_section(catalogue.documents.values()),
        model_section(list(catalogue.models.values())),
        page("## Layouts", LAYOUTS),
        *(layout_section(workload, item) for workload in workloads for item in workload.layouts),
        figure_section(catalogue.figures),
        flops_section(workloads),
        packing_section(workloads),
        training_section(workloads),
        checkpoint_section(workloads),
        job_section(workloads),
        fabric_section(catalogue.fabrics.values()),
        page("## Hardware", "Per GPU. Peaks are dense. NVLink's rate is for both directions, the network's for one."),
        *map(gpu_section, catalogue.gpus.values()),
    )


def workload_section(workloads: Iterable[WorkloadFile]) -> str:
    columns = ["workload", "title", "task", "model", "sizes", "borrowed layouts"]
    rows = [[w.workload, w.title, w.task, w.model, sizes_of(w), borrowed(w.borrowed_layouts)] for w in workloads]
    return page("## Workloads", table(columns, rows))


def borrowed(layouts: Mapping[str, str]) -> str:
    return ", ".join(f"{gpu_type} from {base}" for gpu_type, base in layouts.items())


def document_section(documents: Iterable[Document]) -> str:
    columns = ["document", "title", "source", "release", "window", "profiled steps", "convention", "notes"]
    rows = [
        [d.document, d.title, d.source, d.release, d.window, profiled(d), d.convention, " ".join(d.notes)]
        for d in documents
    ]
    intro = "A document's figures are for the steps in `window`. Profiled steps 20 to 25 are steps 20 to 24."
    return page("## Documents", intro, table(columns, rows))


def profiled(document: Document) -> str:
    return f"{document.profile.start} to {document.profile.stop}" if document.profile else ""


def model_section(models: Sequence[Model]) -> str:
    sizes = ["layers", "hidden_size", "ffn_hidden_size", "attention_heads", "kv_heads", "head_dim", "vocab_size"]
    kinds = ["norm", "mlp", "rotary_pairs", "rotary_fraction", "qk_norm", "tied_embeddings"]
    details = [*kinds, "max_seq_len", "norm_eps", "rope_theta", "init_std"]
    parts = ["rope_scaling", "moe", "chunked_attention"]
    shapes = [[m.model, m.size, *(getattr(m, name) for name in sizes), *parameter_count(m)] for m in models]
    more = [[m.model, m.size, *(getattr(m, name) for name in details), m.source] for m in models]
    rest = [[m.model, m.size, name, part.model_dump()] for m in models for name in parts if (part := getattr(m, name))]
    return page(
        "## Models",
        "These are the models' own sizes, even if a document prints others. Active parameters are used for one token.",
        "Tied embeddings are counted once.",
        table(["model", "size", *sizes, "parameters", "active"], shapes),
        table(["model", "size", *details, "source"], more),
        table(["model", "size", "part", "values"], rest),
    )


def layout_section(workload: WorkloadFile, item: LayoutTable) -> str:
    names = ["gpus", "layers", "tp", "pp", "vp", "cp", "ep", "etp", "dp", "mbs", "gbs", "ga"]
    rows = []
    for row in item.rows:
        layout = layout_of(item, row)
        rows.append([row.line, *(getattr(layout, n) for n in names), row.proxy, row.vocab_size, row.experts])
    columns = ["line", "GPUs", "layers", *(name.upper() for name in names[2:]), "proxy", "vocabulary", "experts"]
    origin = f"release {item.release}, document {item.document}" if item.release else "a layout of llmb itself"
    facts = f"{origin.capitalize()}; sequence length {item.seq_len}. {ABOVE_LARGEST[item.above_largest]}"
    place = f"{' '.join(item.dtypes)} on {' '.join(item.gpu_types)}"
    title = f"### {workload.workload} {item.size} {place}, {item.release or 'llmb'}"
    return page(title, facts, bullets(item.notes), table(columns, rows))


def figure_section(figures: Sequence[PublishedFigure]) -> str:
    intro = "Step times are in seconds, with their lines. Megatron-Bridge's times are computed from its rates."
    groups = [list(group) for _, group in groupby(figures, key=table_of_figure)]
    return page("## Published figures", intro, *map(figure_table, groups))


def table_of_figure(figure: PublishedFigure) -> tuple[str | None, ...]:
    expected = figure.expectation
    return (figure.workload, figure.size, figure.dtype, figure.gpu_type, expected.release, expected.kind)


def figure_table(figures: Sequence[PublishedFigure]) -> str:
    columns = ["GPUs", "line", "step time", "tokens/s", "MFU %", "days per 1T", "TFLOPS per GPU", "MFU's peak", "notes"]
    names = ["line", "step_time_s", "tokens_per_s", "mfu_pct", "days_per_1t_tokens", "tflops_per_gpu", "peak_tflops"]
    first = figures[0]
    source = first.expectation
    common = [note for note in source.notes if all(note in figure.expectation.notes for figure in figures)]
    rows = [
        [figure.gpus, *(getattr(figure.expectation, name) for name in names), " ".join(own_notes(figure, common))]
        for figure in figures
    ]
    place = f"on {first.gpu_type}" if first.gpu_type else "on a GPU that is not stated"
    title = f"### {first.workload} {first.size} {first.dtype} {place}, {source.release}, {source.kind}"
    origin = f"{source.source}; window {source.window or 'not stated'}; convention {source.convention}."
    return page(title, origin, bullets(common), table(columns, rows))


def own_notes(figure: PublishedFigure, common: Sequence[str]) -> Iterator[str]:
    return (note for note in figure.expectation.notes if note not in common)


def flops_section(workloads: Iterable[WorkloadFile]) -> str:
    columns = ["model", "document", "line", "sequence length", "layers", "printed", "formula", "assumed sizes", "notes"]
    rows = []
    for workload in workloads:
        for item in workload.published_flops:
            counted = [item.document, item.line, item.seq_len, item.layers, item.printed_flops, item.formula]
            rows.append([f"{workload.model} {item.size}", *counted, item.as_published, " ".join(item.notes)])
    intro = (
        "FLOPs are for one sequence, forward and backward. Assumed sizes are wrong sizes that the document uses. "
        "True counts: [FLOPs and MFU](../explanation/flops-and-mfu.md)."
    )
    return page("## FLOPs as published", intro, table(columns, rows))


def packing_section(workloads: Iterable[WorkloadFile]) -> str:
    columns = ["workload", "sequence length", "tokens", "sum of squared lengths", "source"]
    rows = [[w.workload, p.seq_len, p.tokens, p.sum_of_squares, p.source] for w in workloads for p in w.packing]
    return page("## Packed sequences", "Values are means over packed sequences.", table(columns, rows))


def training_section(workloads: Sequence[WorkloadFile]) -> str:
    settings = [
        (w.workload, size, w.training_for(size).model_dump(exclude={"document_tokens"}))
        for w in workloads
        for size in sizes_of(w)
    ]
    rows = [[workload, size, *values.values()] for workload, size, values in settings]
    return page(
        "## Training",
        "AdamW, with a linear warm-up and then cosine decay to `min_lr`.",
        table(["workload", "size", *settings[0][2]], rows),
    )


def checkpoint_section(workloads: Iterable[WorkloadFile]) -> str:
    columns = ["workload", "size", "GB", "saved at scales", "loaded from scale", "document", "line", "notes"]
    rows = []
    for workload in workloads:
        for size, item in workload.checkpoints.items():
            scales = f"{item.save_scales[0]} to {item.save_scales[1]}" if item.save_scales else None
            place = [item.document, item.line, " ".join(item.notes)]
            rows.append([workload.workload, size, item.size_gb, scales, item.min_load_scale, *place])
    return page("## Checkpoint sizes", "The documents print GB, but mean GiB.", table(columns, rows))


def job_section(workloads: Iterable[WorkloadFile]) -> str:
    """Time limits, variables and vboost; an empty cell does not restrict."""
    limits, variables, boosts = [], [], []
    for workload in workloads:
        for limit in workload.jobs.time_limits:
            limits.append([*conditions(workload, limit), limit.minutes, limit.source])
        for entry in workload.jobs.variables:
            variables.append([*conditions(workload, entry), entry.variables, entry.source])
        for boost in workload.jobs.vboost:
            boosts.append([*conditions(workload, boost), boost.level, boost.source])
    columns = ["workload", "release", "sizes", "dtypes", "GPU types", "from scale", "layouts"]
    return page(
        "## Jobs",
        "Defaults for jobs on a cluster; an empty condition matches anything. The first matching time limit is used.",
        table([*columns, "minutes", "source"], limits),
        table([*columns, "variables", "source"], variables),
        "With `vboost: recipe` in `cluster_config.yaml`, or `--vboost recipe`:",
        table([*columns, "vboost", "source"], boosts),
    )


def conditions(workload: WorkloadFile, entry: JobEntry) -> list[object]:
    scale = entry.min_scale if entry.min_scale > 1 else None
    pipelined = "PP above 1" if entry.pipelined else None
    return [workload.workload, entry.release, entry.sizes, entry.dtypes, entry.gpu_types, scale, pipelined]


def fabric_section(fabrics: Iterable[Fabric]) -> str:
    columns = ["fabric", "title", "variables", "the site has to set", "profile", "source", "notes"]
    rows = [[f.fabric, f.title, f.variables, f.needs, f.profile, f.source, " ".join(f.notes)] for f in fabrics]
    intro = "Networks between nodes, for `fabric` in `cluster_config.yaml`, with the settings that NCCL needs."
    return page("## Fabrics", intro, table(columns, rows))


def gpu_section(gpu: Gpu) -> str:
    rows = [[name, getattr(gpu, name), gpu.sources.get(name)] for name in SOURCED]
    rows += [[name, getattr(gpu, name), None] for name in ("gpus_per_node", "nvlink_domain_gpus")]
    patterns = ", ".join(f"`{pattern}`" for pattern in gpu.device_names)
    facts = f"{gpu.name}. The driver's names for it: {patterns}."
    return page(f"### {gpu.gpu_type}", facts, table(["figure", "value", "source"], rows), bullets(gpu.notes))
