# SPDX-License-Identifier: Apache-2.0
"""The map of a run's ranks: how much longer each one computed than the others, step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.missing import Missing
from llmb.page.charts import grid_chart
from llmb.page.figure import NO_STEPS, STEP, Figure
from llmb.report.table import Table, number, result_table
from llmb.runs.folder import RunFolder
from llmb.runs.rank_times import RankTimes, read_rank_times
from llmb.runs.record_file import BrokenRecord

MOST_ROWS, MOST_COLUMNS = 64, 240
"""The size of the map: rows of two pixels are still seen."""
MOST_LISTED = 100
"""Ranks in the table, the slowest first."""
STANDS_OUT_PCT = 1.0


@dataclass(frozen=True, slots=True)
class _Rank:
    """Percent are beyond the median rank of a step."""

    number: int
    layer_us: float
    typical_pct: float
    longest_pct: float
    longest_step: int
    slowest_share: float
    """In how many of the steps it was the slowest."""


def ranks_figure(section: str, run: AnalyzedRun) -> Figure | Missing:
    if run.record is None or run.recipe is None:
        return Missing(NO_STEPS)
    if run.recipe.layout.gpus < 2:
        return Missing("the run has one rank")
    try:
        lines = read_rank_times(RunFolder(run.path).rank_times)
    except (OSError, BrokenRecord) as error:
        return Missing(f"their times cannot be read: {error}")
    if not lines:
        return Missing("the times of single ranks were not recorded")
    if {len(line.layer_us) for line in lines} != {run.recipe.layout.gpus}:
        return Missing(f"their times are not those of the run's {run.recipe.layout.gpus} ranks")
    beyond = [_beyond_pct(line.layer_us) for line in lines]
    ranks = sorted(_ranks(lines, beyond), key=lambda rank: -rank.typical_pct)
    name = f"ranks-{section}"
    rows, columns = _groups(len(ranks), MOST_ROWS), _groups(len(lines), MOST_COLUMNS)
    grid = [[max(beyond[step][rank] for step in column for rank in row) for column in columns] for row in rows]
    extent = (lines[0].first_step - 0.5, lines[-1].last_step + 0.5, len(ranks) - 0.5, -0.5)
    drawing = grid_chart(name, grid, extent, (STEP, "rank"))
    caption = "; ".join(
        [
            "forward pass of a layer, beyond the median rank of the step",
            _slowest_text(ranks[0]),
            *([f"a row: the slowest of {len(rows[0])} ranks"] if len(rows[0]) > 1 else []),
            *([f"a column: the slowest of {len(columns[0])} steps"] if len(columns[0]) > 1 else []),
        ]
    )
    return Figure(name, "Ranks", caption, drawing, _ranks_table(run.id, ranks))


def _beyond_pct(layer_us: Sequence[float]) -> list[float]:
    middle = median_low(layer_us)
    return [100 * (value / middle - 1) if middle > 0 else 0.0 for value in layer_us]


def _ranks(lines: Sequence[RankTimes], beyond: Sequence[Sequence[float]]) -> list[_Rank]:
    slowest = [max(range(len(values)), key=values.__getitem__) for values in beyond]
    found = []
    for rank in range(len(beyond[0])):
        values = [step[rank] for step in beyond]
        place = max(range(len(values)), key=values.__getitem__)
        found.append(
            _Rank(
                number=rank,
                layer_us=median(line.layer_us[rank] for line in lines),
                typical_pct=median(values),
                longest_pct=values[place],
                longest_step=lines[place].first_step,
                slowest_share=slowest.count(rank) / len(slowest),
            )
        )
    return found


def _groups(count: int, most: int) -> list[range]:
    """As few consecutive places in each as leave at most ``most`` groups."""
    size = math.ceil(count / most)
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _slowest_text(rank: _Rank) -> str:
    share = f"and the slowest in {100 * rank.slowest_share:.0f} % of the steps"
    if rank.typical_pct < STANDS_OUT_PCT:
        return f"no rank stands out: rank {rank.number} is {number(rank.typical_pct)} % beyond it in most steps"
    return f"rank {rank.number} is {number(rank.typical_pct)} % beyond it in a typical step, {share}"


def _ranks_table(run: str, ranks: Sequence[_Rank]) -> Table:
    headers = ("rank", "median ms", "beyond the others %", "at most %", "in step", "slowest in % of steps")
    table = result_table(f"Forward pass of a layer by rank, run {run}, the slowest first", *headers, right=headers)
    for rank in ranks[:MOST_LISTED]:
        table.add_row(
            str(rank.number),
            number(rank.layer_us / 1000),
            f"{rank.typical_pct:+.2f}",
            f"{rank.longest_pct:+.2f}",
            str(rank.longest_step),
            f"{100 * rank.slowest_share:.0f}",
        )
    if len(ranks) > MOST_LISTED:
        table.caption = f"the {MOST_LISTED} slowest of {len(ranks):,}; rank_times.jsonl has all, step by step"
    return table
