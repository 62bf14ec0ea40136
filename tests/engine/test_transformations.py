# SPDX-License-Identifier: Apache-2.0
"""The one order in which a model is transformed, as the documentation has it."""

from pathlib import Path

from llmb.engine.transformations import TRANSFORMATIONS

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "engine.md"


def test_the_page_has_the_order_and_its_reasons() -> None:
    section = PAGE.read_text().partition("## The order of transformations")[2].partition("\n## ")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in section.splitlines() if "|" in line]
    assert rows[2:] == [(step.name, step.reason) for step in TRANSFORMATIONS]
