# SPDX-License-Identifier: Apache-2.0
"""``llmb list``: what the catalogue has."""

from typing import Annotated

import typer

from llmb.catalogue.load import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.schema import WorkloadFile
from llmb.cli.common import Json
from llmb.cli.completion import workloads
from llmb.cli.options import given_once
from llmb.report.output import print_output
from llmb.report.recipe_report import list_document, list_table

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command("list")
def list_(
    place: Annotated[
        str | None, typer.Argument(metavar="WORKLOAD", help="The same as --workload.", autocompletion=workloads)
    ] = None,
    workload: Annotated[
        str | None, typer.Option("-w", "--workload", help="Only this workload. Default: all.", autocompletion=workloads)
    ] = None,
    json: Json = False,
) -> None:
    """Workloads, sizes, dtypes, GPU types and scales of the catalogue.

    Scales in brackets are proxies: models with fewer layers, which fit few GPUs. A plus sign means that doublings of
    the largest scale are also available.

    Examples:

    - `llmb list`

    - `llmb list -w pretrain_nemotron4 --json`
    """
    catalogue, name = Catalogue(), given_once("workload", place, workload)
    chosen = [_chosen(catalogue, name.lower())] if name else list(catalogue.workloads.values())
    print_output(list_document(chosen) if json else list_table(chosen, catalogue.gpus))


def _chosen(catalogue: Catalogue, name: str) -> WorkloadFile:
    """A workload, with only one of its sizes if ``name`` ends in it."""
    workload, size = split_model(catalogue, name)
    found = catalogue.workloads[workload]
    layouts = tuple(table for table in found.layouts if size in (None, table.size))
    return found.model_copy(update={"layouts": layouts})
