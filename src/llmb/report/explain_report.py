# SPDX-License-Identifier: Apache-2.0
"""Why a run is slow, as tables."""

from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable
from llmb.verdict.causes import Cause, Explanation

SIGNS = {"about": "", "at least": "≥ ", "at most": "≤ "}
READABLE = 24
"""Sentences in a narrower column are hard to read: each row becomes a paragraph."""
NOTHING = "nothing that was measured costs 1 % of a step or more"


def explanation_tables(explanation: Explanation) -> list[Table]:
    """The causes with their commands, and what is not known."""
    tables = [_causes_table(explanation)]
    if explanation.not_known:
        tables.append(_unknown_table(explanation))
    return tables


def _causes_table(explanation: Explanation) -> Table:
    table = result_table("why slow", "cause", "s/step", "%", "evidence", right=("s/step", "%"))
    for name in ("s/step", "%"):
        next(column for column in table.columns if column.header == name).wrap = False
    for cause in explanation.causes:
        between = [] if cause.in_step else ["between steps, not part of the step time"]
        first, *others = [*cause.evidence, *between]
        table.add_row(cause.title, *_share(cause), printable(first))
        for line in others:
            table.add_row("", "", "", printable(line))
    if not explanation.causes:
        table.add_row(NOTHING, "", "", "")
    table.caption = "\n".join(_notes(explanation))
    return table


def _share(cause: Cause) -> tuple[str, str]:
    if cause.share_s is None or cause.share_pct is None:
        return "?", "?"
    sign = SIGNS[cause.bound]
    return f"{sign}{number(cause.share_s)}", f"{sign}{cause.share_pct:.0f}"


def _notes(explanation: Explanation) -> list[str]:
    notes = [f"a step takes {number(explanation.step_time_s)} s"]
    if explanation.gap_s is not None:
        more = "longer" if explanation.gap_s > 0 else "less"
        gap = f"{number(abs(explanation.gap_s))} s {more} than the {number(explanation.reference_s)} s of"
        notes = [f"{notes[0]}, {gap} {printable(explanation.reference)}"]
    if explanation.unexplained_s is not None:
        notes.append(f"{number(explanation.unexplained_s)} s of that are not explained")
    notes += [f"to confirm {cause.title}: {printable(cause.confirm)}" for cause in explanation.causes]
    return notes


def _unknown_table(explanation: Explanation) -> Table:
    table = result_table("not known from this run", "cause", "why", "what tells")
    for column in table.columns[1:]:
        column.min_width = READABLE
    for unknown in explanation.not_known:
        table.add_row(unknown.title, unknown.reason, printable(unknown.confirm))
    return table
