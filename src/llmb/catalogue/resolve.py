# SPDX-License-Identifier: Apache-2.0
"""Resolves a request to a recipe: selects a layout, applies and checks overrides, and adds published figures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from llmb.base.errors import UsageError, itemized, unknown
from llmb.base.options import WORD, Option
from llmb.base.shown_text import counted
from llmb.catalogue.bridge_figures import NEWEST, is_bridge
from llmb.catalogue.catalogue import Catalogue, layout_of, model_of
from llmb.catalogue.custom import USER_WORKLOAD, check_is_listed
from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.published import Expectation, PublishedFlops, Source
from llmb.catalogue.records import DEFAULT, OPEN_CHOICES, Dtype, Layout, Model, Packing, Recipe, Record, Unspecified
from llmb.catalogue.schema import LayoutRow, LayoutTable, WorkloadFile


def published_flops(
    catalogue: Catalogue, workload: WorkloadFile, table: LayoutTable, layout: Layout
) -> PublishedFlops | None:
    """Return the document's FLOPs for this shape: a printed value, or its formula; None if the document has neither."""
    entries = [
        entry for entry in workload.published_flops if (entry.size, entry.document) == (table.size, table.document)
    ]
    if not entries:
        return None
    shape = (layout.seq_len, layout.layers)
    printed = next((entry for entry in entries if (entry.seq_len, entry.layers) == shape), None)
    entry = printed or next((entry for entry in entries if entry.printed_flops is None), entries[0])
    return PublishedFlops(
        printed_flops=printed.printed_flops if printed else None,
        source=catalogue.documents[entry.document].source,
        **entry.model_dump(include={"formula", "as_published", "line", "notes"}),
    )


def packing_of(workload: WorkloadFile, layout: Layout) -> Packing | None:
    packings = (entry for entry in workload.packing if entry.seq_len == layout.seq_len)
    return next((Packing(**entry.model_dump(exclude={"seq_len"})) for entry in packings), None)


def scale_name(row: LayoutRow) -> str:
    return f"{row.gpus} (proxy)" if row.proxy else str(row.gpus)


def by_size(row: LayoutRow) -> tuple[bool, int]:
    """Return a sort key: rows of full models before proxies, each from the smallest scale."""
    return row.proxy, row.gpus


CPU = "cpu"
CUSTOM = "a custom layout"
MOST_GPUS = 1 << 32
"""Upper limit of a scale: beyond it, batch sizes could exceed the limit of a layout."""
LAYOUT_PANEL = "Layout (default: that of the recipe)"
RELEASE_HELP = (
    "Release of the reference suite, such as 25.04, or of Megatron-Bridge, such as mb-26.04 ('mb': its newest). "
    "Default: the suite's newest if it has the recipe, else Megatron-Bridge's."
)
_size = partial(Option, panel=LAYOUT_PANEL, minimum=1)


class LayoutSizes(Record):
    """Sizes of a layout; None for a size that is not stated."""

    tp: Annotated[int | None, _size(help="Tensor parallel size.")] = None
    pp: Annotated[int | None, _size(help="Pipeline parallel size.")] = None
    vp: Annotated[int | None, _size(help="Virtual pipeline stages per rank.")] = None
    cp: Annotated[int | None, _size(help="Context parallel size.")] = None
    ep: Annotated[int | None, _size(help="Expert parallel size.")] = None
    etp: Annotated[int | None, _size(help="Tensor parallel size of experts.")] = None
    mbs: Annotated[int | None, _size(help="Micro-batch size, in sequences.")] = None
    gbs: Annotated[int | None, _size(help="Global batch size, in sequences.")] = None
    seq_len: Annotated[int | None, _size(help="Sequence length, in tokens.")] = None
    layers: Annotated[int | None, _size(help="Number of layers.")] = None


