# SPDX-License-Identifier: Apache-2.0
"""Tables of columns and rows as lines, CSV, Markdown and HTML, and documents of their values."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from itertools import product, zip_longest
from typing import Any, Generic, Literal, TypeVar

from pydantic_core import to_jsonable_python
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from llmb.base.missing import Missing
from llmb.base.shown_text import csv_value, printable, printable_lines
from llmb.reports.formats import as_text, cell, number, whole

GAP = "  "


@cache
def getter(path: str) -> Callable[[Any], Any]:
    """Return a function that gets the value at a path of record fields, mapping keys and tuple indexes.

    The function returns None if a value on the path is None or Missing.
    """
    names = path.split(".")

    def value_of(value: Any) -> Any:  # noqa: ANN401 (a value of any kind of record)
        for name in names:
            if value is None or isinstance(value, Missing):
                return None
            if isinstance(value, dict):
                value = value.get(name)
            elif name.isdecimal():
                value = value[int(name)] if int(name) < len(value) else None
            else:
                value = getattr(value, name)
        return None if isinstance(value, Missing) else value

    return value_of


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Return values of a record for a document, each named by the end of its path, or by the text before a colon."""
    return {name: getter(path)(record) for name, path in _named(names)}


def _named(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for text in names:
        name, is_renamed, path = text.partition(": ")
        yield (name, path) if is_renamed else (text.rpartition(".")[2], text)


Row = TypeVar("Row")
_NOTHING = {"", number(None)}


@dataclass(slots=True)
class Column(Generic[Row]):
    """A column that shows each row's ``value`` (a path or a function), formatted by ``form``.

    Columns of numbers are right-aligned. On a narrow terminal, columns with ``wrap`` are wrapped between words.
    """

    header: str
    value: Callable[[Row], Any] | str = str
    form: Callable[[Any], str] = as_text
    right: bool = False
    wrap: bool = True
    optional: bool = False
    """True to omit the column if no row has a value."""
    common: bool = False
    """True to move the value to the title if all rows have the same value."""
    min_width: int | None = None
    max_width: int | None = None
    """The width at which cells are wrapped on every terminal."""
    drop: int = 0
    """The column's place in the order of omission on a narrow terminal; 0 for a column that is never omitted."""
    label: bool = True
    """True for a label: as the first column, it is wrapped only if it is very wide."""
    kind: type = str
    """The type of the column's values in files with typed columns."""
    of: Callable[[Row], Any] = field(init=False, repr=False)
    """The function that gets a row's value."""

    def __post_init__(self) -> None:
        self.right = self.right or self.form in (number, cell, whole)
        self.of = getter(self.value) if isinstance(self.value, str) else self.value


@dataclass(slots=True)
class Table:
    """A table of plain-text cells without markup."""

    title: str
    columns: list[Column[Any]]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str | None = None

    def add_row(self, *cells: str) -> None:
        """Add a row. Missing cells are empty; surplus cells add columns without a header."""
        self.columns += [Column("") for _ in cells[len(self.columns) :]]
        self.rows.append(cells)

    def without(self, columns: Sequence[Column[Any]]) -> "Table":
        kept = [place for place, column in enumerate(self.columns) if not any(column is one for one in columns)]
        rows = [tuple(row[place] for place in kept if place < len(row)) for row in self.rows]
        return Table(self.title, [self.columns[place] for place in kept], rows, self.caption)


def table_of(
    title: str,
    rows: Iterable[Row],
    columns: Iterable[Column[Row]],
    *,
    caption: str | Iterable[str] = (),
    drop_empty: bool = False,
) -> Table:
    """Return a table of ``rows``. With ``drop_empty``, every column is optional."""
    listed = list(rows)
    shown: list[tuple[Column[Any], list[str]]] = []
    for column in columns:
        cells = [column.form(column.of(row)) for row in listed]
        if column.common and len({*cells}) == 1:
            title = ", ".join(filter(None, (title, printable(cells[0]))))
        elif not (column.optional or drop_empty) or not {*cells} <= _NOTHING:
            shown.append((replace(column), cells))
    lines = list(zip(*(cells for _, cells in shown), strict=True))
    return Table(title, [column for column, _ in shown], lines, _caption(caption))


def _caption(lines: str | Iterable[str]) -> str | None:
    return (lines if isinstance(lines, str) else "\n".join(lines)) or None


def rows_table(
    title: str,
    headers: Sequence[str],
    rows: Iterable[tuple[str, ...]] = (),
    *,
    right: Sequence[str] = (),
    caption: str | Iterable[str] = (),
) -> Table:
    """Return a table of rows, which may be shorter than ``headers``; ``right`` are the headers of number columns."""
    table = Table(title, [Column(name, right=name in right) for name in headers], caption=_caption(caption))
    for row in rows:
        table.add_row(*row)
    return table


def facts_table(title: str, facts: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values, without values that are None."""
    return rows_table(title, ("", ""), ((name, str(value)) for name, value in facts if value is not None))


def texts(*names: str, form: Callable[[Any], str] = as_text, **options: Any) -> list[Column[Any]]:  # noqa: ANN401
    """Return columns of text; each header is the end of the value's path, or the text before a colon."""
    return [Column(header, path, form, **options) for header, path in _named(names)]


def numbers(*names: str, form: Callable[[Any], str] = number, **options: Any) -> list[Column[Any]]:  # noqa: ANN401
    """Return columns of numbers, with headers as in ``texts``."""
    return texts(*names, form=form, right=True, **options)


def csv_text(columns: Sequence[Column[Row]], rows: Iterable[Row]) -> str:
    lines = io.StringIO()
    write_csv_rows(lines, columns, rows)
    return lines.getvalue()


def write_csv_rows(file: io.TextIOBase, columns: Sequence[Column[Row]], rows: Iterable[Row]) -> None:
    """Write a line of headers and one line per row, with unformatted values; an unknown value is an empty field."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([column.header for column in columns])
    writer.writerows([csv_value(column.of(row)) for column in columns] for row in rows)


class Shown:
    """A result that a notebook shows as tables."""

    __slots__ = ()

    def tables(self) -> Iterable[Table]:
        """Return the tables that the corresponding command prints."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Return the document that the command prints, which may contain records."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document that the command prints."""
        plain: dict[str, Any] = to_jsonable_python(self.document())
        return plain

    def __str__(self) -> str:
        return "\n\n".join("\n".join(plain_lines(table)) for table in self.tables())

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self.tables()))


def html_table(table: Table) -> str:
    """Format the table for a notebook, with title and caption."""
    sides = ["right" if column.right else "left" for column in table.columns]
    headers = "".join(
        f'<th style="text-align:{side}">{escape(column.header)}</th>'
        for side, column in zip(sides, table.columns, strict=True)
    )
    rows = (
        "".join(
            f'<td style="text-align:{side}">{escape(printable(cell))}</td>'
            for side, cell in zip_longest(sides, row, fillvalue="")
        )
        for row in table.rows
    )
    title = f"<p><b>{_html_lines(table.title)}</b></p>" if table.title else ""
    caption = f"<p>{_html_lines(table.caption)}</p>" if table.caption else ""
    return f"{title}<table><tr>{headers}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>{caption}"


def _html_lines(text: str) -> str:
    return "<br>".join(escape(printable(line)) for line in text.split("\n"))


def markdown_table(table: Table) -> str:
    """Format the table as Markdown, without its title and caption."""
    rules = ["---:" if column.right else "---" for column in table.columns]
    rows = [[column.header for column in table.columns], rules, *(map(markdown_text, row) for row in table.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def markdown_text(text: str) -> str:
    """Escape a string for Markdown, on one line."""
    for letter in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")


def plain_lines(table: Table) -> Iterator[str]:
    """Yield the lines of the table in its full width."""
    rows = [[printable_lines(cell).split("\n") for cell in row] for row in table.rows]
    if any(headers := [column.header for column in table.columns]):
        rows.insert(0, [[header] for header in headers])
    columns = zip_longest(*rows, fillvalue=[""])
    widths = [max(cell_len(line) for lines in cells for line in lines) for cells in columns]
    yield from printable_lines(table.title).split("\n")
    for row in rows:
        for parts in zip_longest(*row, fillvalue=""):
            placed = zip(parts, widths, table.columns, strict=False)
            yield GAP.join(_aligned(part, width, right=column.right) for part, width, column in placed).rstrip()
    if table.caption:
        yield from printable_lines(table.caption).split("\n")


def _aligned(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


LONGEST_LABEL = 40
"""A first column up to this width is not wrapped, unless it is not a label."""
LEAST_LAST = 16
"""The smallest readable width of a last column; names in it may be broken."""
LEAST_MEAN = 8
"""The smallest readable mean width of columns."""
MOST_LINES = 10**6
"""A height that no table reaches: without a height, rich assumes 80 columns on a terminal without styles."""


def terminal_lines(table: Table, width: int) -> list[str]:
    """Return the table's lines of at most ``width`` columns, with title and headers in bold.

    First, columns are dropped until only the last column has to be wrapped. If that does not suffice, all columns are
    wrapped between words, and columns are dropped again. If that does not suffice either, words are broken;
    a table with too many columns for that keeps its full width.
    """
    droppable = sorted((column for column in table.columns if column.drop), key=lambda column: column.drop)
    for is_whole, count in product((True, False), range(len(droppable) + 1)):
        part = table.without(left_out := droppable[:count])
        if widths := fitting_widths(part, width, is_whole=is_whole):
            break
    else:
        if width < LEAST_MEAN * len(part.columns):
            return [*plain_lines(table)]
    no_styles = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    colors: Literal["standard"] | None = None if no_styles else "standard"
    console = Console(width=width, height=MOST_LINES, force_terminal=True, color_system=colors)
    with console.capture() as capture:
        console.print(_colored(Text(printable_lines(table.title), "bold")))
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
    verdicts = [column.header.startswith("verdict") for column in table.columns]
    for row in table.rows:
        texts = [Text(printable_lines(cell)) for cell in row]
        drawn.add_row(*(_colored(text) if verdict else text for text, verdict in zip(texts, verdicts, strict=False)))
    return drawn


COLORS = {"pass": "green", "improved": "green", "regressed": "red", "inconclusive": "yellow"}
_VERDICT = re.compile(rf"(?:\d[^;\n]*; )?({'|'.join(COLORS)})\b", re.IGNORECASE)
"""A verdict at the beginning of a text, or after a measurement."""


def _colored(text: Text) -> Text:
    if match := _VERDICT.match(text.plain):
        text.stylize(COLORS[match[1].lower()], *match.span(1))
    return text


def fitting_widths(table: Table, width: int, *, is_whole: bool = False) -> list[int] | None:
    """Return widths that break no word (no cell if ``is_whole``), except in a last text column; None if impossible."""
    columns = table.columns
    texts = list(zip_longest((column.header for column in columns), *table.rows, fillvalue=""))
    shown = [[printable_lines(text) for text in cells] for cells in texts]
    widths, least = [], []
    for column, cells in zip(columns, shown, strict=True):
        sizes = [max(map(cell_len, cell.split("\n"))) for cell in cells]
        natural = min(width, max(sizes), column.max_width or max(sizes))
        words = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        widths.append(natural)
        whole = is_whole and min(natural, max(sizes[1:], default=0), LEAST_LAST if column is columns[-1] else width)
        least.append(max(column.min_width or 0, words, whole) if column.wrap else natural)
    if widths[0] <= LONGEST_LABEL and columns[0].label:
        least[0] = widths[0]
    available = width - len(GAP) * (len(columns) - 1)
    if not columns[-1].right and not is_whole:
        rest = available - sum(least[:-1])
        least[-1] = min(least[-1], max(rest, columns[-1].min_width or LEAST_LAST))
    return None if sum(least) > available else _shrunk(widths, least, available)


def _shrunk(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """Narrow the widest column that is above its minimum, step by step, until all columns fit."""
    widths = list(natural)
    while sum(widths) > available:
        widest = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths
