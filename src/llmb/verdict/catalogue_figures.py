# SPDX-License-Identifier: Apache-2.0
"""Adds what the user states, the layout of the catalogue's recipe, throughput and MFU to logs without a record."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from llmb.base.errors import LlmbError, UsageError, unknown
from llmb.catalogue.bridge_figures import PublishedFigure, is_bridge
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Dtype, Recipe
from llmb.catalogue.resolve import LayoutSizes, Overrides, Request, bridge_releases_of, find_model, resolve
from llmb.catalogue.throughput import throughput, why_too_fast
from llmb.readers.logs.configuration import ARGUMENTS
from llmb.runs.analyzed_run import ASSUMED, BATCH, LOGGED, AnalyzedRun
from llmb.runs.conditions import Value, title_of

NEEDED = ("workload", "size", "dtype", "gpu_type", "layout.gpus")
"""Keys that a log must report to identify its recipe."""
_SIZES = tuple(LayoutSizes.model_fields)


def with_stated(
    runs: Iterable[AnalyzedRun], stated: Mapping[str, Value], catalogue: Catalogue
) -> tuple[AnalyzedRun, ...]:
    """Add ``stated`` to each log's configuration.

    Raise UsageError for names not in the catalogue, and contradicting logs.
    """
    workloads = [*catalogue.workloads, *catalogue.undescribed]
    names = {"gpu_type": catalogue.gpus, "workload": workloads, "dtype": [*Dtype]}
    for key, valid in names.items():
        if stated.get(key, valid) not in (valid, *valid):
            raise unknown(title_of(key), str(stated[key]), valid)
    return tuple(run if run.record or not stated else _stated(run, stated, catalogue) for run in runs)


def _stated(run: AnalyzedRun, stated: Mapping[str, Value], catalogue: Catalogue) -> AnalyzedRun:
    if not run.configuration and "workload" not in stated:
        return run
    own = {key: value for key, value in stated.items() if key == "gpu_type"}
    reported = as_catalogued({**own, **run.configuration}, catalogue)
    foreign = reported.get("workload") not in catalogue.workloads  # a name that the catalogue does not have
    for key, value in stated.items():
        if reported.get(key, value) != value and not (foreign and key in ("workload", "size")):
            what = f"{title_of(key)} {value} was specified, but the log reports {reported[key]}"
            raise UsageError(what, where=str(run.path), do="omit the option, or select only the logs with this value")
    layers, named = reported.get("layout.layers"), {**reported, **stated}
    workload, size = str(named.get("workload")), stated.get("size")
    if size and layers and workload in catalogue.workloads and size not in catalogue.undescribed.get(workload, ()):
        model = find_model(catalogue, workload, str(size))
        if layers != model.layers:
            what = f"size {size} was specified, which has {model.layers} layers, but the log reports {layers}"
            raise UsageError(what, where=str(run.path), do="pass the size of the log's model, or none for a proxy")
    known = {key: value for key, value in run.configuration.items() if key != ARGUMENTS or "workload" not in stated}
    return run.configured({**known, **stated})


def as_catalogued(configuration: Mapping[str, Value], catalogue: Catalogue) -> dict[str, Value]:
    """Return a log's configuration with the catalogue's names and the number of GPUs; nodes are assumed to be full."""
    gpu, nodes = catalogue.gpus.get(str(configuration.get("gpu_type"))), configuration.get("nodes")
    known = dict(configuration)
    if gpu and isinstance(nodes, int):
        known.setdefault("layout.gpus", nodes * gpu.gpus_per_node)
    return known | _catalogued_names(known, catalogue)


def _catalogued_names(configuration: Mapping[str, Value], catalogue: Catalogue) -> dict[str, Value]:
    workload = configuration.get("workload")
    experiment = f"{workload}_{configuration.get('size')}"
    if model := catalogue.bridge.model_of_experiment(experiment):
        return {"workload": model.workload, "size": model.size}
    if not workload or workload in catalogue.workloads:
        return {}
    for name, known in catalogue.workloads.items():
        for size, begin in known.experiments.items():
            if experiment in (begin, f"{known.task}_{known.model}_{size}"):
                return {"workload": name, "size": size}
    return {}


def with_catalogue_figures(runs: Iterable[AnalyzedRun], catalogue: Catalogue) -> list[AnalyzedRun]:
    """Add throughput and MFU to logs; mark logs faster than their GPU can be as invalid."""
    recipes: dict[str | None, Recipe | None] = {}
    found = []
    for run in runs:
        if run.record is None and run.outcome.step_time_s:
            run = run.configured(as_catalogued(run.configuration, catalogue))
            if run.key not in recipes:
                recipes[run.key] = find_recipe(run.configuration, catalogue)
            run = _with_figures(run, recipes[run.key], catalogue)
        found.append(run)
    return found


def if_possible(run: AnalyzedRun, catalogue: Catalogue) -> AnalyzedRun:
    """Return a log's run, as invalid if it is faster than a GPU of its type can be."""
    (found,) = with_catalogue_figures([run], catalogue)
    return run if found.status == run.status else run.invalid(found.outcome.reason)


