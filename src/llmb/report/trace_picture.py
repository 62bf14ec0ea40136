# SPDX-License-Identifier: Apache-2.0
"""Traced steps as stacked bars in one self-contained SVG file. Pure."""

from collections.abc import Iterator
from html import escape

from llmb.report.numbers import number
from llmb.report.trace_report import PART_NAMES
from llmb.traces.breakdown import StepBreakdown
from llmb.traces.summary import TraceSummary

COLORS = {
    "attention": "#0072b2",
    "matrix_product": "#009e73",
    "other": "#e69f00",
    "memory_copy": "#cc79a7",
    "communication_exposed": "#d55e00",
    "idle": "#dddddd",
}
"""Distinguishable by colorblind people: https://jfly.uni-koeln.de/color/ (Okabe and Ito)."""
HIDDEN_COLOR = "#d55e00"
WIDTH, LEFT, RIGHT = 1000, 190, 90
ROW, BAR, HIDDEN, TOP, BOTTOM = 30, 16, 4, 96, 20
NARROWEST_LABEL = 34
TICKS = 5
CHARACTERS = 24


def trace_picture(summary: TraceSummary) -> str:
    """One bar per step and rank, on a common scale, with a thin bar below for hidden communication."""
    rows = [(rank.label, step) for rank in summary.ranks for step in rank.steps]
    longest = max(step.duration_s for _, step in rows)
    height = TOP + ROW * len(rows) + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12" fill="#222222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="26" font-size="16" font-weight="bold">Where the time of each step went</text>',
        *_legend(),
        *_axis(longest, height - BOTTOM),
    ]
    for index, (label, step) in enumerate(rows):
        parts += _bar(label, step, longest, TOP + ROW * index)
    return "\n".join([*parts, "</svg>", ""])


def _scale(seconds: float, longest: float) -> float:
    return (WIDTH - LEFT - RIGHT) * seconds / longest if longest else 0.0


def _legend() -> Iterator[str]:
    x = 20.0
    for part, name in PART_NAMES.items():
        yield f'<rect x="{x:.1f}" y="42" width="12" height="12" fill="{COLORS[part]}"/>'
        yield f'<text x="{x + 17:.1f}" y="52">{name}</text>'
        x += 36 + 6.9 * len(name)
    yield f'<rect x="{x:.1f}" y="46" width="12" height="{HIDDEN}" fill="{HIDDEN_COLOR}"/>'
    yield f'<text x="{x + 17:.1f}" y="52">communication, hidden</text>'


def _axis(longest: float, bottom: float) -> Iterator[str]:
    for tick in range(TICKS + 1):
        seconds = longest * tick / TICKS
        x = LEFT + _scale(seconds, longest)
        yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#eeeeee"/>'
        yield f'<text x="{x:.1f}" y="{TOP - 14}" text-anchor="middle" fill="#666666">{number(1e3 * seconds)}</text>'
    yield f'<text x="{LEFT - 12}" y="{TOP - 14}" text-anchor="end" fill="#666666">milliseconds</text>'


def _bar(label: str, step: StepBreakdown, longest: float, y: float) -> Iterator[str]:
    short = label if len(label) <= CHARACTERS else f"{label[: CHARACTERS - 1]}…"
    yield f'<text x="{LEFT - 12}" y="{y + 12}" text-anchor="end">{escape(short)}, step {step.step}</text>'
    x = float(LEFT)
    for part, name in PART_NAMES.items():
        seconds = getattr(step, f"{part}_s")
        width = _scale(seconds, longest)
        share = f"{100 * seconds / step.duration_s:.1f} %" if step.duration_s else ""
        yield (
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{COLORS[part]}">'
            f"<title>{name}: {number(1e3 * seconds)} ms, {share}</title></rect>"
        )
        if width >= NARROWEST_LABEL:
            color = "#222222" if part in ("idle", "other", "memory_copy") else "#ffffff"
            text = f"{100 * seconds / step.duration_s:.0f} %"
            yield f'<text x="{x + width / 2:.2f}" y="{y + 12}" text-anchor="middle" fill="{color}">{text}</text>'
        x += width
    hidden = _scale(step.communication_hidden_s, longest)
    yield f'<rect x="{LEFT}" y="{y + BAR + 1}" width="{hidden:.2f}" height="{HIDDEN}" fill="{HIDDEN_COLOR}"/>'
    yield f'<text x="{x + 6:.2f}" y="{y + 12}">{number(1e3 * step.duration_s)} ms</text>'
