# SPDX-License-Identifier: Apache-2.0
"""Groups runs by recipe, and compares scaling with published figures; efficiency is relative to the smallest scale."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from llmb.base.errors import LlmbError
from llmb.base.shown_text import value_text
from llmb.base.statistics import Statistics, describe
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Expectation
from llmb.catalogue.records import PARALLEL, Recipe
from llmb.catalogue.resolve import Request, all_scales
from llmb.catalogue.throughput import SECONDS_PER_DAY
from llmb.runs.analyzed_run import BATCH, AnalyzedRun, layout_text
from llmb.runs.conditions import Value
from llmb.verdict.catalogue_figures import other_sizes

MOST_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Successful runs of one configuration with one software, in order of their start."""

    runs: tuple[AnalyzedRun, ...]
    run_means_s: Statistics
    """Statistics of the mean step times of the runs."""
    differs: tuple[str, ...] = ()
    """Values that distinguish the group from others with the same recipe and layout, such as ``software.torch 2.9``."""

    @property
    def first(self) -> AnalyzedRun:
        return self.runs[0]

    @property
    def spread_pct(self) -> float | None:
        """Return the range from the fastest to the slowest run, in percent of the median; None for a single run."""
        means = self.run_means_s
        return 100 * (means.max - means.min) / means.median if means.count > 1 and means.median else None


def group_runs(runs: Iterable[AnalyzedRun]) -> tuple[RunGroup, ...]:
    """Group successful runs by configuration and software, without copies; a run without either is its own group."""
    by_key: dict[str, list[AnalyzedRun]] = defaultdict(list)
    for run in runs:
        if run.outcome.status == "success" and run.copy_of is None:
            by_key[run.key or run.id].append(run)
    groups = [_group(repeats) for repeats in by_key.values()]
    by_look: dict[tuple[object, ...], list[RunGroup]] = defaultdict(list)
    for group in groups:
        by_look[_look(group.first)].append(group)
    told = [one for alike in by_look.values() for one in _distinguished(alike)]
    return tuple(sorted(told, key=_order))


def _group(runs: Sequence[AnalyzedRun]) -> RunGroup:
    ordered = sorted(runs, key=lambda run: (run.started_s or 0.0, str(run.log_path)))
    means = [run.outcome.step_time_s.mean for run in ordered if run.outcome.step_time_s]
    return RunGroup(tuple(ordered), describe(means))


def _look(run: AnalyzedRun) -> tuple[object, ...]:
    return run.recipe_text, run.text("gpu_type"), run.gpus, run.layout_text


def _distinguished(groups: Sequence[RunGroup]) -> list[RunGroup]:
    if len(groups) == 1:
        return list(groups)
    known: list[Mapping[str, Value]] = [{**one.first.configuration, **one.first.software} for one in groups]
    keys = sorted({key for one in known for key in one})
    different = [key for key in keys if len({one.get(key) for one in known}) > 1][:MOST_DIFFERENCES]
    return [
        RunGroup(group.runs, group.run_means_s, tuple(_told(key, one.get(key)) for key in different))
        for group, one in zip(groups, known, strict=True)
    ]


def _told(key: str, value: Value) -> str:
    return f"{key} {'unknown' if value is None else value_text(value)}"


def _order(group: RunGroup) -> tuple[object, ...]:
    run = group.first
    return run.recipe_text, run.text("gpu_type") or "", run.gpus or 0, run.layout_text, group.differs, run.id


Kind = Literal["weak", "strong", "mixed"]


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """One scale and layout: measured, published, or both. Unknown values are None."""

    gpus: int
    layout_text: str
    gbs: int | None
    group: RunGroup | None = None
    published: Expectation | None = None
    efficiency_pct: float | None = None
    published_efficiency_pct: float | None = None
    days_per_1t_tokens: float | None = None

    @property
    def step_time_s(self) -> float | None:
        """Return the median of the runs' mean step times; None if nothing was measured."""
        return self.group.run_means_s.median if self.group else None


@dataclass(frozen=True, slots=True)
class Scaling:
    """All scales of one recipe with one program, from the smallest."""

    recipe_text: str
    gpu_type: str | None
    program: str | None
    kind: Kind | None
    """None for a single scale, or if batch sizes are unknown."""
    rows: tuple[ScalingRow, ...]


