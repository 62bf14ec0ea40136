# SPDX-License-Identifier: Apache-2.0
"""A figure of a page."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmb.page.charts import MOST_POINTS, Drawing
from llmb.report.table import Table

STEP = "step"
NO_STEPS = "the steps are not recorded one by one; a log has them as text"


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot, what it shows in a sentence, and its data. ``name`` is unique on a page; users may ask for it."""

    name: str
    title: str
    caption: str
    drawing: Drawing
    table: Table


def add_first(table: Table, rows: Sequence[tuple[str, ...]]) -> None:
    """Adds the first of more rows than a page can bear, which the table then says."""
    table.rows.extend(rows[:MOST_POINTS])
    if len(rows) > MOST_POINTS:
        table.caption = f"the first {MOST_POINTS:,} of {len(rows):,}; llmb export has all"
