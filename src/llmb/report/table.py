# SPDX-License-Identifier: Apache-2.0
"""A table as data, and as plain lines. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from unicodedata import combining, east_asian_width

GAP = "  "


@dataclass(slots=True)
class Column:
    """Columns of numbers are right-aligned. On a narrow terminal, columns with ``wrap`` are shortened."""

    header: str
    right: bool = False
    wrap: bool = True
    min_width: int | None = None
    max_width: int | None = None
    """Wider cells are always wrapped."""


@dataclass(slots=True)
class Table:
    """Cells are plain text, never markup."""

    title: str
    columns: list[Column]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str | None = None

    def add_row(self, *cells: str) -> None:
        """Columns without a cell stay empty; a row with more cells than columns adds columns without a header."""
        self.columns += [Column("") for _ in cells[len(self.columns) :]]
        self.rows.append(cells)


def plain_lines(table: Table) -> Iterator[str]:
    """The table as plain lines, as wide as needed."""
    headers = tuple(column.header for column in table.columns)
    rows = [[_lines(*item) for item in zip(row, table.columns, strict=False)] for row in (headers, *table.rows)]
    widths = [max(_width(line) for cell in cells for line in cell) for cells in zip_longest(*rows, fillvalue=("",))]
    yield table.title
    for row in rows:
        for parts in zip_longest(*row, fillvalue=""):
            placed = zip(parts, widths, table.columns, strict=False)
            yield GAP.join(_aligned(part, width, right=column.right) for part, width, column in placed).rstrip()
    if table.caption:
        yield table.caption


def _lines(cell: str, column: Column) -> list[str]:
    lines = cell.split("\n")
    if column.max_width is None or max(map(_width, lines)) <= column.max_width:
        return lines
    from textwrap import wrap

    return [part for line in lines for part in wrap(line, column.max_width, break_on_hyphens=False) or [""]]


def _width(line: str) -> int:
    """Width in terminal columns."""
    return len(line) if line.isascii() else sum(map(_letter_width, line))


def _letter_width(letter: str) -> int:
    return 0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1


def _aligned(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
