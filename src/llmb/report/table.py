# SPDX-License-Identifier: Apache-2.0
"""Columns of a result: their values as text, as a table, as its lines, and as CSV. Pure."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import zip_longest
from typing import Any, Generic, NamedTuple, TypeVar
from unicodedata import combining, east_asian_width

from llmb.shown_text import csv_value, printable, printable_lines, value_text

GAP = "  "
LONGEST_LABEL = 40
"""A first column up to this width is not wrapped, unless it is not a label."""
LEAST_LAST = 16
"""A last column as narrow as this is still read; names in it may be broken."""
_WORDS = re.compile(r"\S+(?: %\S*)?")
"""A percentage is one word: a line does not begin with its sign."""
_PIECES = re.compile(r"[^_/,=:-]*[_/,=:-]*")
LONGEST_VALUE = 60
"""Lists of nodes and GPUs can be long."""
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def as_text(value: object) -> str:
    """In one line; empty if unknown."""
    return "" if value is None else printable(value)


def known(value: float | None) -> str:
    """A number; empty if unknown."""
    return "" if value is None else number(value)


def whole(value: int | None) -> str:
    """With separators of thousands; empty if unknown."""
    return "" if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """Four significant digits, integers above 1,000; 'n/a' if unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"


def interval_of(interval: tuple[float, float] | None) -> str:
    """A confidence interval of something that is never negative. One that includes 0 says that hardly anything is
    known; it comes from very few steps, or from steps that differ very much.
    """
    if interval is None:
        return number(None)
    low, high = interval
    return f"{number(low)} to {number(high)}" if low > 0 else unknown("too few steps")


def duration(seconds: float) -> str:
    """In the two largest units, such as ``3 min 14 s`` and ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    sizes = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    place = next(place for place, (size, _) in enumerate(sizes) if whole >= size)
    (size, unit), (small, small_unit) = sizes[place : place + 2]
    return f"{whole // size} {unit} {whole % size // small} {small_unit}"


def shortened(value: str | float | bool | None) -> str:
    """Commits by as many digits as git shows."""
    text = _COMMIT.sub(r"\1", printable(value_text(value)))
    return cut(text, LONGEST_VALUE)


def cut(text: str, most: int) -> str:
    """The text, or its beginning with dots in place of the rest."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


Row = TypeVar("Row")
_NOTHING = {"", number(None)}


@dataclass(slots=True)
class Column(Generic[Row]):
    """What is shown of each row: ``value``, as ``form`` writes it.

    Columns of numbers are right-aligned. On a narrow terminal, columns with ``wrap`` are wrapped between words.
    """

    header: str
    value: Callable[[Row], Any] = str
    form: Callable[[Any], str] = as_text
    right: bool = False
    wrap: bool = True
    optional: bool = False
    """Left out where no row has a value."""
    common: bool = False
    """In the title if all rows have the same value."""
    min_width: int | None = None
    max_width: int | None = None
    """Wider cells are always wrapped."""
    drop: int = 0
    """Its place in the order in which columns are left out on a narrow terminal; 0 for one that always stays."""
    label: bool = True
    """As the first column, it is not wrapped up to a width of ``LONGEST_LABEL``."""


@dataclass(slots=True)
class Table:
    """Cells are plain text, never markup; control characters in them are shown."""

    title: str
    columns: list[Column[Any]]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    caption: str | None = None

    def add_row(self, *cells: str) -> None:
        """Columns without a cell stay empty; a row with more cells than columns adds columns without a header."""
        self.columns += [Column("") for _ in cells[len(self.columns) :]]
        self.rows.append(cells)

    def without(self, columns: Sequence[Column[Any]]) -> "Table":
        kept = [place for place, column in enumerate(self.columns) if not any(column is one for one in columns)]
        rows = [tuple(row[place] for place in kept if place < len(row)) for row in self.rows]
        return Table(self.title, [self.columns[place] for place in kept], rows, self.caption)


