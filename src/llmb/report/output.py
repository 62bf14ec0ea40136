# SPDX-License-Identifier: Apache-2.0
"""The one place that writes results to standard output."""

import json
import re
import shutil
import sys
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from llmb.errors import EnvironmentProblem

WIDEST = 10_000
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def print_json(document: Any) -> None:  # noqa: ANN401 (any JSON value)
    """Prints one strictly valid JSON document; a value that JSON cannot hold is an error."""
    print_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal; into a pipe, as wide as it needs to be, so that nothing is cut."""
    terminal = sys.stdout.isatty()
    text = StringIO()
    width = shutil.get_terminal_size().columns if terminal else WIDEST
    Console(file=text, force_terminal=terminal, width=width, highlight=False).print(table)
    print_text("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def print_text(text: str) -> None:
    """Raises EnvironmentProblem where standard output takes no more, such as a file on a full disk."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the result: {error.strerror}", where="standard output") from error


def printable(text: object) -> str:
    """What a file says, safe for a terminal: control characters become question marks."""
    return CONTROL.sub("?", str(text))


def result_table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the one style of all results; ``right`` names the columns of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