class Overrides(LayoutSizes):
    """Layout values that replace the recipe's; None keeps the recipe's value."""

    first_stage_layers: Annotated[
        int | None, _size(help="Layers of the first pipeline stage; other stages share the rest.", minimum=0)
    ] = None
    last_stage_layers: Annotated[int | None, _size(help="Layers of the last pipeline stage.", minimum=0)] = None
    sequence_parallel: Annotated[
        bool | None,
        Option(help="Do not shard the sequence outside tensor-parallel layers.", panel=LAYOUT_PANEL, negates=True),
    ] = None

    def explicit(self) -> dict[str, int]:
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The user's choices; None means the default."""

    workload: Annotated[str, Option(flags=("-w", "--workload"), help="Workload; see 'llmb list'.", form=WORD)]
    size: Annotated[
        str,
        Option(
            flags=("-s", "--size"), help="Model size; see 'llmb list'. 'tiny' fits a laptop.", form=WORD, several=True
        ),
    ]
    dtype: Annotated[
        str | None,
        Option(
            help="Precision: bf16, fp8, mxfp8, nvfp4 or fp32. Default: bf16 (fp32 on a CPU) if published for the"
            " recipe, else its first.",
            form=WORD,
            several=True,
        ),
    ] = None
    scale: Annotated[
        int | None,
        Option(
            flags=("-n", "--gpus", "--scale"),
            help="Number of GPUs, or of CPU processes. Default: as detected by 'run' (at most 2 on a CPU) or 'accept',"
            " else the recipe's smallest.",
            minimum=1,
        ),
    ] = None
    gpu_type: Annotated[
        str | None,
        Option(
            help="GPU type in the catalogue, or cpu. Default: detected by 'run' and 'bench', else the recipe's first.",
            form=WORD,
        ),
    ] = None
    release: Annotated[str | None, Option(help=RELEASE_HELP)] = None
    overrides: Overrides = field(default_factory=Overrides)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(Request):
    """A request that may name a file instead of a workload and a size."""

    model_config: Annotated[
        str | None,
        Option(help="Hugging Face config.json, instead of workload and size.", metavar="FILE", folder=True, basic=True),
    ] = None


class ScaleChoices(NamedTuple):
    """The scales of a recipe's layouts, and the rule for scales above the largest."""

    full: tuple[int, ...]
    proxies: tuple[int, ...]
    above_largest: Literal["double", "refuse", "any"]


@dataclass(frozen=True, slots=True)
class _Choice:
    table: LayoutTable
    borrowed_from: str | None


@dataclass(frozen=True, slots=True)
class _Pick:
    choice: _Choice
    row: LayoutRow
    notes: tuple[str, ...] = ()


def resolve(
    catalogue: Catalogue, request: Request, found: Mapping[str, str] = MappingProxyType({}), *, check: bool = True
) -> Recipe:
    """Return the requested recipe; raise UsageError for unknown names, scales or releases, and, with ``check``, for an
    invalid layout."""
    workload = sized_workload(catalogue, request.workload, request.size)
    gpu_type = _gpu_type(catalogue, workload, request)
    release = _release(workload, request, gpu_type)
    # Published layouts before those that llmb adds.
    choices = sorted(
        _choices(workload, request.size, gpu_type, release), key=lambda choice: choice.table.release is None
    )
    dtypes: list[str] = list(dict.fromkeys(chain.from_iterable(choice.table.dtypes for choice in choices)))
    dtype = _dtype(dtypes, choices, request, gpu_type)
    choices = [choice for choice in choices if dtype in choice.table.dtypes]
    pick = _pick_row(workload, choices, replace(request, gpu_type=gpu_type), release)
    recipe = _recipe(catalogue, workload, request, gpu_type, dtype, pick)
    if check and (problems := check_layout(recipe.model, recipe.layout)):
        raise layout_error(problems)
    rows = sorted((row for choice in choices for row in choice.table.rows), key=by_size)
    largest = max((choice.table.rows[-1].gpus, choice.table.above_largest) for choice in choices)
    above = {"any": ["any"], "double": [f"doublings of {largest[0]}"], "refuse": []}[largest[1]]
    possible = {
        "gpu_type": sorted(gpu_types_of(workload, request.size), key=[*catalogue.gpus, CPU].index),
        "dtype": dtypes,
        "scale": [*dict.fromkeys(map(scale_name, rows)), *above],
        "release": releases_of(workload, request.size) or bridge_releases_of(workload, request.size),
    }
    return recipe.model_copy(update={"unspecified": tuple(_unspecified(recipe, request, found, possible))})


