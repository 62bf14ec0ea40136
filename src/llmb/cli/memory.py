# SPDX-License-Identifier: Apache-2.0
"""``llmb memory``."""

from functools import partial
from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import CPU, Request, resolve
from llmb.cli.common import Json
from llmb.cli.options import recipe_options, record_options, takes
from llmb.cli.root import print_for_recipe, say
from llmb.predict.memory import estimate, with_whole_parameters
from llmb.predict.prediction import predicted_seconds
from llmb.predict.remedies import remedies
from llmb.programs.engine.memory_check import count_ranks
from llmb.report.memory_report import memory_document, memory_tables
from llmb.runs.choices import Choices
from llmb.runs.plan import make_plan
from llmb.runs.rank_account import asked_ranks

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes(recipe_options(), record_options(Choices))
def memory(
    request: Request,
    choices: Choices,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Count this rank alone.")] = None,
    all_stages: Annotated[
        bool, typer.Option("--all-stages", help="Count one rank of every stage of the pipeline.")
    ] = False,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Estimate the memory at once, instead of counting it.")
    ] = False,
    json: Json = False,
) -> None:
    """The memory, FLOPs and collectives of a rank in a training step, before anything is queued.

    The engine's own step runs without values, on this machine's CPU and in a minute or so, whatever the layout. By
    default those ranks are counted among which the fullest is. With `--estimate` their memory follows from the sizes
    of the model's parts, in milliseconds and within a few percent. If they do not fit, up to three changes are named
    with which the estimate says that they do, and what each costs.

    Examples:

    - `llmb memory -w pretrain_llama3.1 -s 8b --scale 8 --gpu-type h100`

    - `llmb memory -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --all-stages --json`

    - `llmb memory -w pretrain_llama3.1 -s 405b --scale 512 --gpu-type h100 --estimate --recompute selective`

    - `llmb memory -w pretrain_llama3.1 -s 70b --scale 64 --gpu-type h100 --tp 8 --recompute selective`
    """
    catalogue = Catalogue()
    recipe = resolve(catalogue, request)
    plan = make_plan(recipe, choices, device="cpu" if recipe.gpu_type == CPU else "cuda")
    plan = plan if choices.parallelism.dp_sharding else with_whole_parameters(plan)
    ranks = asked_ranks(recipe.layout, rank, all_stages=all_stages)
    use = estimate(plan, ranks) if estimated else count_ranks(plan, ranks, say)
    found = remedies(plan, partial(predicted_seconds, catalogue)) if use.fits is False else []
    shown = memory_document(recipe, use, found) if json else memory_tables(recipe, use, found)
    print_for_recipe(recipe.unspecified, shown)
