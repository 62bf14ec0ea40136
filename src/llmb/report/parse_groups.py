# SPDX-License-Identifier: Apache-2.0
"""Repeats and scaling of parsed runs, as tables, as CSV and as JSON. Pure."""

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from llmb.analysis.parsed_groups import RunGroup
from llmb.analysis.parsed_scaling import Scaling, ScalingRow
from llmb.report.numbers import number
from llmb.report.output import result_table
from llmb.report.parse_report import ParseReport, figures_of, one_mfu
from llmb.report.table import Table
from llmb.report.values import shortened
from llmb.shown_text import printable

GROUP_COLUMNS = (
    *("workload", "size", "dtype", "gpu_type", "gpus", "layout", "program", "identity", "runs"),
    *("time_median_seconds", "time_mean_seconds", "time_std_dev_seconds", "spread_pct", "mfu_pct", "differs"),
)
SCALING_COLUMNS = (
    *("recipe", "gpu_type", "program", "scaling", "gpus", "layout", "gbs", "runs", "time_median_seconds"),
    *("efficiency_pct", "days_per_1t_tokens", "published_seconds", "published_efficiency_pct"),
    *("published_days_per_1t_tokens", "published_source"),
)


def groups_table(report: ParseReport, groups: Sequence[RunGroup]) -> Table:
    right = ("GPUs", "n", "median (s)", "spread (%)", "MFU (%)")
    differs = ("differs in",) if any(group.differs for group in groups) else ()
    columns = ("recipe", "GPUs", "layout", "n", "median (s)", "spread (%)", "MFU (%)", *differs)
    table = result_table(f"Repeats, window {report.rule}", *columns, right=right)
    for group in groups:
        run = group.first
        cells = (
            run.recipe_text or printable(report.name(run)),
            "" if run.gpus is None else str(run.gpus),
            run.layout_text,
            str(len(group.runs)),
            number(group.run_means_s.median),
            number(group.spread_pct),
            number(_median_mfu(group)),
        )
        table.add_row(*cells, *([_differs(group)] if differs else []))
    left_out = len(report.runs) - sum(len(group.runs) for group in groups)
    table.caption = "median of the runs' means; spread from the fastest to the slowest run, in percent of the median"
    if left_out:
        table.caption += f"\n{left_out} of {len(report.runs)} files are no success; without --group they are listed"
    return table


def _differs(group: RunGroup) -> str:
    return ", ".join(map(shortened, group.differs))