def _unspecified(
    recipe: Recipe, request: Request, found: Mapping[str, str], possible: Mapping[str, Sequence[str]]
) -> Iterator[Unspecified]:
    """Yield every default that has alternatives. The text of an alternative may end with a remark in parentheses."""
    for field_name, name in OPEN_CHOICES.items():
        value = getattr(recipe, field_name)
        if value is None or (getattr(request, field_name) is not None and field_name not in found):
            continue
        if others := tuple(item for item in possible[field_name] if item.partition(" (")[0] != str(value)):
            yield Unspecified(name, str(value), found.get(field_name, DEFAULT), others)


def listed_scales(catalogue: Catalogue, request: Request) -> dict[str, ScaleChoices]:
    """Return the scales of a workload's size on a GPU type, by dtype; raise UsageError for unknown names."""
    workload = sized_workload(catalogue, request.workload, request.size)
    release = _release(workload, request, _gpu_type(catalogue, workload, request))
    scales: dict[str, ScaleChoices] = {}
    for choice in _choices(workload, request.size, _gpu_type(catalogue, workload, request), release):
        for dtype in choice.table.dtypes:
            before = scales.get(dtype, ScaleChoices((), (), "refuse"))
            full = {*before.full, *(row.gpus for row in choice.table.rows if not row.proxy)}
            proxies = {*before.proxies, *(row.gpus for row in choice.table.rows if row.proxy)}
            largest = max(row.gpus for row in choice.table.rows) == max(full | proxies)
            above = choice.table.above_largest if largest else before.above_largest
            scales[dtype] = ScaleChoices(tuple(sorted(full)), tuple(sorted(proxies)), above)
    return scales


def listed_tables(workload: WorkloadFile, size: str) -> Iterator[tuple[str, LayoutTable]]:
    """Yield the layout tables of a size, each with the release to show; Megatron-Bridge's are merged into one."""
    tables = [table for table in workload.layouts if table.size == size]
    bridge = [table for table in tables if table.release and is_bridge(table.release)]
    yield from ((table.release or "llmb", table) for table in tables if table not in bridge)
    if bridge:
        rows = {row.gpus: row for table in bridge for row in table.rows}
        united = {
            name: tuple(sorted({value for table in bridge for value in getattr(table, name)}))
            for name in ("gpu_types", "dtypes")
        }
        yield NEWEST, bridge[-1].model_copy(update={**united, "rows": tuple(rows[gpus] for gpus in sorted(rows))})


def find_workload(catalogue: Catalogue, name: str) -> WorkloadFile:
    if name not in catalogue.workloads:
        if name in catalogue.undescribed:
            raise _undescribed(catalogue, name)
        check_is_listed(name)
        raise unknown("workload", name, catalogue.workloads, do="see 'llmb list'")
    return catalogue.workloads[name]


def _undescribed(catalogue: Catalogue, name: str) -> UsageError:
    sizes = catalogue.undescribed[name]
    what = f"the catalogue has figures for {name} {' and '.join(sizes)}, but no description of the model"
    return UsageError(what, do=f"judge a log instead: 'llmb judge LOG -w {name} -s {sizes[0]}'")


def find_model(catalogue: Catalogue, workload: str, size: str) -> Model:
    """Return the full model of a workload's size, not a proxy."""
    return catalogue.families[sized_workload(catalogue, workload, size).model][size]


