# SPDX-License-Identifier: Apache-2.0
"""An acceptance as a table: what was tried, and what was found."""

from collections.abc import Iterator, Sequence

from llmb.nodes.acceptance.parts import AcceptancePart, AcceptanceResult, PlannedPart
from llmb.reports.formats import duration
from llmb.reports.junit import JunitCase, Outcome
from llmb.reports.table import Column, Table, table_of

OUTCOMES: dict[str, Outcome] = {
    **dict.fromkeys(("pass", "warn", "measured", "improved"), "pass"),
    **dict.fromkeys(("fail", "regressed"), "failure"),
    "invalid": "error",
}


def accept_table(result: AcceptanceResult) -> Table:
    """The parts, one a row."""
    columns: list[Column[AcceptancePart]] = [
        Column("part", lambda row: row.name),
        Column("status", lambda row: row.status),
        Column("value", lambda row: row.value),
        Column("compared with", lambda row: row.reference or "", optional=True),
    ]
    table = table_of(f"{result.verdict.upper()}: {result.sentence}", result.parts, columns)
    files = [f"page     {result.page}", f"archive  {result.archive}"] if result.page else []
    unfit = [f"unfit    {', '.join(result.unfit)}"] if result.unfit else []
    table.caption = "\n".join([f"{duration(result.seconds)} in all", *unfit, *files])
    return table


def planned_table(planned: Sequence[PlannedPart], minutes: float) -> Table:
    """List the parts, and how long each may take."""
    columns: list[Column[PlannedPart]] = [
        Column("part", lambda part: part.name),
        Column("about", lambda part: duration(part.seconds)),
        Column("command", lambda part: part.command),
    ]
    total = sum(part.seconds for part in planned)
    table = table_of(f"An acceptance of about {duration(total)}", planned, columns)
    table.caption = f"more repeats if a verdict is not settled, for {minutes:g} minutes in all"
    return table


def accept_cases(result: AcceptanceResult) -> Iterator[JunitCase]:
    for part in result.parts:
        yield JunitCase(result.subject, part.name, OUTCOMES.get(part.status, "skipped"), part.value)