def _median_mfu(group: RunGroup) -> float | None:
    """Of the run whose mean is the median, or next to it."""
    by_mean = sorted(group.runs, key=lambda run: figures_of(run.outcome.step_time_s, "mean")[0] or 0.0)
    return one_mfu(by_mean[len(by_mean) // 2])[0]


def groups_document(groups: Iterable[RunGroup]) -> list[dict[str, Any]]:
    return [
        {
            **{key: group.first.text(key) for key in ("workload", "size", "dtype", "gpu_type", "program")},
            "gpus": group.first.gpus,
            "layout": group.first.layout,
            "identity": group.first.key,
            "differs": list(group.differs),
            "runs": [run.id for run in group.runs],
            "run_means_s": [figures_of(run.outcome.step_time_s, "mean")[0] for run in group.runs],
            "median_s": group.run_means_s.median,
            "std_s": group.run_means_s.std,
            "spread_pct": group.spread_pct,
            "mfu_pct": _median_mfu(group),
        }
        for group in groups
    ]


def groups_csv(groups: Iterable[RunGroup]) -> str:
    return _csv(GROUP_COLUMNS, map(_group_row, groups))


def _group_row(group: RunGroup) -> list[object]:
    run, means = group.first, group.run_means_s
    return [
        *map(run.text, ("workload", "size", "dtype", "gpu_type")),
        run.gpus,
        run.layout_text,
        run.text("program"),
        run.key,
        len(group.runs),
        *(means.median, means.mean, means.std, group.spread_pct),
        _median_mfu(group),
        "; ".join(group.differs),
    ]


def scaling_tables(report: ParseReport, scalings: Sequence[Scaling]) -> list[Table]:
    """One for each recipe."""
    if not scalings:
        table = result_table(f"Scaling, window {report.rule}", "")
        table.caption = "no log tells its recipe and its number of GPUs"
        return [table]
    return [_scaling_table(report, scaling) for scaling in scalings]


def _scaling_table(report: ParseReport, scaling: Scaling) -> Table:
    published = any(row.published for row in scaling.rows)
    measured = ("GPUs", "n", "step (s)", "eff. (%)", "days/1T")
    others = ("publ. (s)", "eff. (%)", "days/1T") if published else ()
    on = f" on {scaling.gpu_type}" if scaling.gpu_type else ""
    title = f"{scaling.recipe_text}{on}, {scaling.kind or 'one scale'}{' scaling' if scaling.kind else ''}"
    differs = ("differs in",) if any(row.group and row.group.differs for row in scaling.rows) else ()
    columns = ("GPUs", "layout", *measured[1:], *others, *differs)
    table = result_table(f"{title}, window {report.rule}", *columns, right=(*measured, *others))
    for row in scaling.rows:
        figures = row.published
        shown = (row.step_time_s, row.efficiency_pct, row.days_per_1t_tokens)
        printed = (
            figures and figures.step_time_s,
            row.published_efficiency_pct,
            figures and figures.days_per_1t_tokens,
        )
        cells = [number(value) if value is not None else "" for value in (*shown, *(printed if published else ()))]
        cells += [_differs(row.group) if row.group else ""] if differs else []
        table.add_row(str(row.gpus), row.layout_text, str(len(row.group.runs)) if row.group else "", *cells)
    notes = ["eff.: throughput of a GPU relative to that at the smallest scale; step: median of the runs' means"]
    if scaling.kind == "mixed":
        notes.append("the global batch size grows, but not with the GPUs")
    notes += [f"published: {source}" for source in _sources(scaling)]
    table.caption = "\n".join(notes)
    return table


def _sources(scaling: Scaling) -> list[str]:
    figures = (row.published for row in scaling.rows)
    return list(dict.fromkeys(f"{one.source}, window {one.window}" for one in figures if one))


def scaling_document(scalings: Iterable[Scaling]) -> list[dict[str, Any]]:
    return [
        {
            "recipe": scaling.recipe_text,
            "gpu_type": scaling.gpu_type,
            "program": scaling.program,
            "scaling": scaling.kind,
            "scales": [_scale(row) for row in scaling.rows],
        }
        for scaling in scalings
    ]


def _scale(row: ScalingRow) -> dict[str, Any]:
    figure = row.published
    return {
        "gpus": row.gpus,
        "layout": row.layout_text,
        "gbs": row.gbs,
        "runs": [run.id for run in row.group.runs] if row.group else [],
        "median_s": row.step_time_s,
        "efficiency_pct": row.efficiency_pct,
        "days_per_1t_tokens": row.days_per_1t_tokens,
        "published_s": figure and figure.step_time_s,
        "published_efficiency_pct": row.published_efficiency_pct,
        "published_days_per_1t_tokens": figure and figure.days_per_1t_tokens,
        "published_source": figure and figure.source,
    }


def scaling_csv(scalings: Iterable[Scaling]) -> str:
    return _csv(SCALING_COLUMNS, (_scaling_row(one, row) for one in scalings for row in one.rows))


def _scaling_row(scaling: Scaling, row: ScalingRow) -> list[object]:
    values = _scale(row)
    count = len(values.pop("runs"))
    ahead = [scaling.recipe_text, scaling.gpu_type, scaling.program, scaling.kind]
    return [*ahead, *(values[key] for key in ("gpus", "layout", "gbs")), count, *list(values.values())[3:]]


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