def source_of(catalogue: Catalogue, workload: str, size: str) -> Source:
    """Return the source of a size's weights and data for fine-tuning; raise UsageError if the size has none."""
    sources = find_workload(catalogue, workload).sources
    if size not in sources:
        fine_tuning = [name for name, item in catalogue.workloads.items() if item.sources]
        what = f"{workload} {size} does not fine-tune, so it needs no prepared weights or data"
        raise UsageError(what, choices=fine_tuning, do="pass one of these with --workload")
    return sources[size]


def seq_lens_of(catalogue: Catalogue, workload: str, size: str) -> tuple[int, ...]:
    """Return the sequence lengths of all recipes of a size, the shortest first."""
    return tuple(sorted({table.seq_len for table in find_workload(catalogue, workload).layouts if table.size == size}))


def sized_workload(catalogue: Catalogue, name: str, size: str) -> WorkloadFile:
    """Return the workload; raise UsageError if there is no such workload, or if it does not have the size."""
    workload = find_workload(catalogue, name)
    if size not in sizes_of(workload):
        if size in catalogue.undescribed.get(name, ()):
            raise _undescribed(catalogue, name)
        raise unknown(f"{name} size", size, sizes_of(workload))
    return workload


def sizes_of(workload: WorkloadFile) -> list[str]:
    return list(dict.fromkeys(table.size for table in workload.layouts))


def is_tiny(size: str) -> bool:
    """Return True for sizes that train on a laptop: ``tiny``, and variants such as ``tiny-moe``."""
    return size.partition("-")[0] == "tiny"


def gpu_types_of(workload: WorkloadFile, size: str) -> list[str]:
    """Return the GPU types that a size runs on; types that borrow layouts come last."""
    itemized = list(chain.from_iterable(table.gpu_types for table in workload.layouts if table.size == size))
    borrowing = [gpu for gpu, base in workload.borrowed_layouts.items() if base in itemized]
    return list(dict.fromkeys(itemized + borrowing))


def requested_gpu_type(catalogue: Catalogue, request: Request) -> str:
    """Return a request's GPU type, by default the size's first; raise UsageError if unknown."""
    return _gpu_type(catalogue, sized_workload(catalogue, request.workload, request.size), request)


def releases_of(workload: WorkloadFile, size: str) -> list[str]:
    """Return the releases of the reference suite that publish layouts of a size, the oldest first."""
    return [release for release in _all_releases(workload, size) if not is_bridge(release)]


def bridge_releases_of(workload: WorkloadFile, size: str) -> list[str]:
    """Return the releases of Megatron-Bridge that publish layouts of a size, the oldest first."""
    return [release for release in _all_releases(workload, size) if is_bridge(release)]


def _all_releases(workload: WorkloadFile, size: str) -> list[str]:
    # Their names are dates.
    return sorted({table.release for table in workload.layouts if table.size == size and table.release})


def _gpu_type(catalogue: Catalogue, workload: WorkloadFile, request: Request) -> str:
    types = gpu_types_of(workload, request.size)
    if request.gpu_type is None:
        return types[0]
    if request.gpu_type not in types and request.gpu_type in (*catalogue.gpus, CPU):
        on_cpu = "; 'llmb list' marks sizes that train on a CPU with 'cpu'" if request.gpu_type == CPU else ""
        what = f"{request.workload} {request.size} has no layout for {request.gpu_type}"
        raise UsageError(what, choices=types, do=f"pass one of these with --gpu-type{on_cpu}")
    if request.gpu_type not in types:
        raise unknown("GPU type", request.gpu_type, [*catalogue.gpus, CPU] if CPU in types else types)
    return request.gpu_type


def _release(workload: WorkloadFile, request: Request, gpu_type: str) -> str | None:
    suite, bridge = releases_of(workload, request.size), bridge_releases_of(workload, request.size)
    if request.release in (None, NEWEST):
        default = suite[-1:] if request.release is None else []
        newest = [*default, *reversed(bridge)]
        fitting = (release for release in newest if _has_recipe(workload, request, gpu_type, release))
        return next(fitting, next(iter(newest), None))
    releases = [*suite, *bridge]
    if request.release not in releases:
        if not releases:
            raise UsageError(f"size {request.size} belongs to no release", do="omit --release")
        raise UsageError(f"{request.workload} {request.size} has no release '{request.release}'", choices=releases)
    if not _choices(workload, request.size, gpu_type, request.release):
        having = [each for each in releases if _choices(workload, request.size, gpu_type, each)]
        what = f"release {request.release} has no layout of {request.workload} {request.size} for {gpu_type}"
        raise UsageError(what, choices=having, do="pass another --release, or another --gpu-type")
    return request.release


