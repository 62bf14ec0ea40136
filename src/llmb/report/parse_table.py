# SPDX-License-Identifier: Apache-2.0
"""Parsed logs as tables: the runs with figures, and those without. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmb.analysis.parsed_run import ParsedRun
from llmb.analysis.parsed_scaling import RunGroup, Scaling, ScalingRow
from llmb.catalogue.records import Window
from llmb.metrics.anomalies import Anomalies
from llmb.report.parse_report import VALUES, ParseReport, date_of, known_times, named_values, one_mfu
from llmb.report.table import (
    Column,
    Table,
    as_text,
    csv_text,
    interval_of,
    known,
    number,
    number_column,
    shortened,
    table_of,
)


def _median_mfu(group: RunGroup) -> float | None:
    """MFU of the run whose mean is the median, or next to it."""
    by_mean = sorted(group.runs, key=lambda run: VALUES["time_mean_seconds"](run) or 0.0)
    return one_mfu(by_mean[len(by_mean) // 2])[0]


def _of_first(value: Callable[[ParsedRun], Any]) -> Callable[[RunGroup], Any]:
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
    return csv_text(GROUP_VALUES, groups)


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
    return [
        {
            "recipe": scaling.recipe_text,
            "gpu_type": scaling.gpu_type,
            "program": scaling.program,
            "scaling": scaling.kind,
            "scales": [{key: value(row) for key, value in SCALE_VALUES.items()} for row in scaling.rows],
        }
        for scaling in scalings
    ]


def scaling_csv(scalings: Iterable[Scaling]) -> str:
    columns: dict[str, Callable[[tuple[Scaling, ScalingRow]], Any]] = {
        "recipe": lambda pair: pair[0].recipe_text,
        "gpu_type": lambda pair: pair[0].gpu_type,
        "program": lambda pair: pair[0].program,
        "scaling": lambda pair: pair[0].kind,
    }
    names = {"median_s": "time_median_seconds", "published_s": "published_seconds"}
    columns |= {names.get(key, key): _of_row(value) for key, value in SCALE_VALUES.items()}
    columns["runs"] = lambda pair: len(SCALE_VALUES["runs"](pair[1]))
    return csv_text(columns, ((scaling, row) for scaling in scalings for row in scaling.rows))


def _of_row(value: Callable[[ScalingRow], Any]) -> Callable[[tuple[Scaling, ScalingRow]], Any]:
    return lambda pair: value(pair[1])


MOST_NOTES = 8
"""Below the table; in the wide table every run has its note."""
_REASON_WIDTH = 44
_JOB = re.compile(r"_(\d+(?:_\d{1,2})?)$")
_DATE_LETTERS = len("2026-11-20 10:15")


def parse_tables(report: ParseReport, *, wide: bool) -> list[Table]:
    """Runs with figures, and below them the files without, with the reason; the counts are below the last table."""
    measured = [run for run in report.runs if run.outcome.step_time_s]
    others = [run for run in report.runs if not run.outcome.step_time_s and (wide or not _is_hidden(run))]
    tables = [_measured_table(report, measured, wide=wide)] if measured else []
    tables += [_others_table(report, others)] if others or not measured else []
    counted = [f"{count} {status}" for status, count in report.counts.items() if count or status == "success"]
    files = "file" if len(report.runs) == 1 else "files"
    caption = f"{', '.join(counted)} ({len(report.runs)} {files})"
    if not wide and any(map(_is_hidden, report.runs)):
        caption += "\n--wide lists what is not a training log, too"
    last = tables[-1]
    last.caption = f"{last.caption}\n{caption}" if last.caption else caption
    return tables


def _measured_table(report: ParseReport, runs: Sequence[ParsedRun], *, wide: bool) -> Table:
    jobs = _jobs(report)
    ids = {run.file.path: jobs.get(run.file.path, run.id) for run in runs}
    columns = _wide_columns(report) if wide else _columns(report, ids)
    table = table_of(f"Step times, window {report.rule}", runs, columns)
    conventions = sorted({convention for run in runs if (convention := one_mfu(run)[1])})
    notes = [f"MFU: FLOPs counted by the convention {' or '.join(conventions)}"] if conventions else []
    assumed = sum(run.layout_source == "recipe" for run in runs)
    notes += [f"layout of {assumed} of these logs: not reported, that of the recipe is assumed"] if assumed else []
    coarse = sum(run.outcome.clock_error_s is not None for run in runs)
    notes += (
        [f"±: the clock of {coarse} of these logs shows whole seconds; the spread of steps is unknown"]
        if coarse
        else []
    )
    unknown = sum(run.gpus is None and run.node_count is not None for run in runs)
    notes += [f"GPUs of {unknown} of these logs: only the nodes are reported; add --gpu-type"] if unknown else []
    noted = [f"{ids[run.file.path]}: {note}" for run in runs if (note := note_of(run))] if not wide else []
    notes += noted[:MOST_NOTES]
    notes += [f"{len(noted) - MOST_NOTES} more have a note: --wide"] if len(noted) > MOST_NOTES else []
    table.caption = "\n".join(notes) or None
    return table


def _columns(report: ParseReport, names: Mapping[Path, str]) -> list[Column[ParsedRun]]:
    return [
        *([Column("file", report.name)] if report.full_names else []),
        Column("run", lambda run: names[run.file.path]),
        Column("recipe", lambda run: run.recipe_text or report.name(run)),
        Column("GPUs", VALUES["gpus"], right=True, optional=True),
        Column("layout", VALUES["layout"], optional=True),
        number_column("time (s)", _time, str),
        Column(
            "CV %", VALUES["time_cv"], lambda cv: _short(None if cv is None else 100 * cv), right=True, optional=True
        ),
        Column("TFLOPS", VALUES["tflops_per_gpu_mean"], number, right=True, optional=True),
        Column("MFU %", VALUES["mfu_pct"], _short, right=True, optional=True),
    ]


def _jobs(report: ParseReport) -> dict[Path, str]:
    """The number of the job, if it distinguishes logs that other commands do not know by an id."""
    known = [run for run in report.runs if run.folder is None and run.recipe_text]
    found = {run.file.path: f"job {match[1]}" for run in known if (match := _JOB.search(report.name(run)))}
    return found if len({*found.values()}) == len(found) else {}


def _wide_columns(report: ParseReport) -> list[Column[ParsedRun]]:
    return [
        Column("file", report.name),
        *(Column(name, VALUES[name]) for name in ("run", "workload", "size", "dtype")),
        number_column("GPUs", VALUES["gpus"], as_text),
        Column("type", VALUES["gpu_type"]),
        *(Column(name, VALUES[name]) for name in ("layout", "program")),
        number_column("nodes", VALUES["nodes"], as_text),
        Column("date (UTC)", date_of, lambda date: as_text(date).replace("T", " ")[:_DATE_LETTERS]),
        Column("label", VALUES["label"], optional=True),
        Column("data", lambda run: run.origin and run.origin.data.short, optional=True),
        Column("window", lambda run: run.outcome.window, _window),
        number_column("time (s)", _time, str),
        number_column("median (s)", VALUES["time_median_seconds"]),
        number_column("std (s)", VALUES["time_std_dev_seconds"]),
        number_column("CV (%)", VALUES["time_cv"], lambda cv: number(None if cv is None else 100 * cv)),
        number_column("ci95 (s)", lambda run: known_times(run.outcome).get("ci95"), interval_of),
        number_column("TFLOPS/GPU", VALUES["tflops_per_gpu_mean"]),
        number_column("std", VALUES["tflops_per_gpu_std_dev"]),
        number_column("MFU (%)", VALUES["mfu_pct"]),
        Column("figures", VALUES["figures"]),
        Column("note", note_of, optional=True),
    ]


def note_of(run: ParsedRun) -> str:
    """What a reader has to know of the figures."""
    outcome = run.outcome
    notes: list[str] = [outcome.status] if outcome.status != "success" else []
    notes += [f"attempt {outcome.attempts}"] if (outcome.attempts or 1) > 1 else []
    return ", ".join([*notes, *(_anomaly_notes(run.anomalies) if run.anomalies else [])])


def _anomaly_notes(found: Anomalies) -> Iterator[str]:
    """A drift whose interval includes 0 is none."""
    if found.outliers:
        worst = max(found.outliers, key=lambda outlier: abs(outlier.excess_s))
        count = f"{len(found.outliers)} outlier{'s' if len(found.outliers) > 1 else ''}"
        yield f"{count} (step {worst.step}: {worst.excess_s:+.3g} s)"
    if found.period_steps and found.period_excess_s:
        yield f"a stall of {found.period_excess_s:.3g} s every {found.period_steps} steps"
    if found.drift_pct is not None and found.drift_ci95_pct and not _includes_zero(found.drift_ci95_pct):
        yield f"drift {found.drift_pct:+.2g} %"


def _includes_zero(interval: tuple[float, float]) -> bool:
    return interval[0] <= 0 <= interval[1]


def _others_table(report: ParseReport, runs: Sequence[ParsedRun]) -> Table:
    columns: list[Column[ParsedRun]] = [
        Column("run", lambda run: run.id if run.folder else report.name(run)),
        Column("status", VALUES["status"]),
        Column("reason", VALUES["reason"], str, max_width=_REASON_WIDTH),
    ]
    return table_of("No result", runs, columns)


def _is_hidden(run: ParsedRun) -> bool:
    """There is output of a batch script beside almost every log."""
    return run.outcome.status == "not_training_log"


def _time(run: ParsedRun) -> str:
    error = run.outcome.clock_error_s
    return number(VALUES["time_mean_seconds"](run)) + (f" ±{error:.2g}" if error else "")


def _short(percent: float | None) -> str:
    return number(None) if percent is None else f"{percent:.2f}"


def _window(window: Window | None) -> str:
    return f"{window.first}-{window.last}" if window else ""
