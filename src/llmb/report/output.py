# SPDX-License-Identifier: Apache-2.0
"""The one place that writes results to standard output."""

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
    """Prints one strictly valid JSON document; a value that JSON cannot hold is an error."""
    print_text(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal; into a pipe, as wide as it needs to be, so that nothing is cut."""
    lines = styled_lines(table, shutil.get_terminal_size().columns) if sys.stdout.isatty() else plain_lines(table)
    print_text("".join(f"{line}\n" for line in lines))


def styled_lines(table: Table, width: int) -> list[str]:
    """For a terminal of so many columns: what does not fit is folded, titles are bold."""
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
    return Table(title, [Column(name, right=name in right) for name in columns])