def _has_recipe(workload: WorkloadFile, request: Request, gpu_type: str, release: str) -> bool:
    tables = [choice.table for choice in _choices(workload, request.size, gpu_type, release) if choice.table.release]
    return any(request.dtype in (None, *table.dtypes) for table in tables)


def _choices(workload: WorkloadFile, size: str, gpu_type: str, release: str | None) -> list[_Choice]:
    base = workload.borrowed_layouts.get(gpu_type)
    tables = [table for table in workload.layouts if table.size == size and table.release in (None, release)]
    own = any(gpu_type in table.gpu_types for table in tables if table.release and is_bridge(table.release))
    choices = []
    for table in tables:
        if gpu_type in table.gpu_types:
            choices.append(_Choice(table, None))
        elif table.release is not None and base in table.gpu_types and not own:
            choices.append(_Choice(table, base))
    return choices


def _dtype(dtypes: Sequence[str], choices: Sequence[_Choice], request: Request, gpu_type: str) -> Dtype:
    if request.dtype is not None:
        if request.dtype not in dtypes:
            raise UsageError(f"this recipe has no dtype '{request.dtype}'", choices=dtypes)
        return Dtype(request.dtype)
    usual = Dtype.FP32 if gpu_type == CPU else Dtype.BF16
    fitting = [choice.table for choice in choices if request.scale in (None, *(row.gpus for row in choice.table.rows))]
    tables = fitting or [choice.table for choice in choices]
    documented = [table for table in tables if table.release] or tables
    published = [dtype for table in documented for dtype in table.dtypes]
    return usual if usual in published else published[0]


def _pick_row(workload: WorkloadFile, choices: Sequence[_Choice], request: Request, release: str | None) -> _Pick:
    rows: dict[int, _Pick] = {}
    for choice in choices:
        for row in choice.table.rows:  # the batch selects between rows of one scale
            if row.gpus not in rows or rows[row.gpus].row.gbs != row.gbs == request.overrides.gbs:
                rows[row.gpus] = _Pick(choice, row)
    _, lowest = min((pick.row.proxy, gpus) for gpus, pick in rows.items())
    scale = lowest if request.scale is None else request.scale
    if scale in rows:
        return rows[scale]
    largest = rows[max(rows)]
    above = largest.choice.table.above_largest
    if scale > MOST_GPUS:
        raise _scale_error(workload, request, release, scale, [pick.row for pick in rows.values()], above)
    if ruled := _by_batch_rule(choices, scale):
        return ruled
    if scale >= 1 and above == "any":
        return _Pick(largest.choice, largest.row.model_copy(update={"gpus": scale}))
    factor, rest = divmod(scale, largest.row.gpus)
    if scale > 1 and above == "double" and not rest and factor & (factor - 1) == 0:
        row = largest.row.model_copy(update={"gpus": scale, "gbs": largest.row.gbs * factor, "dp": None, "ga": None})
        return _Pick(largest.choice, row, (f"{factor} times the largest published scale, {largest.row.gpus} GPUs",))
    if scale >= 1 and request.overrides.gbs is not None:
        whole = {gpus: pick for gpus, pick in rows.items() if not pick.row.proxy} or rows
        base = whole[max((gpus for gpus in whole if gpus <= scale), default=min(whole))]
        row = base.row.model_copy(update={"gpus": scale, "dp": None, "ga": None})
        return _Pick(base.choice, row, (f"{CUSTOM}, derived from the one for {base.row.gpus} GPUs",))
    raise _scale_error(workload, request, release, scale, [pick.row for pick in rows.values()], above)


