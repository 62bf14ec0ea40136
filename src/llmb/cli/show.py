# SPDX-License-Identifier: Apache-2.0
"""``llmb show``."""

from typing import Annotated

import typer

from llmb.catalogue.job_defaults import job_defaults
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request, resolve
from llmb.catalogue.scales import all_scales
from llmb.checkpoints.origin import OriginHere, random_and_synthetic
from llmb.cli.json_option import Json
from llmb.cli.messages import print_unspecified
from llmb.cli.options import takes_recipe
from llmb.cli.root import install_here
from llmb.report.output import print_json, print_tables
from llmb.report.recipe_report import recipe_document, recipe_tables, scales_document, scales_table
from llmb.runs.planning import origin_here

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes_recipe
def show(
    request: Request,
    all_scales: Annotated[
        bool,
        typer.Option("--all-scales", help="The layout and the published figures at every scale, in one table."),
    ] = False,
    json: Json = False,
) -> None:
    """One recipe, fully resolved: model, layout, FLOPs, published figures and job resources.

    Examples:

    - `llmb show -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11`

    - `llmb show -w pretrain_nemotron4 -s 15b --dtype fp8 --scale 64 --json`

    - `llmb show -w pretrain_llama3.1 -s 70b --all-scales`
    """
    catalogue = Catalogue()
    if all_scales:
        _show_scales(catalogue, request, json=json)
        return
    recipe = resolve(catalogue, request)
    job = job_defaults(catalogue, recipe)
    found = _origin(catalogue, recipe)
    if json:
        print_json(recipe_document(recipe, job, found))
    else:
        print_unspecified(recipe.unspecified)
        print_tables(recipe_tables(recipe, job, found))


def _origin(catalogue: Catalogue, recipe: Recipe) -> OriginHere:
    if recipe.task == "pretrain":
        return OriginHere(origin=random_and_synthetic(recipe.training))
    return origin_here(catalogue, install_here(), recipe)


def _show_scales(catalogue: Catalogue, request: Request, *, json: bool) -> None:
    recipes = all_scales(catalogue, request)
    if json:
        print_json(scales_document(recipe for listed in recipes.values() for recipe in listed))
    else:
        first = next(recipe for listed in recipes.values() for recipe in listed)
        print_unspecified(first.unspecified)
        print_tables(map(scales_table, recipes.values()))
