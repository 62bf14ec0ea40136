# SPDX-License-Identifier: Apache-2.0
"""A table as data, and as plain lines. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from unicodedata import combining, east_asian_width

GAP = "  "


@dataclass(slots=True)
class Column:
    """A column of numbers stands on the right. On a narrow terminal columns that may ``wrap`` give way."""

    header: str
    right: bool = False
    wrap: bool = True
    min_width: int | None = None


@dataclass(slots=True)
class Table:
    """Cells are plain text: nothing in them is markup."""

    title: str
    columns: list[Column]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str | None = None

    def add_row(self, *cells: str) -> None:
        """Columns without a cell stay empty; a row with more cells than columns adds columns without a header."""
        self.columns += [Column("") for _ in cells[len(self.columns) :]]
        self.rows.append(cells)


def plain_lines(table: Table) -> Iterator[str]:
    """The table as wide as it needs to be."""
    rows = [tuple(column.header for column in table.columns), *table.rows]
    widths = [max(map(_width, column)) for column in zip_longest(*rows, fillvalue="")]
    yield table.title
    for row in rows:
        cells = [cell.split("\n") for cell in row]
        for parts in zip_longest(*cells, fillvalue=""):
            placed = zip(parts, widths, table.columns, strict=False)
            yield GAP.join(_aligned(part, width, right=column.right) for part, width, column in placed).rstrip()
    if table.caption:
        yield table.caption


def _width(cell: str) -> int:
    """Columns of a terminal."""
    return max(len(line) if line.isascii() else sum(map(_letter_width, line)) for line in cell.split("\n"))


def _letter_width(letter: str) -> int:
    return 0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1


def _aligned(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - _width(text))
    return space + text if right else text + space
