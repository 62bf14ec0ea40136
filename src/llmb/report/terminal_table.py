# SPDX-License-Identifier: Apache-2.0
"""Tables as a terminal shows them: which columns it has room for, and how wide they are. Rich draws them."""

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from llmb.report.table import GAP, Column, Table
from llmb.shown_text import printable_lines

LONGEST_LABEL = 40
"""A first column up to this width is not wrapped, unless it is not a label."""
LEAST_LAST = 16
"""A last column as narrow as this is still read; names in it may be broken."""
MOST_LINES = 10**6
"""Any height: without one, rich takes a terminal without styles for one of 80 columns."""


def terminal_lines(table: Table, width: int) -> list[str]:
    """Lines of at most ``width``, where title and headers are bold.

    Cells are wrapped between words. Where that is not enough, columns are left out; where that is not enough either,
    names are broken.
    """
    droppable = sorted((column for column in table.columns if column.drop), key=lambda column: column.drop)
    for count in range(len(droppable) + 1):
        left_out = droppable[:count]
        part = table.without(left_out)
        if widths := fitting_widths(part, width):
            break
    else:
        part, left_out, widths = table, [], None
    no_styles = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colors: Literal["standard"] | None = None if no_styles else "standard"
    console = Console(width=width, height=MOST_LINES, force_terminal=True, color_system=colors)
    with console.capture() as capture:
        console.print(Text(printable_lines(table.title), "bold"))
        console.print(_drawn(part, widths))
        if left_out:
            names = ", ".join(column.header for column in left_out)
            console.print(Text(f"without {names}, for which the terminal is too narrow"))
        if table.caption:
            console.print(Text(printable_lines(table.caption)))
    return [line.rstrip() for line in capture.get().split("\n")[:-1]]


def _drawn(table: Table, widths: Sequence[int] | None) -> RichTable:
    has_headers = any(column.header for column in table.columns)
    drawn = RichTable(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, show_header=has_headers)
    for place, column in enumerate(table.columns):
        width = widths[place] if widths else None
        drawn.add_column(Text(column.header), justify="right" if column.right else "left", overflow="fold", width=width)
    for row in table.rows:
        drawn.add_row(*(Text(printable_lines(cell)) for cell in row))
    return drawn


def fitting_widths(table: Table, width: int) -> list[int] | None:
    """Widths that break no word; None if there are none. A last column that is text may break the longest words."""
    columns = table.columns
    texts = list(zip_longest((column.header for column in columns), *table.rows, fillvalue=""))
    shown = [[printable_lines(text) for text in cells] for cells in texts]
    widths = [min(width, _natural(column, cells)) for column, cells in zip(columns, shown, strict=True)]
    least = [_least(column, cells, most) for column, cells, most in zip(columns, shown, widths, strict=True)]
    if widths[0] <= LONGEST_LABEL and columns[0].label:
        least[0] = widths[0]
    available = width - len(GAP) * (len(columns) - 1)
    if not columns[-1].right:
        rest = available - sum(least[:-1])
        least[-1] = min(least[-1], max(rest, columns[-1].min_width or LEAST_LAST))
    return None if sum(least) > available else _shrunk(widths, least, available)


def _shrunk(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """The widest column that can is made narrower, until all fit."""
    widths = list(natural)
    while sum(widths) > available:
        widest = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


def _natural(column: Column[Any], cells: Iterable[str]) -> int:
    longest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
    return min(longest, column.max_width or longest)


def _least(column: Column[Any], cells: Iterable[str], natural: int) -> int:
    if not column.wrap:
        return natural
    return max(column.min_width or 0, *(cell_len(word) for cell in cells for word in cell.split()), 0)
