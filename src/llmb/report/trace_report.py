# SPDX-License-Identifier: Apache-2.0
"""The time of traced steps by activity, as tables and as a JSON document."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from llmb.report.numbers import number
from llmb.report.output import printable, result_table
from llmb.report.table import Table
from llmb.traces.breakdown import CollectiveTime, StepBreakdown
from llmb.traces.summary import RankTrace, TraceSummary, shares

PART_NAMES = {
    "attention": "attention",
    "matrix_product": "matrix products",
    "other": "other kernels",
    "memory_copy": "memory copies",
    "communication_exposed": "communication, exposed",
    "idle": "idle",
}
LONGEST_NAME = 90


def trace_document(summary: TraceSummary) -> dict[str, Any]:
    """The JSON document; null for what the trace does not have."""
    return {
        "ranks": [_rank_document(rank) for rank in summary.ranks],
        "slowest_rank": summary.slowest and asdict(summary.slowest),
    }


def _rank_document(rank: RankTrace) -> dict[str, Any]:
    names = [
        {"name": item.name, "activity": item.activity, "calls": item.calls, "total_s": item.total_ns / 1e9}
        for item in rank.names
    ]
    steps = [step_document(step) for step in rank.steps]
    return {"source": rank.source, "rank": rank.rank, "device": rank.device, "steps": steps, "longest": names}


def step_document(step: StepBreakdown) -> dict[str, Any]:
    values = asdict(step)
    del values["rank"]
    return {**values, "shares": shares(step)}


def trace_tables(summary: TraceSummary) -> Iterator[Table]:
    """Steps, collectives, and the longest kernels of the first rank."""
    yield _steps_table(summary)
    if any(step.collectives for rank in summary.ranks for step in rank.steps):
        yield _collectives_table(summary)
    yield _names_table(summary.ranks[0])


def _steps_table(summary: TraceSummary) -> Table:
    parts = tuple(f"{name} %" for name in PART_NAMES.values())
    right = ("step", "ms", *parts, "hidden communication ms", "longest idle ms")
    table = result_table("Where the time of each step went", "rank", *right, right=right)
    for rank in summary.ranks:
        for step in rank.steps:
            table.add_row(
                printable(rank.label),
                str(step.step),
                number(1e3 * step.duration_s),
                *(f"{100 * share:.1f}" for share in shares(step).values()),
                number(1e3 * step.communication_hidden_s),
                number(1e3 * step.idle_longest_s),
            )
    if summary.slowest:
        slowest = summary.slowest
        table.caption = (
            f"Slowest: {slowest.label}, {number(1e3 * slowest.own_s)} ms per step without exposed communication;"
            f" the others {number(1e3 * slowest.others_own_s)} ms (median)."
        )
    return table


def _collectives_table(summary: TraceSummary) -> Table:
    right = ("calls", "total ms", "exposed ms", "hidden ms")
    title = "Communication in each rank's step of median length"
    table = result_table(title, "rank", "step", "collective", "group", *right, right=("step", *right))
    for rank in summary.ranks:
        step = rank.typical
        for item in step.collectives:
            table.add_row(printable(rank.label), str(step.step), item.kind, _group(item), *_times(item))
    return table


def _group(item: CollectiveTime) -> str:
    return printable(item.group or "n/a (not in the trace)")


def _times(item: CollectiveTime) -> list[str]:
    return [str(item.calls), *(number(1e3 * value) for value in (item.total_s, item.exposed_s, item.hidden_s))]


def _names_table(rank: RankTrace) -> Table:
    what = "kernel" if rank.device == "gpu" else "operator"
    right = ("calls", "ms", "ms per step")
    table = result_table(f"Longest {what}s of {rank.label}, all steps", what, "kind", *right, right=right)
    for item in rank.names:
        name = item.name if len(item.name) <= LONGEST_NAME else f"{item.name[: LONGEST_NAME - 3]}..."
        milliseconds = item.total_ns / 1e6
        kind, calls = item.activity.value.replace("_", " "), str(item.calls)
        table.add_row(printable(name), kind, calls, number(milliseconds), number(milliseconds / len(rank.steps)))
    return table