def table_of(title: str, rows: Iterable[Row], columns: Iterable[Column[Row]], *, drop_empty: bool = False) -> Table:
    """A table with a line for each row. With ``drop_empty``, every column is optional."""
    listed = list(rows)
    shown: list[tuple[Column[Any], list[str]]] = []
    for column in columns:
        cells = [column.form(column.value(row)) for row in listed]
        if column.common and len({*cells}) == 1:
            title = ", ".join(filter(None, (title, printable(cells[0]))))
        elif not (column.optional or drop_empty) or not {*cells} <= _NOTHING:
            shown.append((replace(column), cells))
    lines = list(zip(*(cells for _, cells in shown), strict=True))
    return Table(title, [column for column, _ in shown], lines)


def result_table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the common style; ``right`` names the columns of numbers, which are right-aligned."""
    return Table(title, [Column(name, right=name in right) for name in columns])


def number_column(
    header: str, value: Callable[[Row], Any], form: Callable[[Any], str] = number, *, wrap: bool = True, drop: int = 0
) -> Column[Row]:
    return Column(header, value, form, right=True, wrap=wrap, drop=drop)


def csv_text(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and a line for each row; an unknown value is an empty field, and other values are left out."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(names), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_value(value) for name, value in row.items()} for row in rows)
    return lines.getvalue()


def html_table(table: Table) -> str:
    """For a notebook, with its title and its caption."""
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
    """Its rows, without the title."""
    rules = ["---:" if column.right else "---" for column in table.columns]
    rows = [[column.header for column in table.columns], rules, *(map(markdown_text, row) for row in table.rows)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def markdown_text(text: str) -> str:
    """In one line, with nothing that Markdown obeys."""
    for letter in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")


class TableLine(NamedTuple):
    text: str
    is_heading: bool = False


def plain_lines(table: Table) -> Iterator[str]:
    """The table as wide as needed."""
    return (line.text for line in table_lines(table))


def table_lines(table: Table, width: int | None = None) -> Iterator[TableLine]:
    """The table in ``width`` columns, or as wide as needed.

    Cells are wrapped between words. Where that is not enough, columns are left out; where that is not enough either,
    each row becomes a paragraph, so that no name is broken unless it is longer than a whole line.
    """
    yield from (TableLine(text, is_heading=True) for text in _wrapped(printable_lines(table.title), width))
    droppable = sorted((column for column in table.columns if column.drop), key=lambda column: column.drop)
    for count in range(len(droppable) + 1):
        part = table.without(droppable[:count])
        cells = [tuple(map(printable_lines, row)) for row in part.rows]
        widths = _widths(part, cells, width)
        if widths is not None:
            yield from _grid(part, cells, widths)
            if count:
                names = ", ".join(column.header for column in droppable[:count])
                yield from map(TableLine, _wrapped(f"without {names}, for which the terminal is too narrow", width))
            break
    else:
        whole = [tuple(map(printable_lines, row)) for row in table.rows]
        yield from map(TableLine, _paragraphs(table.columns, whole, width or 0))
    if table.caption:
        yield from map(TableLine, _wrapped(printable_lines(table.caption), width))


def _widths(table: Table, cells: Sequence[Sequence[str]], width: int | None) -> list[int] | None:
    columns = zip_longest((column.header for column in table.columns), *cells, fillvalue="")
    natural = [_natural(column, texts) for column, texts in zip(table.columns, columns, strict=True)]
    return natural if width is None else _fitted(table, natural, cells, width - len(GAP) * (len(natural) - 1))


def _grid(table: Table, cells: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[TableLine]:
    headers = tuple(column.header for column in table.columns)
    if any(headers):
        yield from (TableLine(text, is_heading=True) for text in _row(headers, widths, table.columns))
    for row in cells:
        yield from map(TableLine, _row(row, widths, table.columns))


def _fitted(table: Table, natural: Sequence[int], cells: Sequence[Sequence[str]], available: int) -> list[int] | None:
    """Widths that break no word; None if there are none. A last column that is text may break the longest words."""
    least = list(map(text_width, (max(_words(column.header), key=text_width, default="") for column in table.columns)))
    for row in cells:
        for place, cell in enumerate(row):
            least[place] = max(least[place], *map(text_width, _words(cell)), 0)
    if natural[0] <= LONGEST_LABEL and table.columns[0].label:
        least[0] = natural[0]
    for place, column in enumerate(table.columns):
        least[place] = max(least[place], column.min_width or 0) if column.wrap else natural[place]
    if not table.columns[-1].right:
        rest = available - sum(least[:-1])
        least[-1] = min(least[-1], max(rest, table.columns[-1].min_width or LEAST_LAST))
    if sum(least) > available:
        return None
    widths = list(natural)
    while (excess := sum(widths) - available) > 0:
        room = [width - low for width, low in zip(widths, least, strict=True)]
        widest = max((place for place in range(len(widths)) if room[place]), key=lambda place: widths[place])
        others = [widths[place] for place in range(len(widths)) if room[place] and widths[place] < widths[widest]]
        step = widths[widest] - max(others) if others else 1
        widths[widest] -= min(excess, room[widest], max(step, 1))
    return widths


def _row(cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column[Any]]) -> Iterator[str]:
    lines = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=False)]
    for parts in zip_longest(*lines, fillvalue=""):
        placed = zip(parts, widths, columns, strict=False)
        yield GAP.join(_aligned(part, width, right=column.right) for part, width, column in placed).rstrip()


def _paragraphs(columns: Sequence[Column[Any]], cells: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """For each row the first two cells, which say what it is, and the others, and numbers, with their headers."""
    inner = max(1, width - len(GAP))
    titles = 1 if len(columns) > 1 and columns[1].right else 2
    for row in cells:
        title = GAP.join(filter(None, row[:titles]))
        for text in [title] if text_width(title) <= width else row[:titles]:
            yield from _wrapped(text, width)
        named = zip(columns[titles:], row[titles:], strict=False)
        line = ""
        for part in (f"{column.header} {cell}".strip() for column, cell in named if cell):
            if line and text_width(line) + len(GAP) + text_width(part) > inner:
                yield from (GAP + text for text in _wrapped(line, inner))
                line = ""
            line = f"{line}{GAP}{part}" if line else part
        if line:
            yield from (GAP + text for text in _wrapped(line, inner))


def _natural(column: Column[Any], cells: Iterable[str]) -> int:
    """The width of a column of which no cell is wrapped but those that are wider than they may be."""
    lines = [line for cell in cells for line in cell.split("\n")]
    limit = column.max_width or max(map(text_width, lines))
    return max(text_width(part) for line in lines for part in _wrapped(line, limit))


def _wrapped(text: str, width: int | None) -> list[str]:
    """Lines of at most ``width``. A longer word is broken after punctuation, or anywhere if there is none."""
    lines: list[str] = []
    for line in text.split("\n"):
        if width is None or text_width(line) <= width:
            lines.append(line)
            continue
        current = ""
        for word in _words(line):
            if current and text_width(current) + 1 + text_width(word) > width:
                lines.append(current)
                current = ""
            current = f"{current} {word}" if current else word
            while text_width(current) > width:
                head = _head(current, width)
                lines.append(head)
                current = current[len(head) :]
        lines.append(current)
    return lines


def _words(text: str) -> list[str]:
    return _WORDS.findall(text) if " %" in text else text.split()


def _head(word: str, width: int) -> str:
    """The beginning of a word that is too long."""
    head = ""
    for piece in _PIECES.findall(word):
        if text_width(head + piece) > width:
            break
        head += piece
    if head:
        return head
    count = 1
    while count < len(word) and text_width(word[: count + 1]) <= width:
        count += 1
    return word[:count]


def text_width(line: str) -> int:
    """Width in terminal columns."""
    return len(line) if line.isascii() else sum(map(_letter_width, line))


def _letter_width(letter: str) -> int:
    return 0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1


def _aligned(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - text_width(text))
    return space + text if right else text + space
