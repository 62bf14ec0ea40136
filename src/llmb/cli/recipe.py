# SPDX-License-Identifier: Apache-2.0
"""``llmb list``, ``llmb show`` and ``llmb metrics``: print recipes of the catalogue, and throughput by step time."""

from dataclasses import asdict
from itertools import chain
from typing import Annotated

import typer

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue, job_defaults
from llmb.catalogue.model_name import split_model
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import ModelRequest, all_scales, resolve
from llmb.catalogue.schema import WorkloadFile
from llmb.catalogue.throughput import throughput, why_too_fast
from llmb.cli.common import Json
from llmb.cli.root import install_here, print_for_recipe
from llmb.cli.shared_options import COMPLETIONS, catalogue_for, only_value, recipe_options, takes
from llmb.readers.contradictions import LONGEST_STEP_S, SHORTEST_STEP_S
from llmb.reports.output import print_output
from llmb.reports.recipe_report import (
    identity_document,
    list_document,
    list_table,
    recipe_document,
    recipe_tables,
    scales_document,
    scales_table,
    throughput_table,
)
from llmb.runs.checkpoints.origin import OriginHere, random_and_synthetic
from llmb.runs.planning import origin_here

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command("list")
def list_(
    place: Annotated[
        str | None,
        typer.Argument(metavar="WORKLOAD", help="The same as --workload.", autocompletion=COMPLETIONS["workload"]),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option(
            "-w", "--workload", help="List only this workload. Default: all.", autocompletion=COMPLETIONS["workload"]
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List the workloads, sizes, dtypes, GPU types and scales of the catalogue.

    Scales in parentheses are proxies: models with fewer layers, which fit on few GPUs. A plus sign means that doublings
    of the largest scale are also available.

    Examples:

    - `llmb list`

    - `llmb list -w pretrain_nemotron4 --json`
    """
    catalogue, name = Catalogue(), only_value("workload", place, workload)
    chosen = [_chosen(catalogue, name.lower())] if name else list(catalogue.workloads.values())
    print_output(list_document(chosen) if json else list_table(chosen, catalogue.gpus, catalogue.undescribed_text))


def _chosen(catalogue: Catalogue, name: str) -> WorkloadFile:
    workload, size = split_model(catalogue, name)
    found = catalogue.workloads[workload]
    layouts = tuple(table for table in found.layouts if size in (None, table.size))
    return found.model_copy(update={"layouts": layouts})


@app.command()
@takes(recipe_options())
def show(
    request: ModelRequest,
    all_scales: Annotated[
        bool,
        typer.Option("--all-scales", help="Show layouts and published figures at every scale, in a table per dtype."),
    ] = False,
    json: Json = False,
) -> None:
    """Show one recipe in full: model, layout, FLOPs, published figures and job resources.

    Examples:

    - `llmb show -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11`

    - `llmb show -w pretrain_nemotron4 -s 15b --dtype fp8 --scale 64 --json`

    - `llmb show -w pretrain_llama3.1 -s 70b --all-scales`

    - `llmb show --model-config config.json`
    """
    catalogue = catalogue_for(request)
    if all_scales:
        _show_scales(catalogue, request, json=json)
        return
    recipe = resolve(catalogue, request)
    job = job_defaults(catalogue, recipe)
    found = _origin(catalogue, recipe)
    shown = recipe_document(recipe, job, found) if json else recipe_tables(recipe, job, found)
    print_for_recipe(recipe, shown)


def _origin(catalogue: Catalogue, recipe: Recipe) -> OriginHere:
    if recipe.task == "pretrain":
        return OriginHere(origin=random_and_synthetic(recipe.training))
    return origin_here(catalogue, install_here(), recipe)


def _show_scales(catalogue: Catalogue, request: ModelRequest, *, json: bool) -> None:
    by_dtype = all_scales(catalogue, request).values()
    recipes = list(chain.from_iterable(by_dtype))
    print_for_recipe(recipes[0], scales_document(recipes) if json else map(scales_table, by_dtype))


@app.command()
@takes(recipe_options())
def metrics(
    request: ModelRequest,
    step_time: Annotated[float, typer.Option("--step-time", help="Seconds per training step.")],
    json: Json = False,
) -> None:
    """Compute throughput, TFLOPS per GPU, MFU and time to train from a step time.

    MFU is printed for each FLOP convention: 'published' counts FLOPs as the reference document does, 'full' counts the
    full attention matrix, 'causal' only the half that is needed.

    Example:

    - `llmb metrics -w pretrain_llama3.1 -s 8b --scale 8 --gpu-type h100 --step-time 12.27`
    """
    if not SHORTEST_STEP_S < step_time < LONGEST_STEP_S:
        limits = f"above {SHORTEST_STEP_S:g} and below {LONGEST_STEP_S:g}"
        raise UsageError(f"--step-time is {step_time}; it must be {limits}", do="pass seconds per step, such as 2.5")
    recipe = resolve(catalogue_for(request), request)
    result = throughput(recipe, step_time)
    if why := why_too_fast(result.tflops_per_gpu, result.peak_tflops):
        raise UsageError(
            f"no step of {recipe.title()} can take {step_time:g} s: {why}", do="pass another --step-time or recipe"
        )
    document = {**identity_document(recipe), "step_time_s": step_time, **asdict(result)}
    shown = document if json else throughput_table(recipe, step_time, result)
    print_for_recipe(recipe, shown)
