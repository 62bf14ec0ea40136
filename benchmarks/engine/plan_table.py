# SPDX-License-Identifier: Apache-2.0
"""The cases in their order, with the time and the memory that each is expected to need."""

from collections.abc import Sequence
from typing import Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from benchmarks.engine.cases import Case
from benchmarks.engine.kernels import without_floor
from benchmarks.engine.memory import GB, needed_bytes, obstacle
from benchmarks.engine.records import Document
from benchmarks.engine.run_case import blank
from benchmarks.engine.session import learned, why_not
from benchmarks.engine.store import difference, known_result

CHANGED = "measured again: "


def plan_table(
    cases: Sequence[Case], document: Document, gpu_memory: float | None, *, here: bool, ceilings: bool, budget_s: float
) -> Group:
    """A plan for another machine (not ``here``) has all engines installed."""
    table = Table(title="Cases in their order", box=None, title_justify="left", pad_edge=False)
    for column in ("group", "case", "mb", "round", "GB", "s", "min", "remark"):
        justify: Literal["left", "right"] = "left" if column in ("group", "case", "remark") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "remark")
    estimates, total, models, last = learned(document, cases), 0.0, set[str](), None
    for case in cases:
        note, seconds, name = remark(case, document, gpu_memory, here=here), 0.0, case.subject.name
        if not note or note.startswith(CHANGED):
            same = [other.subject for other in cases if other.subject.name == name]
            subjects = without_floor(document, same) if ceilings and name not in models else []
            models.add(name)
            note = "; ".join(part for part in (note, "kernels" if subjects else None) if part)
            seconds = estimates.case_s(case) + estimates.ceilings_s(subjects)
            total += seconds
        table.add_row(
            case.group if case.group != last else "",
            f"{case.name} {case.subject.label}",
            str(case.subject.recipe.layout.ga),
            str(case.round + 1),
            f"{needed_bytes(case) / GB:.0f}" if gpu_memory else "n/a",
            f"{seconds:.0f}",
            f"{total / 60:.0f}",
            Text(note),
        )
        last = case.group
    notes = (
        "mb: micro-batches per step; min: the sum up to here; kernels: with the device's own kernels",
        f"about {total / 60:.0f} minutes in all, {total / budget_s:.1f} times the budget of {budget_s / 60:g} minutes",
    )
    return Group(table, *map(Text, notes))


def remark(case: Case, document: Document, gpu_memory: float | None, *, here: bool) -> str:
    """Why a case is not run, or is run again; empty for any other."""
    wanted = blank(case)
    known = known_result(document, wanted)
    if known and (changed := difference(known, wanted)):
        return f"{CHANGED}{changed}"
    if known:
        return "reused"
    return (why_not(case, document.settings, gpu_memory) if here else obstacle(case, gpu_memory)) or ""
