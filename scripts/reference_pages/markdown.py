# SPDX-License-Identifier: Apache-2.0
"""Markdown from plain values."""

from collections.abc import Iterable, Sequence
from enum import Enum


def page(*parts: str) -> str:
    """Joins parts with blank lines; empty parts are left out."""
    return "\n\n".join(part for part in parts if part)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Without columns that are empty in all rows."""
    texts = [[cell(value) for value in row] for row in rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in texts)]
    lines = ([row[place] for place in shown] for row in (columns, ["---"] * len(columns), *texts))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:.6g}" if abs(value) >= 1e12 or 0 < abs(value) < 1e-3 else f"{value:.10g}"
        case Enum():
            return cell(value.value)
        case dict():
            return ", ".join(f"{name} {cell(item)}" for name, item in value.items())
        case list() | tuple():
            return ", ".join(cell(item) for item in value)
    return " ".join(str(value).split()).replace("|", "\\|")


def bullets(notes: Iterable[str]) -> str:
    return "\n".join(f"- {note}" for note in notes)