def scaling_of(groups: Iterable[RunGroup], catalogue: Catalogue) -> tuple[Scaling, ...]:
    """Return the scaling of each measured recipe. Groups with an unknown recipe or number of GPUs are skipped."""
    families: dict[tuple[object, ...], list[RunGroup]] = defaultdict(list)
    for group in groups:
        if group.first.gpus and group.first.recipe_text:
            run = group.first
            keys = ("gpu_type", "program", "layout.seq_len", "layout.layers")
            families[(run.recipe_text, run.release, *map(run.configuration.get, keys))].append(group)
    return tuple(_scaling(members, catalogue) for members in families.values())


def _scaling(groups: Sequence[RunGroup], catalogue: Catalogue) -> Scaling:
    run = groups[0].first
    recipes = _published(run, catalogue)
    rows = [_measured_row(group, recipes) for group in groups]
    covered = {(row.gpus, row.layout_text) for row in rows if row.published}
    others = (row for row in map(_published_row, recipes) if row.published)
    rows += [row for row in others if (row.gpus, row.layout_text) not in covered]
    ordered = sorted(rows, key=lambda row: (row.gpus, row.group is None, row.layout_text))
    kind = _kind([row for row in ordered if row.group])
    return Scaling(run.recipe_text, run.text("gpu_type"), run.text("program"), kind, tuple(_with_efficiency(ordered)))


def _published(run: AnalyzedRun, catalogue: Catalogue) -> list[Recipe]:
    workload, size, dtype, gpu_type = map(run.text, ("workload", "size", "dtype", "gpu_type"))
    if not (workload and size and dtype and gpu_type) or workload not in catalogue.workloads:
        return []
    request = Request(workload=workload, size=size, dtype=dtype, gpu_type=gpu_type, release=run.release)
    try:
        listed = all_scales(catalogue, request).get(dtype, [])
    except LlmbError:
        return []
    depth = {key: value for key in ("layout.layers",) if (value := run.configuration.get(key)) is not None}
    return [recipe for recipe in listed if not other_sizes(depth, recipe) and (depth or not recipe.proxy)]


def _measured_row(group: RunGroup, recipes: Iterable[Recipe]) -> ScalingRow:
    run = group.first
    assert run.gpus
    same = (one for one in recipes if one.scale == run.gpus and not other_sizes(run.configuration, one))
    recipe = next(same, None)
    layout = recipe.layout if recipe else None
    gbs = run.number("layout.gbs") or (layout.gbs if layout else None)
    seq_len = run.number("layout.seq_len") or (layout.seq_len if layout else None)
    median = group.run_means_s.median
    proxy = bool(recipe and recipe.proxy) or (run.record is not None and run.days_per_1t_tokens is None)
    days = 1e12 * median / (gbs * seq_len) / SECONDS_PER_DAY if gbs and seq_len and not proxy else None
    published = recipe.figure if recipe else None
    shown = run.layout_text if run.layout or not recipe else _layout_text(recipe)
    return ScalingRow(run.gpus, shown, gbs, group, published, days_per_1t_tokens=days)


def _published_row(recipe: Recipe) -> ScalingRow:
    return ScalingRow(recipe.scale, _layout_text(recipe), recipe.layout.gbs, published=recipe.figure)


def _layout_text(recipe: Recipe) -> str:
    return layout_text({name: getattr(recipe.layout, name) for name in (*PARALLEL, *BATCH)})


def _kind(rows: Sequence[ScalingRow]) -> Kind | None:
    sizes = {(row.gpus, row.gbs) for row in rows if row.gbs}
    if len({gpus for gpus, _ in sizes}) < 2:
        return None
    if len({gbs for _, gbs in sizes}) == 1:
        return "strong"
    return "weak" if len({gbs / gpus for gpus, gbs in sizes if gbs}) == 1 else "mixed"


def _with_efficiency(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    measured = [_per_gpu(row, row.step_time_s) for row in rows]
    published = [_per_gpu(row, row.published.step_time_s if row.published else None) for row in rows]
    own_base, published_base = _base(rows, measured), _base(rows, published)
    return [
        replace(
            row,
            efficiency_pct=100 * own / own_base if own and own_base else None,
            published_efficiency_pct=100 * other / published_base if other and published_base else None,
        )
        for row, own, other in zip(rows, measured, published, strict=True)
    ]


def _per_gpu(row: ScalingRow, step_time_s: float | None) -> float | None:
    return row.gbs / step_time_s / row.gpus if row.gbs and step_time_s else None


def _base(rows: Sequence[ScalingRow], rates: Sequence[float | None]) -> float | None:
    known = [(row.gpus, rate) for row, rate in zip(rows, rates, strict=True) if rate]
    smallest = min((gpus for gpus, _ in known), default=None)
    return max((rate for gpus, rate in known if gpus == smallest), default=None)
