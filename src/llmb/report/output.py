# SPDX-License-Identifier: Apache-2.0
"""Writes results to standard output; the only module that does."""

import json
import re
import shutil
import sys
from io import StringIO
from typing import Any

from llmb.errors import EnvironmentProblem
from llmb.report.table import Column, Table, plain_lines

CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def print_json(document: Any) -> None:  # noqa: ANN401 (any JSON value)
    """Prints one strictly valid JSON document; raises an error for a value that JSON cannot represent."""
    print_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal, or as wide as needed if the output is not a terminal."""
    lines = styled_lines(table, shutil.get_terminal_size().columns) if sys.stdout.isatty() else plain_lines(table)
    print_text("".join(f"{line}\n" for line in lines))


def print_line(text: str) -> None:
    """Prints a line, wrapped between words on a terminal."""
    if sys.stdout.isatty():
        from textwrap import fill  # few outputs have such a line

        text = fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)
    print_text(f"{text}\n")


def styled_lines(table: Table, width: int) -> list[str]:
    """Lines for a terminal of ``width`` columns: cells that do not fit are wrapped, titles are bold."""
    from rich import console, text
    from rich import table as rich_table

    drawn = rich_table.Table(
        title=text.Text(table.title),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=None,
        pad_edge=False,
        caption=text.Text(table.caption) if table.caption else None,
        caption_justify="left",
    )
    for column in table.columns:
        drawn.add_column(
            text.Text(column.header),
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=not column.wrap,
            min_width=column.min_width,
            max_width=column.max_width,
        )
    for row in table.rows:
        drawn.add_row(*map(text.Text, row))
    written = StringIO()
    console.Console(file=written, force_terminal=True, width=width, highlight=False).print(drawn)
    return [line.rstrip() for line in written.getvalue().splitlines()]


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
    return Table(title, [Column(name, right=name in right) for name in columns])
