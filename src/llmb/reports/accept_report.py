# SPDX-License-Identifier: Apache-2.0
"""Acceptances, planned or complete, as tables and JUnit cases."""

from collections.abc import Iterator, Sequence

from llmb.nodes.acceptance.parts import AcceptancePart, AcceptanceResult, PlannedPart
from llmb.reports.formats import duration
from llmb.reports.junit import JunitCase, Outcome
from llmb.reports.table import Column, Table, table_of, texts

OUTCOMES: dict[str, Outcome] = {
    **dict.fromkeys(("pass", "warn", "measured", "improved"), "pass"),
    **dict.fromkeys(("fail", "regressed"), "failure"),
    "invalid": "error",
}


def accept_table(result: AcceptanceResult) -> Table:
    """Return a table of an acceptance, with one part per row."""
    columns: list[Column[AcceptancePart]] = [
        *texts("part: name", "status", "value"),
        *texts("compared with: reference", optional=True),
    ]
    files = [f"page     {result.page}", f"archive  {result.archive}"] if result.page else []
    unfit = [f"unfit    {', '.join(result.unfit)}"] if result.unfit else []
    caption = [f"{duration(result.seconds)} in all", *unfit, *files]
    return table_of(f"{result.verdict.upper()}: {result.sentence}", result.parts, columns, caption=caption)


def planned_table(planned: Sequence[PlannedPart], minutes: float) -> Table:
    """Return a table of an acceptance's parts, with their estimated times and commands."""
    columns = [*texts("part: name"), *texts("about: seconds", form=duration), *texts("command")]
    total = sum(part.seconds for part in planned)
    caption = f"more repeats until all verdicts are settled, for at most {minutes:g} minutes" if minutes else ""
    return table_of(f"An acceptance of about {duration(total)}", planned, columns, caption=caption)


def accept_cases(result: AcceptanceResult) -> Iterator[JunitCase]:
    for part in result.parts:
        yield JunitCase(result.subject, part.name, OUTCOMES.get(part.status, "skipped"), part.value)
