# SPDX-License-Identifier: Apache-2.0
"""The one place that writes results to standard output."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

WIDEST = 10_000


def print_json(document: Any) -> None:  # noqa: ANN401 (any JSON value)
    """Prints one strictly valid JSON document; a value that JSON cannot hold is an error."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal; into a pipe, as wide as it needs to be, so that nothing is cut."""
    wide = None if sys.stdout.isatty() else WIDEST
    Console(highlight=False, width=wide).print(table)


def result_table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the one style of all results; ``right`` names the columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