def _by_batch_rule(choices: Iterable[_Choice], scale: int) -> _Pick | None:
    for choice in choices:
        rule = choice.table.batch_rule
        if rule and scale > rule.gpus and scale * rule.gbs % rule.gpus == 0:
            base = next(row for row in choice.table.rows if row.gpus == rule.gpus)
            gbs = scale * rule.gbs // rule.gpus
            row = base.model_copy(update={"gpus": scale, "gbs": gbs, "dp": None, "ga": None})
            origin = "by default" if rule.line is None else f"as in the document (line {rule.line})"
            note = f"GBS is {scale} x {rule.gbs} / {rule.gpus}, {origin}"
            return _Pick(choice, row, (note,))
    return None


def _scale_error(
    workload: WorkloadFile, request: Request, release: str | None, scale: int, itemized: Sequence[LayoutRow], above: str
) -> UsageError:
    others = [*reversed(releases_of(workload, request.size)), *reversed(bridge_releases_of(workload, request.size))]
    elsewhere = [name for name in others if name != release and _has(workload, request, name, scale)]
    custom = ", or --gbs and sizes that fit for a custom layout" if scale <= MOST_GPUS else ""
    advice = f"pass --release {elsewhere[0]}" if elsewhere else f"pass one of these with --scale{custom}"
    doubled = [f"doublings of {max(row.gpus for row in itemized)}"] if above == "double" else []
    choices = [*(scale_name(row) for row in sorted(itemized, key=by_size)), *doubled]
    if scale < 1:
        choices = ["1 or more"] if above == "any" else choices
        return UsageError(f"--scale is {scale}; it must be at least 1", choices=choices)
    what = f"{request.workload} {request.size} has no layout for {counted(scale, 'GPU')}"
    return UsageError(what, choices=choices, do=advice)


def _has(workload: WorkloadFile, request: Request, release: str, scale: int) -> bool:
    choices = _choices(workload, request.size, str(request.gpu_type), release)
    fitting = [each for each in choices if request.dtype in (None, *each.table.dtypes)]
    rows = [row for each in fitting for row in each.table.rows if row.gpus == scale]
    rows += [pick.row] if (pick := _by_batch_rule(fitting, scale)) else []
    return any(scale % (row.tp * row.pp * row.cp) == 0 for row in rows)


def _recipe(
    catalogue: Catalogue, workload: WorkloadFile, request: Request, gpu_type: str, dtype: Dtype, pick: _Pick
) -> Recipe:
    table, row = pick.choice.table, pick.row
    sizes = request.overrides.explicit()
    published = layout_of(table, row)
    layout = published.model_copy(update=sizes)
    full = catalogue.families[workload.model][table.model_size or request.size]
    model = model_of(full, table, row.model_copy(update={"layers": layout.layers}))
    changed = {name: value for name, value in sizes.items() if value != getattr(published, name)}
    expectations, reason = _expectations(catalogue, request, gpu_type, dtype, pick, changed)
    is_smaller = row.proxy and (row.vocab_size is not None or row.experts is not None)
    is_proxy = layout.layers != full.layers or is_smaller
    checkpoint = None if is_proxy else workload.checkpoints.get(request.size)
    gpu = catalogue.gpus.get(gpu_type)
    return Recipe(
        workload=workload.workload,
        size=request.size,
        dtype=dtype,
        gpu_type=gpu_type,
        scale=layout.gpus,
        release=table.release,
        document=catalogue.documents[table.document] if table.document else None,
        task=workload.task,
        proxy=is_proxy,
        full_layers=full.layers,
        model=model,
        layout=layout,
        training=workload.training_for(request.size),
        lora=workload.lora.record() if workload.lora else None,
        capacity_factor=workload.capacity_factor.factor if workload.capacity_factor else None,
        packing=packing_of(workload, layout),
        published_flops=published_flops(catalogue, workload, table, layout),
        expectations=expectations,
        expectations_reason=reason,
        conditions=tuple(
            entry.record()
            for entry in catalogue.publications(table.document).conditions
            if entry.holds_for(request.workload, request.size, dtype, pick.choice.borrowed_from or gpu_type)
        ),
        checkpoint=checkpoint.record(catalogue.documents[checkpoint.document].source) if checkpoint else None,
        peak_tflops=gpu.peak_tflops.get(dtype) if gpu else None,
        gpu_memory_gb=gpu.memory_gb if gpu else None,
        notes=tuple(table.notes),
        overridden=tuple(changed),
        decisions=_decisions(pick, gpu_type, changed, published),
        config_file=catalogue.own.file if catalogue.own and workload.workload == USER_WORKLOAD else None,
    )


