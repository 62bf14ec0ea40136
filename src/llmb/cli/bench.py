# SPDX-License-Identifier: Apache-2.0
"""``llmb bench``."""

from typing import Annotated

import typer

from llmb.cli.group import Group
from llmb.cli.json_option import Json
from llmb.cli.root import install_here
from llmb.health.kept_measurements import bench_folder, read_measurements
from llmb.report.bench_report import history_document, history_table
from llmb.report.output import print_json, print_table

app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode="markdown", no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Speed of this machine's parts, each alone."""


@app.command("list")
def list_(
    node: Annotated[str | None, typer.Option("--node", help="Only this node.")] = None,
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", help="Only this benchmark, such as gemm or memory.")
    ] = None,
    json: Json = False,
) -> None:
    """What was measured on each node, and the change against the previous measurement of the same case.

    Examples:

    - `llmb bench list`

    - `llmb bench list --node node-17 --benchmark gemm`
    """
    install = install_here()
    kept = read_measurements(install, node)
    if json:
        print_json(history_document(kept, benchmark))
    else:
        print_table(history_table(kept, benchmark, bench_folder(install)))
