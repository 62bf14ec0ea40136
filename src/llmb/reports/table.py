# SPDX-License-Identifier: Apache-2.0
"""Columns of a result: their values as text, as a table, as its lines, and as CSV; series as block characters. Pure."""

import csv
import io
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from llmb.base.shown_text import csv_value, printable, printable_lines, value_text

if TYPE_CHECKING:  # every command can print, and few have a use for records
    from llmb.catalogue.records import Window
    from llmb.runs.steps import Step

GAP = "  "
LONGEST_VALUE = 60
"""Lists of nodes and GPUs can be long."""
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28}\b")


def as_text(value: object) -> str:
    """Format a value in one line; empty if unknown."""
    return "" if value is None else printable(value)


def cell(value: float | None) -> str:
    """Format a number as ``number`` does; empty if unknown."""
    return "" if value is None else number(value)


def whole(value: int | None) -> str:
    """Format with thousands separators; empty if unknown."""
    return "" if value is None else f"{value:,}"


def number(value: float | None) -> str:
    """Format with four significant digits, above 1,000 as an integer; 'n/a' if unknown."""
    if value is None:
        return "n/a"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def unknown(reason: str) -> str:
    return f"n/a ({reason})"


def interval_of(interval: tuple[float, float] | None) -> str:
    """Format the confidence interval of a value that is never negative. An interval that includes 0 is not shown: it
    comes from very few or very different steps.
    """
    if interval is None:
        return number(None)
    low, high = interval
    return f"{number(low)} to {number(high)}" if low > 0 else unknown("too few steps")


def duration(seconds: float) -> str:
    """Format in the two largest units, such as ``3 min 14 s`` and ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    sizes = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    place = next(place for place, (size, _) in enumerate(sizes) if whole >= size)
    (size, unit), (small, small_unit) = sizes[place : place + 2]
    return f"{whole // size} {unit} {whole % size // small} {small_unit}"


def shortened(value: str | float | bool | None) -> str:
    """Shorten a value; commits to the digits that git shows."""
    text = _COMMIT.sub(r"\1", printable(value_text(value)))
    return crop(text, LONGEST_VALUE)


def crop(text: str, most: int) -> str:
    """Shorten a text to ``most`` characters, with dots at its end."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


Row = TypeVar("Row")
_NOTHING = {"", number(None)}


@dataclass(slots=True)
class Column(Generic[Row]):
    """A column that shows ``value`` of each row, formatted by ``form``.

    Columns of numbers are right-aligned. On a narrow terminal, columns with ``wrap`` are wrapped between words.
    """

    header: str
    value: Callable[[Row], Any] = str
    form: Callable[[Any], str] = as_text
    right: bool = False
    wrap: bool = True
    optional: bool = False
    """Left out if no row has a value."""
    common: bool = False
    """In the title if all rows have the same value."""
    min_width: int | None = None
    max_width: int | None = None
    """Wider cells are wrapped on every terminal."""
    drop: int = 0
    """Its place in the order in which columns are left out on a narrow terminal; 0 for one that always stays."""
    label: bool = True
    """If it is the first column, it is only wrapped if it is very wide."""


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


def rows_table(
    title: str,
    headers: Sequence[str],
    rows: Iterable[tuple[str, ...]],
    *,
    right: Sequence[str] = (),
    caption: Iterable[str] = (),
) -> Table:
    """A table of rows that may be shorter than its headers; ``right`` names the columns of numbers."""
    table = result_table(title, *headers, right=tuple(right))
    for row in rows:
        table.add_row(*row)
    table.caption = "\n".join(caption) or None
    return table


def facts_table(title: str, facts: Iterable[tuple[str, object]]) -> Table:
    """Names and values, without those that are None."""
    return rows_table(title, ("", ""), ((name, str(value)) for name, value in facts if value is not None))


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Fields of a record by their names, for a document."""
    return {name: getattr(record, name) for name in names}


def number_column(
    header: str, value: Callable[[Row], Any], form: Callable[[Any], str] = number, *, wrap: bool = True, drop: int = 0
) -> Column[Row]:
    return Column(header, value, form, right=True, wrap=wrap, drop=drop)


def csv_text(names: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A header and a line for each row; an unknown value is an empty field, and other values are left out."""
    lines = io.StringIO()
    write_csv_rows(lines, list(names), rows)
    return lines.getvalue()


def write_csv_rows(file: io.TextIOBase, names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_value(value) for name, value in row.items()} for row in rows)


