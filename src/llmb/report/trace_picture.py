# SPDX-License-Identifier: Apache-2.0
"""Traced steps as stacked bars in one self-contained SVG file. Pure."""

from collections.abc import Iterator, Mapping
from html import escape

from llmb.report.numbers import number
from llmb.report.trace_report import shown_parts
from llmb.shown_text import printable
from llmb.traces.breakdown import StepBreakdown
from llmb.traces.summary import TraceSummary

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


def _scale(seconds: float, longest: float) -> float:
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
        x = LEFT + _scale(seconds, longest)
        yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#666666">{number(1e3 * seconds)}</text>'
    yield f'<text x="{LEFT - 12}" y="{TOP - 14}" text-anchor="end" fill="#666666">milliseconds</text>'


def _bar(label: str, step: StepBreakdown, parts: Mapping[str, str], longest: float, y: float) -> Iterator[str]:
    short = label if len(label) <= CHARACTERS else f"{label[: CHARACTERS - 1]}…"
    yield f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end">{escape(short)}, step {step.step}</text>'
    x = float(LEFT)
    for part, name in parts.items():
        seconds = getattr(step, f"{part}_s")
        width = _scale(seconds, longest)
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
    hidden = _scale(step.communication_hidden_s, longest)
    yield f'<rect x="{LEFT}" y="{y + BAR + 1}" width="{hidden:.2f}" height="{HIDDEN}" fill="{HIDDEN_COLOR}"/>'
    yield f'<text x="{x + 6:.2f}" y="{y + 12}">{number(1e3 * step.duration_s)} ms</text>'
