# SPDX-License-Identifier: Apache-2.0
"""Parsed logs as tables: the runs with figures, and those without. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from llmb.analysis.analyzed_run import AnalyzedRun
from llmb.catalogue.records import Window
from llmb.metrics.anomalies import Anomalies
from llmb.report.parse_report import VALUES, ParseReport, date_of, known_times, one_mfu
from llmb.report.sparkline import sparkline
from llmb.report.table import (
    Column,
    Table,
    as_text,
    interval_of,
    number,
    number_column,
    table_of,
)

MOST_NOTES = 8
"""Below the table; in the wide table every run has its note."""
STEP_CELLS = 12
"""Width of the line of step times in a row."""
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


def _measured_table(report: ParseReport, runs: Sequence[AnalyzedRun], *, wide: bool) -> Table:
    jobs = _jobs(report)
    ids = {run.log_path: jobs.get(run.log_path, run.id) for run in runs}
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
    noted = [f"{ids[run.log_path]}: {note}" for run in runs if (note := note_of(run))] if not wide else []
    notes += noted[:MOST_NOTES]
    notes += [f"{len(noted) - MOST_NOTES} more have a note: --wide"] if len(noted) > MOST_NOTES else []
    table.caption = "\n".join(notes) or None
    return table


def _columns(report: ParseReport, names: Mapping[Path, str]) -> list[Column[AnalyzedRun]]:
    return [
        *([Column("file", report.name)] if report.full_names else []),
        Column("run", lambda run: names[run.log_path]),
        Column("recipe", lambda run: run.recipe_text or report.name(run)),
        Column("GPUs", VALUES["gpus"], right=True, optional=True),
        Column("layout", VALUES["layout"], optional=True),
        number_column("time (s)", _time, str),
        Column(
            "CV %", VALUES["time_cv"], lambda cv: _short(None if cv is None else 100 * cv), right=True, optional=True
        ),
        Column("TFLOPS", VALUES["tflops_per_gpu_mean"], number, right=True, optional=True),
        Column("MFU %", VALUES["mfu_pct"], _short, right=True, optional=True),
        _steps_column(),
    ]


def _steps_column() -> Column[AnalyzedRun]:
    """A line of the step times of the window."""
    return Column(
        "[window]", lambda run: sparkline(run.outcome.step_times_s, STEP_CELLS), wrap=False, optional=True, drop=1
    )


def _jobs(report: ParseReport) -> dict[Path, str]:
    """The number of the job, if it distinguishes logs that other commands do not know by an id."""
    known = [run for run in report.runs if run.record is None and run.recipe_text]
    found = {run.log_path: f"job {match[1]}" for run in known if (match := _JOB.search(report.name(run)))}
    return found if len({*found.values()}) == len(found) else {}


def _wide_columns(report: ParseReport) -> list[Column[AnalyzedRun]]:
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
        _steps_column(),
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


def note_of(run: AnalyzedRun) -> str:
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
    low, high = found.drift_ci95_pct or (0, 0)
    if found.drift_pct is not None and not low <= 0 <= high:
        yield f"drift {found.drift_pct:+.2g} %"


def _others_table(report: ParseReport, runs: Sequence[AnalyzedRun]) -> Table:
    columns: list[Column[AnalyzedRun]] = [
        Column("run", lambda run: run.id if run.record else report.name(run)),
        Column("status", VALUES["status"]),
        Column("reason", VALUES["reason"], str, max_width=_REASON_WIDTH),
    ]
    return table_of("No result", runs, columns)


def _is_hidden(run: AnalyzedRun) -> bool:
    """There is output of a batch script beside almost every log."""
    return run.outcome.status == "not_training_log"


def _time(run: AnalyzedRun) -> str:
    error = run.outcome.clock_error_s
    return number(VALUES["time_mean_seconds"](run)) + (f" ±{error:.2g}" if error else "")


def _short(percent: float | None) -> str:
    return number(None) if percent is None else f"{percent:.2f}"


def _window(window: Window | None) -> str:
    return f"{window.first}-{window.last}" if window else ""
