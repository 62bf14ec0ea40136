# SPDX-License-Identifier: Apache-2.0
"""The time of traced steps by activity, as tables and as a JSON document."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.table import Table
from llmb.shown_text import printable
from llmb.traces.breakdown import CollectiveTime, StepBreakdown
from llmb.traces.summary import RankTrace, TraceSummary, shares
from llmb.traces.timeline import NameTime

PART_NAMES = {
    "attention": "attention",
    "matrix_product": "matrix products",
    "other": "other kernels",
    "unclassified": "unclassified kernels",
    "cuda_graph": "CUDA graphs, not split",
    "memory_copy": "memory copies",
    "communication_exposed": "communication, exposed",
    "idle": "idle",
}
RARE_PARTS = ("unclassified", "cuda_graph")
"""Not shown where they are 0."""
LONGEST_NAME = 90
MOST_NOTES = 5


def trace_document(summary: TraceSummary) -> dict[str, Any]:
    """The JSON document; null for what the trace does not have."""
    return {
        "ranks": [_rank_document(rank) for rank in summary.ranks],
        "slowest_rank": summary.slowest and asdict(summary.slowest),
    }


def _rank_document(rank: RankTrace) -> dict[str, Any]:
    return {
        "source": rank.source,
        "rank": rank.rank,
        "device": rank.device,
        "steps": [step_document(step) for step in rank.steps],
        "longest": [_name_document(item) for item in rank.names],
        "unclassified": [_name_document(item) for item in rank.unclassified],
        "notes": list(rank.notes),
    }


def _name_document(item: NameTime) -> dict[str, Any]:
    return {"name": item.name, "activity": item.activity, "calls": item.calls, "total_s": item.total_ns / 1e9}


def step_document(step: StepBreakdown) -> dict[str, Any]:
    values = asdict(step)
    del values["rank"]
    return {**values, "shares": shares(step)}


def trace_tables(summary: TraceSummary) -> Iterator[Table]:
    """Steps, collectives, the longest kernels of the first rank, and those kernels that no rule knows."""
    yield _steps_table(summary)
    if any(step.collectives for rank in summary.ranks for step in rank.steps):
        yield _collectives_table(summary)
    first = summary.ranks[0]
    yield _names_table(f"Longest {_what(first)}s of {printable(first.label)}, all steps", first, first.names)
    unknown = max(summary.ranks, key=lambda rank: sum(item.total_ns for item in rank.unclassified))
    if unknown.unclassified:
        title = f"Unclassified kernels of {printable(unknown.label)}, all steps"
        table = _names_table(title, unknown, unknown.unclassified)
        table.caption = "Their names are in no rule of llmb, so it is unknown what they do."
        yield table


def shown_parts(steps: Iterable[StepBreakdown]) -> dict[str, str]:
    """The parts to show of ``steps``, with their names."""
    whole = list(steps)
    return {
        part: name
        for part, name in PART_NAMES.items()
        if part not in RARE_PARTS or any(getattr(step, f"{part}_s") for step in whole)
    }


def _steps_table(summary: TraceSummary) -> Table:
    parts = shown_parts(step for rank in summary.ranks for step in rank.steps)
    headers = tuple(f"{name} %" for name in parts.values())
    right = ("step", "ms", *headers, "hidden communication ms", "longest idle ms")
    table = result_table("Where the time of each step went", "rank", *right, right=right)
    for rank in summary.ranks:
        for step in rank.steps:
            table.add_row(
                printable(rank.label),
                str(step.step),
                number(1e3 * step.duration_s),
                *(f"{100 * share:.1f}" for part, share in shares(step).items() if part in parts),
                number(1e3 * step.communication_hidden_s),
                number(1e3 * step.idle_longest_s),
            )
    table.caption = "\n".join([*_slowest(summary), *_notes(summary)]) or None
    return table


def _slowest(summary: TraceSummary) -> Iterator[str]:
    if slowest := summary.slowest:
        yield (
            f"Slowest: {printable(slowest.label)}, {number(1e3 * slowest.own_s)} ms per step without exposed"
            f" communication; the others {number(1e3 * slowest.others_own_s)} ms (median)."
        )


def _notes(summary: TraceSummary) -> list[str]:
    """What of the traces could not be read, with the ranks."""
    notes = [f"{printable(rank.label)}: {printable(note)}." for rank in summary.ranks for note in rank.notes]
    more = len(notes) - MOST_NOTES
    return notes[:MOST_NOTES] + ([f"{more} more notes, see --json."] if more > 0 else [])


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


def _what(rank: RankTrace) -> str:
    return "kernel" if rank.device == "gpu" else "operator"


def _names_table(title: str, rank: RankTrace, names: Iterable[NameTime]) -> Table:
    right = ("calls", "ms", "ms per step")
    table = result_table(title, _what(rank), "kind", *right, right=right)
    for item in names:
        name = item.name if len(item.name) <= LONGEST_NAME else f"{item.name[: LONGEST_NAME - 3]}..."
        milliseconds = item.total_ns / 1e6
        kind, calls = item.activity.value.replace("_", " "), str(item.calls)
        table.add_row(printable(name), kind, calls, number(milliseconds), number(milliseconds / len(rank.steps)))
    return table