class Shown:
    """A result that a notebook shows as tables."""

    __slots__ = ()

    def tables(self) -> Iterable[Table]:
        """Return the tables that the command prints."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document that the command prints."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return "".join(map(html_table, self.tables()))


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
    """Escape a text for Markdown, in one line."""
    for letter in ("\\", "|", "<", "*", "_", "`", "["):
        text = text.replace(letter, f"\\{letter}")
    return text.replace("\n", " ")


def plain_lines(table: Table) -> Iterator[str]:
    """The table as wide as needed."""
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


def fitting_widths(table: Table, width: int) -> list[int] | None:
    """Widths that break no word; None if there are none. A last column that is text may break the longest words."""
    columns = table.columns
    texts = list(zip_longest((column.header for column in columns), *table.rows, fillvalue=""))
    shown = [[printable_lines(text) for text in cells] for cells in texts]
    widths, least = [], []
    for column, cells in zip(columns, shown, strict=True):
        longest = max(cell_len(line) for cell in cells for line in cell.split("\n"))
        natural = min(width, longest, column.max_width or longest)
        words = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
        widths.append(natural)
        least.append(max(column.min_width or 0, words) if column.wrap else natural)
    if widths[0] <= LONGEST_LABEL and columns[0].label:
        least[0] = widths[0]
    available = width - len(GAP) * (len(columns) - 1)
    if not columns[-1].right:
        rest = available - sum(least[:-1])
        least[-1] = min(least[-1], max(rest, columns[-1].min_width or LEAST_LAST))
    return None if sum(least) > available else _shrunk(widths, least, available)


def _shrunk(natural: Sequence[int], least: Sequence[int], available: int) -> list[int]:
    """Narrow the widest column that can be narrowed, until all fit."""
    widths = list(natural)
    while sum(widths) > available:
        widest = max((place for place in range(len(widths)) if widths[place] > least[place]), key=widths.__getitem__)
        widths[widest] -= 1
    return widths


Value = TypeVar("Value")
BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_BLOCKS = str.maketrans(BLOCKS, "12345678")
"""The height as a digit, for an output without block characters."""
MOST_CELLS = 32
CHART_CELLS, CHART_ROWS = 64, 8
LEAST_SPAN = 0.1
"""The full height is at least this share of the step time, so that ordinary noise looks like what it is."""
LEAST = 3
"""Fewer values are no series."""
NOT_FINITE = "?"


def sparkline(values: Sequence[float], cells: int = MOST_CELLS, scale: Sequence[float] = ()) -> str:
    """The values from left to right; of more than ``cells``, the longest of those that share a cell.

    The height is between the smallest and the largest value of ``scale``, by default the second half of ``values``,
    which is without the warm-up; what is beyond has the lowest or the full height. Empty for less than ``LEAST``.
    """
    scaled = [value for value in scale or values[len(values) // 2 :] if math.isfinite(value)]
    if not scaled or (len(values) < LEAST and not scale):
        return ""
    low = min(scaled)
    span = max(max(scaled) - low, LEAST_SPAN * abs(low)) or 1.0
    heights = (_longest(part) for part in _parts(values, cells))
    return "".join(NOT_FINITE if value is None else _block((value - low) / span) for value in heights)


def window_sparkline(steps: Sequence["Step"], window: "Window", cells: int = MOST_CELLS) -> str:
    """The step times of a run, scaled by those of its window, which is in brackets; empty without a step."""
    groups: list[list[float]] = [[], [], []]
    for step in steps:
        groups[0 if step.step < window.first else 1 if step.step <= window.last else 2].append(step.step_time_s)
    before, inside, after = groups
    if not inside:
        return sparkline([*before, *after], cells)
    shares = [len(group) * cells / max(len(steps), cells) for group in groups]
    drawn = [sparkline(group, max(1, round(share)), inside) for group, share in zip(groups, shares, strict=True)]
    return f"{drawn[0]}[{drawn[1]}]{drawn[2]}"


def step_chart(
    steps: Sequence["Step"], window: "Window", cells: int = CHART_CELLS, rows: int = CHART_ROWS
) -> list[str]:
    """Lines with the step times of a run as columns, from the least to the largest of its window, which is underlined.

    As in ``sparkline``, the slowest of the steps that share a column is shown, and what is beyond has the full height.
    """
    inside = [step.step_time_s for step in steps if step.step in window]
    scaled = [value for value in inside or [step.step_time_s for step in steps] if math.isfinite(value)]
    if not scaled:
        return []
    low = min(scaled)
    span = max(max(scaled) - low, LEAST_SPAN * abs(low)) or 1.0
    parts = list(_parts(steps, cells))
    slowest = (_longest([step.step_time_s for step in part]) for part in parts)
    heights = [math.inf if value is None else (value - low) / span for value in slowest]
    limits = {0: f"{number(low + span)} s", rows - 1: f"{number(low)} s"}
    margin = max(map(len, limits.values()))
    lines = []
    for row in range(rows):
        blocks = (_block_in_row(height, rows - 1 - row, rows) for height in heights)
        lines.append(f"{limits.get(row, ''):>{margin}} |{''.join(blocks)}".rstrip())
    in_window = (any(step.step in window for step in part) for part in parts)
    lines.append(f"{'':{margin}} |{''.join('=' if is_in else ' ' for is_in in in_window)}".rstrip())
    share = math.ceil(len(steps) / len(parts))
    each = "" if share == 1 else f", the slowest of up to {share} a column"
    lines.append(f"steps {steps[0].step}-{steps[-1].step}{each}; = is the window {window.first}-{window.last}")
    return lines


def _block_in_row(height: float, row: int, rows: int) -> str:
    """Return the character of a column in a row, counted from the lowest: none, a block, or the full height."""
    part = height * rows - row
    if part >= 1:
        return BLOCKS[-1]
    return _block(part) if part > 0 or row == 0 else " "


def _parts(values: Sequence[Value], cells: int) -> Iterator[Sequence[Value]]:
    count = min(cells, len(values))
    for place in range(count):
        yield values[place * len(values) // count : (place + 1) * len(values) // count]


def _longest(values: Sequence[float]) -> float | None:
    """Return the longest value; None if one is not finite."""
    return max(values) if all(map(math.isfinite, values)) else None


def _block(height: float) -> str:
    return BLOCKS[min(len(BLOCKS) - 1, max(0, int(height * len(BLOCKS))))]
