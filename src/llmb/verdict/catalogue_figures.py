# SPDX-License-Identifier: Apache-2.0
"""What the catalogue knows of logs without a record: throughput and MFU of the recipe that they are of."""

from collections.abc import Iterable, Mapping

from llmb.base.errors import LlmbError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import PARALLEL, Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.throughput import throughput, why_too_fast
from llmb.runs.analyzed_run import ASSUMED, BATCH, LOGGED, AnalyzedRun
from llmb.runs.identity import Value

NEEDED = ("workload", "size", "dtype", "gpu_type", "layout.gpus")
"""What a log has to tell so that its recipe is known."""
_SIZES = (*PARALLEL, *BATCH, "seq_len", "layers")


def with_gpu_type(runs: Iterable[AnalyzedRun], gpu_type: str) -> list[AnalyzedRun]:
    """``gpu_type`` is that of runs that do not tell."""
    return [
        run
        if run.text("gpu_type") or not run.configuration
        else run.configured({**run.configuration, "gpu_type": gpu_type})
        for run in runs
    ]


def as_catalogued(configuration: Mapping[str, Value], catalogue: Catalogue) -> dict[str, Value]:
    """A log's configuration with the catalogue's names of its workload and size, and the GPUs of its nodes.

    If nothing else tells how many GPUs there are, they are all that nodes with that GPU type have.
    """
    gpu, nodes = catalogue.gpus.get(str(configuration.get("gpu_type"))), configuration.get("nodes")
    known = dict(configuration)
    if gpu and isinstance(nodes, int):
        known.setdefault("layout.gpus", nodes * gpu.gpus_per_node)
    return known | _catalogued_names(known, catalogue)


def _catalogued_names(configuration: Mapping[str, Value], catalogue: Catalogue) -> dict[str, Value]:
    workload = configuration.get("workload")
    if not workload or workload in catalogue.workloads:
        return {}
    experiment = f"{workload}_{configuration.get('size')}"
    for name, known in catalogue.workloads.items():
        for size, begin in known.experiments.items():
            if experiment in (begin, f"{known.task}_{known.model}_{size}"):
                return {"workload": name, "size": size}
    return {}


def with_catalogue_figures(runs: Iterable[AnalyzedRun], catalogue: Catalogue) -> list[AnalyzedRun]:
    """Logs of a recipe of the catalogue get its figures; for others, the FLOP rate that they print gives an MFU."""
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


def if_possible(run: AnalyzedRun, catalogue: Catalogue, gpu_type: str | None = None) -> AnalyzedRun:
    """A log's run as it is; invalid if a GPU of its type, or of ``gpu_type`` if it does not tell, is not so fast."""
    (told,) = with_gpu_type([run], gpu_type) if gpu_type else (run,)
    (found,) = with_catalogue_figures([told], catalogue)
    return run if found.status == run.status else run.invalid(found.outcome.reason)


def find_recipe(configuration: Mapping[str, Value], catalogue: Catalogue) -> Recipe | None:
    """The recipe with the layout of a configuration, whose keys are those of a run's identity; None if the catalogue
    has none, or the configuration does not tell enough."""
    workload, size, dtype, gpu_type, gpus = (configuration.get(key) for key in NEEDED)
    if not (workload and size and dtype and gpu_type and isinstance(gpus, int)) or workload not in catalogue.workloads:
        return None
    release = configuration.get("release")
    request = Request(
        workload=str(workload),
        size=str(size),
        dtype=str(dtype),
        gpu_type=str(gpu_type),
        scale=gpus,
        release=None if release is None else str(release),
    )
    try:
        recipe = resolve(catalogue, request)
    except LlmbError:
        return None
    return recipe if has_layout(configuration, recipe) else None


def has_layout(configuration: Mapping[str, object], recipe: Recipe) -> bool:
    """Whether every size that is known is the recipe's."""
    return not other_sizes(configuration, recipe)


def other_sizes(configuration: Mapping[str, object], recipe: Recipe) -> dict[str, int]:
    """The recipe's sizes that a configuration has another value of, by its keys."""
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
