# SPDX-License-Identifier: Apache-2.0
"""Writes results to standard output; the only module that does."""

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
    """Prints one strictly valid JSON document; raises an error for a value that JSON cannot represent."""
    print_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal, or as wide as needed if the output is not a terminal."""
    terminal = sys.stdout.isatty()
    text = StringIO()
    width = shutil.get_terminal_size().columns if terminal else WIDEST
    Console(file=text, force_terminal=terminal, width=width, highlight=False).print(table)
    print_text("".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines()))


def print_text(text: str) -> None:
    """Raises EnvironmentProblem if standard output cannot be written, such as a file on a full disk."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise EnvironmentProblem(f"cannot write the result: {error.strerror}", where="standard output") from error


def printable(text: object) -> str:
    """Text from a file, safe for a terminal: control characters become question marks."""
    return CONTROL.sub("?", str(text))


def result_table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the common style; ``right`` names the columns of numbers, which are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table
