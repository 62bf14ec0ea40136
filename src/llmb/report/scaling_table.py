# SPDX-License-Identifier: Apache-2.0
"""Groups of parsed logs, and how recipes scale, as tables, as CSV and in JSON. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.analysis.parsed_scaling import RunGroup, Scaling, ScalingRow
from llmb.report.parse_report import VALUES, ParseReport, named_values, one_mfu
from llmb.report.table import Column, Table, as_text, csv_text, known, number_column, shortened, table_of


def _median_mfu(group: RunGroup) -> float | None:
    """MFU of the run whose mean is the median, or next to it."""
    by_mean = sorted(group.runs, key=lambda run: VALUES["time_mean_seconds"](run) or 0.0)
    return one_mfu(by_mean[len(by_mean) // 2])[0]


def _of_first(value: Callable[[AnalyzedRun], Any]) -> Callable[[RunGroup], Any]:
    return lambda group: value(group.first)


_RECIPE = ("workload", "size", "dtype", "gpu_type")
GROUP_VALUES: Mapping[str, Callable[[RunGroup], Any]] = {
    **{name: _of_first(VALUES[name]) for name in (*_RECIPE, "gpus", "layout", "program")},
    "identity": lambda group: group.first.key,
    "runs": lambda group: len(group.runs),
    "time_median_seconds": lambda group: group.run_means_s.median,
    "time_mean_seconds": lambda group: group.run_means_s.mean,
    "time_std_dev_seconds": lambda group: group.run_means_s.std,
    "spread_pct": lambda group: group.spread_pct,
    "mfu_pct": _median_mfu,
    "differs": lambda group: "; ".join(group.differs),
}
"""Groups in CSV."""


_PUBLISHED = ("published_s", "published_efficiency_pct", "published_days_per_1t_tokens", "published_source")
SCALE_VALUES: Mapping[str, Callable[[ScalingRow], Any]] = {
    "gpus": lambda row: row.gpus,
    "layout": lambda row: row.layout_text,
    "gbs": lambda row: row.gbs,
    "runs": lambda row: [run.id for run in row.group.runs] if row.group else [],
    "median_s": lambda row: row.step_time_s,
    "efficiency_pct": lambda row: row.efficiency_pct,
    "days_per_1t_tokens": lambda row: row.days_per_1t_tokens,
    "published_s": lambda row: row.published and row.published.step_time_s,
    "published_efficiency_pct": lambda row: row.published_efficiency_pct,
    "published_days_per_1t_tokens": lambda row: row.published and row.published.days_per_1t_tokens,
    "published_source": lambda row: row.published and row.published.source,
}
"""A scale in JSON; CSV has the number of runs, and units in words."""


def groups_table(report: ParseReport, groups: Sequence[RunGroup]) -> Table:
    columns: list[Column[RunGroup]] = [
        Column("recipe", lambda group: group.first.recipe_text or report.name(group.first)),
        number_column("GPUs", GROUP_VALUES["gpus"], as_text),
        Column("layout", GROUP_VALUES["layout"]),
        number_column("n", GROUP_VALUES["runs"], str),
        number_column("median (s)", GROUP_VALUES["time_median_seconds"]),
        number_column("spread (%)", GROUP_VALUES["spread_pct"]),
        number_column("MFU (%)", GROUP_VALUES["mfu_pct"]),
        Column("differs in", _differs, optional=True),
    ]
    table = table_of(f"Repeats, window {report.rule}", groups, columns)
    left_out = len(report.runs) - sum(len(group.runs) for group in groups)
    table.caption = "median of the runs' means; spread from the fastest to the slowest run, in percent of the median"
    if left_out:
        table.caption += f"\n{left_out} of {len(report.runs)} files are no success; without --group they are listed"
    return table


def _differs(group: RunGroup | None) -> str:
    return ", ".join(map(shortened, group.differs)) if group else ""


def groups_document(groups: Iterable[RunGroup]) -> list[dict[str, Any]]:
    return [
        {
            **named_values(group.first, *_RECIPE, "program", "gpus"),
            "layout": group.first.layout,
            "identity": group.first.key,
            "differs": list(group.differs),
            "runs": [run.id for run in group.runs],
            "run_means_s": [VALUES["time_mean_seconds"](run) for run in group.runs],
            "median_s": group.run_means_s.median,
            "std_s": group.run_means_s.std,
            "spread_pct": group.spread_pct,
            "mfu_pct": _median_mfu(group),
        }
        for group in groups
    ]


def groups_csv(groups: Iterable[RunGroup]) -> str:
    return csv_text(GROUP_VALUES, ({name: value(group) for name, value in GROUP_VALUES.items()} for group in groups))


def scaling_tables(report: ParseReport, scalings: Sequence[Scaling]) -> list[Table]:
    """One for each recipe."""
    if not scalings:
        why = "no log tells its recipe and its number of GPUs"
        return [Table(f"Scaling, window {report.rule}", [Column("")], caption=why)]
    return [_scaling_table(report, scaling) for scaling in scalings]


def _scaling_table(report: ParseReport, scaling: Scaling) -> Table:
    on = f" on {scaling.gpu_type}" if scaling.gpu_type else ""
    title = f"{scaling.recipe_text}{on}, {scaling.kind or 'one scale'}{' scaling' if scaling.kind else ''}"
    values, published = SCALE_VALUES, any(row.published for row in scaling.rows)
    columns: list[Column[ScalingRow]] = [
        number_column("GPUs", values["gpus"], str),
        Column("layout", values["layout"]),
        number_column("n", lambda row: row.group and len(row.group.runs), as_text),
        *_speed_columns("step (s)", "median_s", "efficiency_pct", "days_per_1t_tokens"),
        *(_speed_columns("publ. (s)", *_PUBLISHED[:3]) if published else ()),
        Column("differs in", lambda row: _differs(row.group), optional=True),
    ]
    table = table_of(f"{title}, window {report.rule}", scaling.rows, columns)
    notes = ["eff.: throughput of a GPU relative to that at the smallest scale; step: median of the runs' means"]
    if scaling.kind == "mixed":
        notes.append("the global batch size grows, but not with the GPUs")
    notes += [f"published: {source}" for source in _sources(scaling)]
    table.caption = "\n".join(notes)
    return table


def _speed_columns(time: str, *keys: str) -> Iterator[Column[ScalingRow]]:
    for header, key in zip((time, "eff. (%)", "days/1T"), keys, strict=True):
        yield number_column(header, SCALE_VALUES[key], known)


def _sources(scaling: Scaling) -> list[str]:
    figures = (row.published for row in scaling.rows)
    return list(dict.fromkeys(f"{one.source}, window {one.window}" for one in figures if one))


def scaling_document(scalings: Iterable[Scaling]) -> list[dict[str, Any]]:
    return [{**_recipe(scaling), "scales": [_scale(row) for row in scaling.rows]} for scaling in scalings]


def _recipe(scaling: Scaling) -> dict[str, Any]:
    return {
        "recipe": scaling.recipe_text,
        "gpu_type": scaling.gpu_type,
        "program": scaling.program,
        "scaling": scaling.kind,
    }


def _scale(row: ScalingRow) -> dict[str, Any]:
    return {name: value(row) for name, value in SCALE_VALUES.items()}


def scaling_csv(scalings: Iterable[Scaling]) -> str:
    renamed = {"median_s": "time_median_seconds", "published_s": "published_seconds"}
    names = ("recipe", "gpu_type", "program", "scaling", *(renamed.get(name, name) for name in SCALE_VALUES))
    rows = ({**_recipe(scaling), **_scale(row)} for scaling in scalings for row in scaling.rows)
    shown = ({renamed.get(name, name): value for name, value in row.items()} for row in rows)
    return csv_text(names, ({**row, "runs": len(row["runs"])} for row in shown))