def find_recipe(configuration: Mapping[str, Value], catalogue: Catalogue, *, own_sizes: bool = False) -> Recipe | None:
    """Return the recipe with the layout of ``configuration`` (with ``own_sizes``, any layout); None without a match."""
    workload, size, dtype, gpu_type, gpus = (configuration.get(key) for key in NEEDED)
    if not (workload and size and dtype and gpu_type and isinstance(gpus, int)) or workload not in catalogue.workloads:
        return None
    request = Request(
        workload=str(workload),
        size=str(size),
        dtype=str(dtype),
        gpu_type=str(gpu_type),
        scale=gpus,
        overrides=Overrides(**_own_sizes(configuration)) if own_sizes else Overrides(),
    )
    recipes = list(_recipes(configuration, request, catalogue, own_sizes=own_sizes))
    return next((recipe for recipe in recipes if recipe.figure), next(iter(recipes), None))


def _recipes(
    configuration: Mapping[str, Value], request: Request, catalogue: Catalogue, *, own_sizes: bool
) -> Iterator[Recipe]:
    release, workload = configuration.get("release"), catalogue.workloads[request.workload]
    newest = [] if own_sizes else reversed(bridge_releases_of(workload, request.size))
    gbs = configuration.get("layout.gbs")
    for name in [None, *newest] if release is None else [str(release)]:
        # The batch size selects between published layouts for one number of GPUs.
        batch = Overrides(gbs=gbs) if isinstance(gbs, int) and name and is_bridge(name) else request.overrides
        for overrides in dict.fromkeys((request.overrides, batch)):
            try:
                recipe = resolve(catalogue, replace(request, release=name, overrides=overrides))
            except LlmbError:
                continue
            if not other_sizes(configuration, recipe) and (overrides == request.overrides or recipe.figure):
                yield recipe


def find_row(configuration: Mapping[str, Value], catalogue: Catalogue) -> PublishedFigure | None:
    """Return the newest figure for a log of a model that the catalogue does not describe, if any."""
    key = tuple(configuration.get(name) for name in NEEDED)
    release = configuration.get("release")
    rows = [
        row
        for row in catalogue.bridge.figures
        if (row.workload, row.size, row.dtype, row.gpu_type, row.gpus) == key
        and release in (None, row.expectation.release)
        and all(configuration.get(f"layout.{name}", size) == size for name, size in row.sizes.items())
    ]
    return rows[-1] if rows else None


def _own_sizes(configuration: Mapping[str, Value]) -> dict[str, Any]:
    sizes = {name: configuration.get(f"layout.{name}") for name in _SIZES}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def other_sizes(configuration: Mapping[str, object], recipe: Recipe) -> dict[str, int]:
    """Return the sizes of the recipe that differ from the configuration's, by configuration key."""
    sizes = {f"layout.{name}": getattr(recipe.layout, name) for name in _SIZES}
    return {key: size for key, size in sizes.items() if configuration.get(key, size) != size}


def _with_figures(run: AnalyzedRun, recipe: Recipe | None, catalogue: Catalogue) -> AnalyzedRun:
    outcome = run.outcome
    if recipe and outcome.step_time_s:
        figures = throughput(recipe, outcome.step_time_s.mean)
        if why := why_too_fast(figures.tflops_per_gpu, figures.peak_tflops):
            return run.invalid(why)
        layout = {f"layout.{name}": getattr(recipe.layout, name) for name in _SIZES}
        assumed: dict[str, Value] = {} if set(BATCH) <= set(run.layout) else {ASSUMED: True}
        known = run.configured({**layout, **run.configuration, **assumed})
        return known.with_figures(figures.mfu_pct, figures.tokens_per_s_per_gpu)
    gpu = catalogue.gpus.get(run.text("gpu_type") or "")
    peak = gpu.peak_tflops.get(run.text("dtype") or "") if gpu else None
    if peak and outcome.tflops_per_gpu:
        if why := why_too_fast({LOGGED: outcome.tflops_per_gpu.mean}, peak):
            return run.invalid(why)
        return run.with_figures({LOGGED: 100 * outcome.tflops_per_gpu.mean / peak}, None)
    return run
