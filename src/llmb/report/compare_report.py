# SPDX-License-Identifier: Apache-2.0
"""Comparisons of two groups of runs as tables, Markdown, CSV and JSON documents."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llmb.analysis.comparison import Comparison, LeftOutRun, Row, Unmatched
from llmb.report.table import (
    Column,
    Table,
    csv_text,
    markdown_table,
    markdown_text,
    number_column,
    result_table,
    shortened,
    table_of,
)
from llmb.runs.identity import Difference
from llmb.shown_text import listed, printable

CSV_COLUMNS = (
    *("recipe", "n_before", "n_after", "before_s", "after_s", "delta_pct", "ci95_low_pct", "ci95_high_pct"),
    *("noise_pct", "verdict", "tolerance_pct", "measure", "speed_up", "scaling", "more_runs", "reason", "soft"),
    "smallest_visible_change_pct",
)
MOST_DIGITS = 4
MOST_RUNS = 6
"""Runs that a table names; the JSON document names all."""


def compare_tables(comparison: Comparison) -> list[Table]:
    """The rows; beneath them what differs, what was run on one side only, and what was left out."""
    tables = [_rows_table(comparison)]
    if comparison.differences:
        tables.append(_differences_table(comparison.differences))
    if comparison.unmatched:
        tables.append(_unmatched_table(comparison.unmatched))
    if comparison.left_out:
        tables.append(_left_out_table(comparison.left_out))
    return tables


def _rows_table(comparison: Comparison) -> Table:
    columns: list[Column[Row]] = [
        # A recipe is read in parts, too, and the row has to be one in 80 columns.
        Column("recipe", lambda row: row.recipe, label=False),
        number_column("runs", lambda row: f"{row.n_before} / {row.n_after}", str),
        number_column("before (s)", lambda row: row.before_s),
        number_column("after (s)", lambda row: row.after_s),
        number_column("change (%)", _change, str),
        number_column("95 % interval", lambda row: row.ci95_pct, _interval),
        number_column("noise (%)", lambda row: row.noise_pct, _noise),
        Column("verdict", _verdict),
    ]
    table = table_of(printable(_heading(comparison)), comparison.rows, columns)
    table.caption = "\n".join(map(printable, _notes(comparison)))
    return table


def _heading(comparison: Comparison) -> str:
    if comparison.before == comparison.after:
        return f"{comparison.before}, varying {', '.join(comparison.vary)}"
    return f"{comparison.before} (before) and {comparison.after} (after)"


def _interval(interval: tuple[float, float] | None) -> str:
    return " to ".join(map(_signed, interval)) if interval else "n/a"


def _verdict(row: Row) -> str:
    return f"{row.verdict} (soft)" if row.soft and row.verdict in ("pass", "regressed", "improved") else row.verdict


def _change(row: Row) -> str:
    """With as many digits as tell it from the tolerance: a row of '+3.0' does not regress by more than 3 %."""
    delta, limit = row.delta_pct, row.tolerance_pct
    if delta is None:
        return _signed(None)
    same = (n for n in range(1, MOST_DIGITS) if (round(abs(delta), n) > limit) == (abs(delta) > limit))
    return f"{delta:+.{next(same, MOST_DIGITS)}f}"


def _noise(percent: float | None) -> str:
    return "n/a" if percent is None else f"{percent:.2g}" if percent < 10 else f"{percent:.0f}"


def _signed(percent: float | None) -> str:
    return "n/a" if percent is None else f"{percent:+.1f}"


def _notes(comparison: Comparison) -> Iterator[str]:
    """What a reader needs to know beside the figures."""
    if not comparison.rows:
        yield "No recipe was measured on both sides."
        return
    yield "Times are medians of the runs' means; noise is the spread between repeats; above 0 is slower."
    yield from dict.fromkeys(f"Tolerance {row.tolerance_pct:g} %: {row.tolerance_source}." for row in comparison.rows)
    named = len(comparison.rows) > 1
    for row in comparison.rows:
        for note in _row_notes(row):
            yield f"{row.recipe}: {note}" if named else f"{note[0].upper()}{note[1:]}"


def _row_notes(row: Row) -> Iterator[str]:
    if row.reason:
        yield f"{row.reason}."
    if row.smallest_visible_change_pct is not None and row.verdict in ("pass", "inconclusive"):
        yield f"a change of {_noise(row.smallest_visible_change_pct)} % would have shown."
    if row.more_runs:
        yield f"{row.more_runs} more {'run' if row.more_runs == 1 else 'runs'}, of both sides together, would tell."
    elif row.verdict == "inconclusive":
        yield "the noise is too large, or the difference too close to the tolerance, for a few more runs to tell."
    if row.measure == "gpu_time_per_token":
        yield "a step is not the same work on both sides: the change is that of the GPU time per token."
    if row.scaling and row.speed_up is not None:
        yield f"{row.scaling} scaling, efficiency {100 * row.speed_up:.1f} %."
    elif row.speed_up is not None and "->" in row.recipe:
        yield f"speed-up {row.speed_up:.3f} (throughput per GPU)."


def _differences_table(differences: Sequence[Difference]) -> Table:
    """A row for what is known of both sides; below, what is known of one, such as that of an older record."""
    table = result_table("What differs in the records", "key", "before", "after")
    one_sided = [one for one in differences if one.before is None or one.after is None]
    for one in differences:
        if one not in one_sided:
            table.add_row(printable(one.key), shortened(one.before), shortened(one.after))
    table.caption = "; ".join(_one_sided_text(one) for one in one_sided) or None
    if table.caption:
        table.caption = f"Known of one side only: {table.caption}."
        table.columns = table.columns if table.rows else table.columns[:1]
    return table


def _one_sided_text(one: Difference) -> str:
    side, value = ("before", one.before) if one.after is None else ("after", one.after)
    return f"{printable(one.key)} ({side}: {shortened(value)})"


def _unmatched_table(unmatched: Iterable[Unmatched]) -> Table:
    table = result_table("Recipes without a counterpart", "recipe", "side", "runs")
    for one in unmatched:
        differs = ", ".join(f"{key.key} ({shortened(key.before)}, {shortened(key.after)})" for key in one.differs)
        cells = (one.recipe, one.side, str(len(one.runs)), one.reason or differs)
        table.add_row(*map(printable, filter(None, cells)))
    if len(table.columns) > 3:
        table.columns[3].header = "differs from the nearest"
    return table


def _left_out_table(left_out: Iterable[LeftOutRun]) -> Table:
    table = result_table("Runs left out", "side", "runs", "reason")
    groups: dict[tuple[str, str], list[str]] = {}
    for one in left_out:
        groups.setdefault((one.side, one.reason), []).append(one.run)
    for (side, reason), runs in groups.items():
        table.add_row(side, printable(listed(runs, MOST_RUNS)), printable(reason))
    return table


def compare_markdown(comparison: Comparison) -> str:
    """For a pull request: GitHub shows it as tables."""
    rows, *others = compare_tables(comparison)
    parts = [f"**{comparison.verdict}**: {markdown_text(rows.title)}\n", markdown_table(rows)]
    parts += [f"{markdown_text(line)}\n" for line in (rows.caption or "").split("\n") if line]
    for table in others:
        parts.append(
            f"<details><summary>{markdown_text(table.title)}</summary>\n\n{markdown_table(table)}\n</details>\n"
        )
    return "\n".join(parts)


def compare_csv(comparison: Comparison) -> str:
    """A header and a line for each row; an unknown value is an empty field."""
    return csv_text(CSV_COLUMNS, map(_csv_row, comparison.rows))


def _csv_row(row: Row) -> dict[str, Any]:
    low, high = row.ci95_pct or (None, None)
    return {**dict(row), "ci95_low_pct": low, "ci95_high_pct": high}
