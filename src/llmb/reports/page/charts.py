# SPDX-License-Identifier: Apache-2.0
"""Draws each kind of plot with matplotlib, as PNG, or as SVG in fixed colors that a page replaces with its own."""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from llmb.base.errors import EnvironmentProblem, pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

    from llmb.readers.anomalies import Level
    from llmb.runs.result import Interval

INK, MUTED, GRID, PAPER = "#222222", "#666666", "#dddddd", "#ffffff"
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7"
"""Colors that colorblind people can distinguish: https://jfly.uni-koeln.de/color/ (Okabe and Ito)."""
NAMED = {INK: "ink", MUTED: "muted", GRID: "grid", PAPER: "paper"}
NAMED |= {BLUE: "blue", ORANGE: "orange", GREEN: "green", RED: "red", PURPLE: "purple"}
"""The variables of the page's style that replace the colors."""
WIDTH, HEIGHT, UNITS_PER_INCH = 480, 200, 72
STYLE = Path(__file__).with_name("templates") / "plots.mplstyle"


@dataclass(frozen=True, slots=True)
class Drawing:
    """A plot. Its methods draw it deterministically, and raise EnvironmentProblem if matplotlib is not installed."""

    name: str
    """A name that is unique on a page, because the names inside the SVG derive from it."""
    draw: Callable[["Canvas"], None]
    height: int = HEIGHT

    def svg(self) -> str:
        target = io.BytesIO()
        with self._canvas() as canvas:
            canvas.savefig(target, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return slim(target.getvalue().decode())

    def png(self, shown: Callable[[str], str]) -> bytes:
        """Return a PNG with a white background, large enough for slides. ``shown`` is applied to every text."""
        target = io.BytesIO()
        with self._canvas() as canvas:
            _replace_texts(canvas, shown)
            canvas.savefig(target, format="png", dpi=4 * UNITS_PER_INCH, facecolor=PAPER)
        return target.getvalue()

    @contextmanager
    def _canvas(self) -> Iterator["Canvas"]:
        try:
            from matplotlib import rc_context
        except ImportError as error:
            do = pip_install("report")
            raise EnvironmentProblem("plots need matplotlib, which is not installed", do=do) from error
        with rc_context({"svg.hashsalt": self.name}, STYLE):
            from matplotlib.figure import Figure

            size = (WIDTH / UNITS_PER_INCH, self.height / UNITS_PER_INCH)
            canvas = Figure(figsize=size, dpi=UNITS_PER_INCH, layout="constrained")
            self.draw(canvas)
            yield canvas


def _replace_texts(canvas: "Canvas", shown: Callable[[str], str]) -> None:
    from matplotlib.text import Text

    for axis in (axis for plot in canvas.axes for axis in (plot.xaxis, plot.yaxis)):
        labels = [label.get_text() for label in axis.get_ticklabels()]
        if (replaced := [shown(label) for label in labels]) != labels:
            axis.set_ticks(axis.get_ticklocs(), replaced)  # each drawing resets the texts of ticks
    for text in canvas.findobj(Text):
        text.set_text(shown(text.get_text()))


def slim(svg: str) -> str:
    """Return the SVG element without unused names, its own style sheet, or details too small to see."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>|<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r'(<svg )[^>]*?(viewBox="[^"]*")[^>]*>', r'\1xmlns="http://www.w3.org/2000/svg" \2>', svg, count=1)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"(font-size: [\d.]+px; )font-family: [^;\"]*;? ?", r"\1", svg)
    svg = re.sub(
        r"<[^>]+>",
        lambda tag: re.sub(r"\d+\.\d{3,}", lambda digits: f"{float(digits[0]):.2f}".rstrip("0").rstrip("."), tag[0]),
        svg,
    )
    return re.sub(r"\s*\n\s*", "\n", svg).strip()


def themed(svg: str) -> str:
    """Replace the fixed colors with the variables of the page's style."""
    for color, variable in NAMED.items():
        svg = svg.replace(color, f"var(--{variable})")
    return svg


def standalone(svg: str) -> str:
    """Return the SVG as the content of a separate file, with a white background."""
    head = svg.index(">") + 1
    font = "<style>text { font-family: sans-serif } * { stroke-linejoin: round }</style>"
    return f'{svg[:head]}{font}<rect width="100%" height="100%" fill="{PAPER}"/>{svg[head:]}\n'


ANY_PAPER = "#d55f00"
"""The color of images, which a page cannot replace; it is visible on light and on dark backgrounds."""
MOST_POINTS = 1000
"""Maximum number of points; of longer series, the smallest and the largest value of each bin are drawn."""
ABOVE: Mapping[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "ncols": 4,
    "borderpad": 0.1,
    "handlelength": 1.2,
    "columnspacing": 1,
}
"""The place of a legend above the plot, where it covers nothing."""
PUBLISHED, PREDICTED = "published", "predicted"
BESIDE: Mapping[str, tuple[str, str, float, tuple[float, ...]]] = {
    PREDICTED: (PURPLE, "P", 12, (5, 1.5, 1, 1.5)),
    PUBLISHED: (ORANGE, "D", 6, (1, 1.5)),
}
"""Color, mark, mark size, and dashes of values that were not measured; the smaller mark is on top."""
MOST_LABELS, MOST_LARGE = 4, 50
STRONGEST_PCT = (5.0, 50.0)


@dataclass(frozen=True, slots=True)
class Marked:
    """Points of a series that are marked with a shape."""

    label: str
    shape: str
    color: str
    points: Sequence[tuple[float, float]]
    size: float = 7


@dataclass(frozen=True, slots=True)
class Line:
    """A series of points, sorted by x."""

    label: str
    color: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value, with its interval if there is one."""

    label: str
    value: float
    interval: "Interval | None"


def thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """Reduce a series to at most ``MOST_POINTS`` points: the smallest and the largest value of each bin, in order."""
    if len(points) <= MOST_POINTS:
        return points
    bins = MOST_POINTS // 2
    edges = [number * len(points) // bins for number in range(bins + 1)]
    kept = []
    for first, last in pairwise(edges):
        part = points[first:last]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept


def series_chart(
    name: str,
    lines: Sequence[Line],
    axes: tuple[str, str],
    *,
    marked: Sequence[Marked] = (),
    window: tuple[float, float] | None = None,
    level: float | None = None,
    beside: Mapping[str, float] = MappingProxyType({}),
    doubling: bool = False,
) -> Drawing:
    """Plot lines over steps or GPUs. ``axes`` are the titles of x and y; ``window`` is shaded, ``level`` is drawn as a
    dashed line, and each value in ``beside`` as a line in its own style.

    With ``doubling``, the x axis is logarithmic, with a tick at each point.
    """

    def draw(canvas: "Canvas") -> None:
        from matplotlib.ticker import MaxNLocator

        plot = canvas.add_subplot()
        if window:
            plot.axvspan(*window, color=BLUE, alpha=0.1, linewidth=0)
        if level is not None:
            plot.axhline(level, color=INK, linewidth=0.8, dashes=(4, 3))
        for kind, value in beside.items():
            color, _, _, dashes = BESIDE[kind]
            plot.axhline(value, color=color, linewidth=1.6, dashes=dashes, label=kind)
        drawn = [*(line.points for line in lines), *(one.points for one in marked)]
        for line in lines:
            x, y = _coordinates(thinned(line.points))
            plot.plot(x, y, "-" if len(x) > 1 else "o", color=line.color, label=line.label)
        for one in marked:
            x, y = _coordinates(one.points)
            size = one.size
            plot.plot(x, y, one.shape, color=one.color, label=one.label, ms=size, markeredgecolor=PAPER, zorder=3)
        if doubling:
            x, y = _coordinates([point for points in drawn for point in points])
            plot.set_xscale("log", base=2)
            plot.set_xticks(sorted({*x}), [f"{place:g}" for place in sorted({*x})])
            plot.set_ylim(0, 1.1 * max(y))
        else:
            plot.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
        _name_axes(plot, axes)
        if len(lines) + len(marked) + len(beside) > 1:
            plot.legend(**ABOVE)

    return Drawing(name, draw)


def _coordinates(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def history_chart(
    name: str, estimates: Sequence[Estimate], colors: Sequence[str], changes: Sequence[str], levels: Sequence["Level"]
) -> Drawing:
    """Plot values and intervals from left to right; mark changes with dotted lines, and several levels with solid
    lines.

    The last value is labeled, and up to ``MOST_LABELS`` - 1 earlier values at equal distances."""

    def draw(canvas: "Canvas") -> None:
        plot, count = canvas.add_subplot(), len(estimates)
        size = 6 if count <= MOST_LARGE else 3
        for color in dict.fromkeys(colors):
            places = [place for place in range(count) if colors[place] == color]
            some = [estimates[place] for place in places]
            errors = [
                [abs(one.interval[end] - one.value) if one.interval else math.nan for one in some] for end in (0, 1)
            ]
            values = [one.value for one in some]
            plot.errorbar(places, values, yerr=errors, fmt="o", color=color, markersize=size, markeredgecolor=PAPER)
        for place, change in enumerate(changes):
            if change:
                plot.axvline(place - 0.5, color=PURPLE, linewidth=1, dashes=(2, 2))
        for before, after in pairwise(levels):
            mark = "v" if after.mean_s > before.mean_s else "^"
            middle = (before.mean_s * after.mean_s) ** 0.5
            plot.plot(after.runs.start - 0.5, middle, mark, color=RED, markersize=9, markeredgecolor=PAPER, zorder=3)
        for level in levels if len(levels) > 1 else ():
            plot.hlines(level.mean_s, level.runs.start - 0.5, level.runs.stop - 0.5, color=INK, linewidth=1)
        _name_axes(plot, ("runs, the newest last", "step time, s"))
        labeled = range(count - 1, -1, -math.ceil(count / MOST_LABELS))
        plot.set_xticks(labeled, [estimates[place].label for place in labeled])
        plot.set_xlim(-0.5, count - 0.5)

    return Drawing(name, draw)


def parts_chart(name: str, parts: Sequence[tuple[str, str, float]]) -> Drawing:
    """Plot the parts of a step (name, color, percent) as horizontal bars, each with its name and value."""

    def draw(canvas: "Canvas") -> None:
        plot, places = canvas.add_subplot(), range(len(parts))
        plot.barh(places, [value for _, _, value in parts], color=[color for _, color, _ in parts], height=0.7)
        for place, (_, _, value) in enumerate(parts):
            plot.annotate(f"{value:.1f}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=10)
        plot.set_yticks(places, [label for label, _, _ in parts])
        plot.set_ylim(len(parts) - 0.5, -0.5)
        plot.set_xlabel("% of the step")
        plot.grid(visible=False, axis="y")
        plot.margins(x=0.1)

    return Drawing(name, draw, 60 + 22 * len(parts))


def grid_chart(
    name: str, rows: Sequence[Sequence[float]], extent: tuple[float, float, float, float], axes: tuple[str, str]
) -> Drawing:
    """Plot values as shades of one color, visible on any background; values of 0 or less are transparent.

    ``extent`` is left, right, bottom and top. The strongest shade begins at the 99th percentile, limited to the range
    ``STRONGEST_PCT``, so that noise stays faint.
    """
    ordered = sorted(value for row in rows for value in row)
    least, most = STRONGEST_PCT
    strongest = min(most, max(least, ordered[len(ordered) * 99 // 100]))

    def draw(canvas: "Canvas") -> None:
        import numpy as np
        from matplotlib.colors import to_rgb
        from matplotlib.patches import Patch
        from matplotlib.ticker import MaxNLocator

        plot = canvas.add_subplot()
        image = np.zeros((len(rows), len(rows[0]), 4))
        image[..., :3] = to_rgb(ANY_PAPER)
        image[..., 3] = np.clip(np.array(rows) / strongest, 0, 1)
        plot.imshow(image, aspect="auto", extent=extent, interpolation="none")
        texts = {shade: f"{strongest * shade:.2g} %" for shade in (0.25, 0.5)} | {1.0: f"{strongest:.2g} % or more"}
        handles = [Patch(color=ANY_PAPER, alpha=shade, label=text) for shade, text in texts.items()]
        plot.legend(handles=handles, **ABOVE)
        plot.grid(visible=False)
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        _name_axes(plot, axes)

    return Drawing(name, draw)


def _name_axes(plot: "Axes", axes: tuple[str, str]) -> None:
    """Name the axes. The y axis does not extend below 0, because no plotted value is negative."""
    plot.set_xlabel(axes[0])
    plot.set_ylabel(axes[1])
    if plot.get_ylim()[0] < 0 and not plot.yaxis_inverted():
        plot.set_ylim(bottom=0)