def layout_error(problems: Sequence[str]) -> UsageError:
    do = "change these sizes or options; 'llmb show' prints valid ones"
    return UsageError(f"this layout is invalid:{itemized(problems)}", do=do)


def _decisions(pick: _Pick, gpu_type: str, changed: dict[str, int], published: Layout) -> tuple[str, ...]:
    decisions = [*pick.notes]
    if pick.choice.borrowed_from:
        decisions.append(f"the layout was published for {pick.choice.borrowed_from}; {gpu_type} has none")
    if changed:
        pairs = ", ".join(f"{name} {getattr(published, name)} -> {value}" for name, value in changed.items())
        decisions.append(f"changed by options: {pairs}")
    return tuple(decisions)


def _expectations(
    catalogue: Catalogue, request: Request, gpu_type: str, dtype: Dtype, pick: _Pick, changed: dict[str, int]
) -> tuple[tuple[Expectation, ...], str | None]:
    table = pick.choice.table
    gpu_types = (gpu_type,) if pick.choice.borrowed_from else (gpu_type, None)
    if request.workload == USER_WORKLOAD:
        return (), "a configuration file describes the model, and no figures are published for it"
    if table.release is None:
        return (), "a recipe of llmb itself, without published figures"
    if changed:
        return (), f"the layout differs from the published one ({', '.join(changed)})"
    rows = [
        figure.expectation
        for figure in catalogue.publications(table.document).figures
        if (figure.workload, figure.size, figure.dtype, figure.gpus)
        == (request.workload, request.size, dtype, pick.row.gpus)
        and figure.gpu_type in gpu_types
        and figure.expectation.release == table.release
        and figure.sizes.get("gbs", pick.row.gbs) == pick.row.gbs
    ]
    if any(_contradicts_itself(figure, pick.row.gbs * table.seq_len) for figure in rows):
        return (), "the published figures contradict each other, or the batch of the layout, by more than 10 %"
    reason = None if rows else f"no figure is published for {dtype} on {pick.row.gpus} {gpu_type} GPUs"
    return tuple(sorted(rows, key=lambda item: (item.kind != "table", not item.gpu_type_stated))), reason


def _contradicts_itself(figure: Expectation, tokens: int) -> bool:
    days = figure.days_per_1t_tokens
    rates = (figure.tokens_per_s, 1e12 / (86_400 * days) if days else None)
    return any(rate is not None and abs(rate * figure.step_time_s / tokens - 1) > 0.1 for rate in rates)


def all_scales(catalogue: Catalogue, request: Request) -> dict[str, list[Recipe]]:
    """Return the recipes at all listed scales, the smallest first, by dtype; raise UsageError for invalid requests or a
    scale."""
    if request.scale is not None:
        raise UsageError("--all-scales and --scale cannot be combined", do="pass only one")
    listed = listed_scales(catalogue, request)
    if request.dtype is not None and request.dtype not in listed:
        raise UsageError(f"this recipe has no dtype '{request.dtype}'", choices=listed)
    return {
        dtype: [
            resolve(catalogue, replace(request, dtype=dtype, scale=scale))
            for scale in sorted({*scales.full, *scales.proxies})
        ]
        for dtype, scales in listed.items()
        if request.dtype in (None, dtype)
    }
