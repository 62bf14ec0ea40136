# SPDX-License-Identifier: Apache-2.0
"""The time of traced steps by activity, as tables, as a JSON document and as a picture."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from typing import Any

from llmb.report.numbers import number
from llmb.report.table import Table, result_table
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
COLORS = {
    "attention": "#0072b2",
    "matrix_product": "#009e73",
    "other": "#e69f00",
    "unclassified": "#f0e442",
    "cuda_graph": "#56b4e9",
    "memory_copy": "#cc79a7",
    "communication_exposed": "#d55e00",
    "idle": "#dddddd",
}
"""Distinguishable by colorblind people: https://jfly.uni-koeln.de/color/ (Okabe and Ito)."""
WHITE_ON = ("attention", "matrix_product", "communication_exposed")
"""Parts whose color is dark."""
HIDDEN_COLOR = "#d55e00"
HIDDEN_LEGEND = ("communication, hidden", HIDDEN_COLOR, 4)
WIDTH, LEFT, RIGHT = 1000, 190, 90
ROW, BAR, HIDDEN, TOP, BOTTOM = 30, 16, 4, 96, 20
NARROWEST_LABEL = 34
TICKS = 5
CHARACTERS = 24


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


def trace_picture(summary: TraceSummary) -> str:
    """One bar per step and rank, on a common scale, with a thin bar below for hidden communication."""
    rows = [(printable(rank.label), step) for rank in summary.ranks for step in rank.steps]
    parts = shown_parts(step for _, step in rows)
    longest = max(step.duration_s for _, step in rows)
    height = TOP + ROW * len(rows) + BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="26" font-size="16" font-weight="bold">Where the time of each step went</text>',
        *_legend(parts),
        *_axis(longest, height - BOTTOM),
    ]
    for index, (label, step) in enumerate(rows):
        lines += _bar(label, step, parts, longest, TOP + ROW * index)
    return "\n".join([*lines, "</svg>", ""])


def _length(seconds: float, longest: float) -> float:
    return (WIDTH - LEFT - RIGHT) * seconds / longest if longest else 0.0


def _legend(parts: Mapping[str, str]) -> Iterator[str]:
    x, y = 20.0, 38
    for name, color, height in (*((name, COLORS[part], 12) for part, name in parts.items()), HIDDEN_LEGEND):
        width = 36 + 6.9 * len(name)
        if x + width > WIDTH:
            x, y = 20.0, y + 18
        yield f'<rect x="{x:.1f}" y="{y + 6 - height // 2}" width="12" height="{height}" fill="{color}"/>'
        yield f'<text x="{x + 17:.1f}" y="{y + 10}">{name}</text>'
        x += width


def _axis(longest: float, bottom: float) -> Iterator[str]:
    for tick in range(TICKS + 1):
        seconds = longest * tick / TICKS
        x = LEFT + _length(seconds, longest)
        yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#666666">{number(1e3 * seconds)}</text>'
    yield f'<text x="{LEFT - 12}" y="{TOP - 14}" text-anchor="end" fill="#666666">milliseconds</text>'


def _bar(label: str, step: StepBreakdown, parts: Mapping[str, str], longest: float, y: float) -> Iterator[str]:
    short = label if len(label) <= CHARACTERS else f"{label[: CHARACTERS - 1]}…"
    yield f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end">{escape(short)}, step {step.step}</text>'
    x = float(LEFT)
    for part, name in parts.items():
        seconds = getattr(step, f"{part}_s")
        width = _length(seconds, longest)
        share = f"{100 * seconds / step.duration_s:.1f} %" if step.duration_s else ""
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{COLORS[part]}">'
            f"<title>{name}: {number(1e3 * seconds)} ms, {share}</title></rect>"
        )
        if width >= NARROWEST_LABEL:
            color = "#ffffff" if part in WHITE_ON else "#222222"
            text = f"{100 * seconds / step.duration_s:.0f} %"
            yield f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle" fill="{color}">{text}</text>'
        x += width
    hidden = _length(step.communication_hidden_s, longest)
    yield f'<rect x="{LEFT}" y="{y + BAR + 1}" width="{hidden:.2f}" height="{HIDDEN}" fill="{HIDDEN_COLOR}"/>'
    yield f'<text x="{x + 6:.2f}" y="{y + 12}">{number(1e3 * step.duration_s)} ms</text>'
