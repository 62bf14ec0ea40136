# SPDX-License-Identifier: Apache-2.0
"""A plot as SVG, drawn by matplotlib in a few fixed colors, which a page replaces by its own."""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmb.errors import EnvironmentProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INK, MUTED, GRID, PAPER = "#222222", "#666666", "#dddddd", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7"
"""Distinguishable by colorblind people: https://jfly.uni-koeln.de/color/ (Okabe and Ito)."""
NAMED = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"} | {
    BLUE: "blue",
    ORANGE: "orange",
    GREEN: "green",
    RED: "red",
    PURPLE: "purple",
}
"""The variables of the page's style that the colors become."""
WIDTH, HEIGHT, UNITS_PER_INCH = 480, 200, 72
STYLE: Mapping[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "text.parse_math": False,
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """A plot that is drawn when it is asked for, equal for equal data. Raises EnvironmentProblem without matplotlib."""

    name: str
    """Unique on a page, as the names inside of the SVG derive from it."""
    draw: Callable[["Canvas"], None]
    height: int = HEIGHT

    def svg(self) -> str:
        target = io.BytesIO()
        with self._canvas() as canvas:
            canvas.savefig(target, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return slim(target.getvalue().decode())

    def png(self) -> bytes:
        """On white, large enough for slides."""
        target = io.BytesIO()
        with self._canvas() as canvas:
            canvas.savefig(target, format="png", dpi=4 * UNITS_PER_INCH, facecolor=PAPER)
        return target.getvalue()

    @contextmanager
    def _canvas(self) -> Iterator["Canvas"]:
        with _style(self.name):
            from matplotlib.figure import Figure

            size = (WIDTH / UNITS_PER_INCH, self.height / UNITS_PER_INCH)
            canvas = Figure(figsize=size, dpi=UNITS_PER_INCH, layout="constrained")
            self.draw(canvas)
            yield canvas


def _style(salt: str) -> AbstractContextManager[None]:
    try:
        from matplotlib import rc_context
    except ImportError as error:
        do = "install it: pip install 'llmb[report]', in a clone pip install -e '.[report]'"
        raise EnvironmentProblem("plots need matplotlib, which is not installed", do=do) from error
    style: AbstractContextManager[None] = rc_context({**STYLE, "svg.hashsalt": salt})
    return style


def slim(svg: str) -> str:
    """The SVG element alone, without unused names, its own style sheet, and digits that are too small to see."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'(<svg )[^>]*?(viewBox="[^"]*")[^>]*>', r'\1xmlns="http://www.w3.org/2000/svg" \2>', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"(font-size: [\d.]+px; )font-family: [^;\"]*;? ?", r"\1", svg)
    svg = re.sub(r"<[^>]+>", lambda tag: re.sub(r"\d+\.\d{3,}", _rounded, tag[0]), svg)
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def _rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.2f}".rstrip("0").rstrip(".")


def themed(svg: str) -> str:
    """With the variables of the page's style in place of colors."""
    for color, variable in NAMED.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def standalone(svg: str) -> str:
    """A file of its own, on white."""
    head = svg.index(">") + 1
    font = "<style>text { font-family: sans-serif } * { stroke-linejoin: round }</style>"
    return f'{svg[:head]}{font}<rect width="100%" height="100%" fill="{PAPER}"/>{svg[head:]}\n'
