# SPDX-License-Identifier: Apache-2.0
"""``llmb show``."""

import typer

from llmb.catalogue.job_defaults import job_defaults
from llmb.catalogue.load import Catalogue
from llmb.catalogue.resolve import Request, resolve
from llmb.cli.json_option import Json
from llmb.cli.options import takes_recipe
from llmb.report.output import print_json, print_table
from llmb.report.recipe_report import recipe_document, recipe_tables

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
@takes_recipe
def show(
    request: Request,
    json: Json = False,
) -> None:
    """One recipe, fully resolved: model, layout, FLOPs, published figures and job resources.

    Examples:

    - `llmb show -w pretrain_llama3.1 -s 405b --scale 576 --release 24.11`

    - `llmb show -w pretrain_nemotron4 -s 15b --dtype fp8 --scale 64 --json`
    """
    catalogue = Catalogue()
    recipe = resolve(catalogue, request)
    job = job_defaults(catalogue, recipe)
    if json:
        print_json(recipe_document(recipe, job))
    else:
        for table in recipe_tables(recipe, job):
            print_table(table)
