# SPDX-License-Identifier: Apache-2.0
"""Parsed logs as tables: the runs with figures, and those without. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from llmb.analysis.parsed_run import ParsedRun
from llmb.metrics.anomalies import Anomalies
from llmb.report.numbers import interval_of, number
from llmb.report.output import result_table
from llmb.report.parse_report import ParseReport, date_of, figures_of, known_times, one_mfu
from llmb.report.table import Table
from llmb.shown_text import printable

UNKNOWN = ""
MOST_NOTES = 8
"""Below the table; in the wide table every run has its note."""
_REASON_WIDTH = 44
_JOB = re.compile(r"_(\d+(?:_\d{1,2})?)$")
_DATE_LETTERS = len("2026-11-20 10:15")
_ALWAYS = ("file", "run", "recipe", "time (s)")
_FEW_HAVE = ("label", "data", "note")
_RIGHT = (
    *("GPUs", "nodes", "time (s)", "median (s)", "std (s)", "CV (%)", "CV %", "ci95 (s)"),
    *("TFLOPS/GPU", "TFLOPS", "std", "MFU (%)", "MFU %"),
)

Cell = Callable[[ParsedRun], str]


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
    shown = {header: [cell(run) for run in runs] for header, cell in columns.items()}
    kept = [header for header, cells in shown.items() if _is_kept(header, cells, wide=wide)]
    right = tuple(header for header in kept if header in _RIGHT)
    table = result_table(f"Step times, window {report.rule}", *kept, right=right)
    for row in zip(*(shown[header] for header in kept), strict=True):
        table.add_row(*row)
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
    told = [f"{ids[run.file.path]}: {note}" for run in runs if (note := note_of(run))] if not wide else []
    notes += told[:MOST_NOTES]
    notes += [f"{len(told) - MOST_NOTES} more have a note: --wide"] if len(told) > MOST_NOTES else []
    table.caption = "\n".join(notes) or None
    return table


def _is_kept(header: str, cells: Sequence[str], *, wide: bool) -> bool:
    """Columns without content are left out, of the wide table only those that few runs have."""
    may_go = header in _FEW_HAVE if wide else header not in _ALWAYS
    return not may_go or not {*cells} <= {UNKNOWN, number(None)}


def _columns(report: ParseReport, names: Mapping[Path, str]) -> dict[str, Cell]:
    file: dict[str, Cell] = {"file": lambda run: printable(report.name(run))} if report.full_names else {}
    return file | {
        "run": lambda run: names[run.file.path],
        "recipe": lambda run: run.recipe_text or printable(report.name(run)),
        "GPUs": lambda run: _known(run.gpus),
        "layout": lambda run: run.layout_text,
        "time (s)": _time,
        "CV %": lambda run: _short(_percent(run)),
        "TFLOPS": lambda run: number(figures_of(run.outcome.tflops_per_gpu, "mean")[0]),
        "MFU %": lambda run: _short(one_mfu(run)[0]),
    }


def _jobs(report: ParseReport) -> dict[Path, str]:
    """Of logs that other commands do not know by an id, the number of the job, if that distinguishes them."""
    known = [run for run in report.runs if run.folder is None and run.recipe_text]
    found = {run.file.path: f"job {match[1]}" for run in known if (match := _JOB.search(report.name(run)))}
    return found if len({*found.values()}) == len(found) else {}


def _wide_columns(report: ParseReport) -> dict[str, Cell]:
    return {
        "file": lambda run: printable(report.name(run)),
        "run": lambda run: run.id,
        "workload": lambda run: _known(run.text("workload")),
        "size": lambda run: _known(run.text("size")),
        "dtype": lambda run: _known(run.text("dtype")),
        "GPUs": lambda run: _known(run.gpus),
        "type": lambda run: _known(run.text("gpu_type")),
        "layout": lambda run: run.layout_text,
        "program": lambda run: _known(run.text("program")),
        "nodes": lambda run: _known(run.node_count),
        "date (UTC)": lambda run: _known(date_of(run)).replace("T", " ")[:_DATE_LETTERS],
        "label": lambda run: printable(_known(run.label)),
        "data": lambda run: run.origin.data.short if run.origin else UNKNOWN,
        "window": _window,
        "time (s)": _time,
        "median (s)": lambda run: number(known_times(run.outcome).get("median")),
        "std (s)": lambda run: _figure(run, "std"),
        "CV (%)": lambda run: number(_percent(run)),
        "ci95 (s)": _interval,
        "TFLOPS/GPU": lambda run: number(figures_of(run.outcome.tflops_per_gpu, "mean")[0]),
        "std": lambda run: number(figures_of(run.outcome.tflops_per_gpu, "std")[0]),
        "MFU (%)": lambda run: number(one_mfu(run)[0]),
        "figures": lambda run: _known(run.figures),
        "note": note_of,
    }


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
    table = result_table("No result", "file", "status", "reason")
    table.columns[-1].max_width = _REASON_WIDTH
    for run in runs:
        table.add_row(printable(report.name(run)), run.outcome.status, run.outcome.reason)
    return table


def _is_hidden(run: ParsedRun) -> bool:
    """There is output of a batch script beside almost every log."""
    return run.outcome.status == "not_training_log"


def _figure(run: ParsedRun, name: str) -> str:
    return number(figures_of(run.outcome.step_time_s, name)[0])


def _time(run: ParsedRun) -> str:
    error = run.outcome.clock_error_s
    return _figure(run, "mean") + (f" ±{error:.2g}" if error else "")


def _percent(run: ParsedRun) -> float | None:
    (value,) = figures_of(run.outcome.step_time_s, "cv")
    return None if value is None else 100 * value


def _short(percent: float | None) -> str:
    return number(None) if percent is None else f"{percent:.2f}"


def _interval(run: ParsedRun) -> str:
    return interval_of(run.outcome.step_time_s.ci95 if run.outcome.step_time_s else None)


def _window(run: ParsedRun) -> str:
    window = run.outcome.window
    return f"{window.first}-{window.last}" if window else UNKNOWN


def _known(value: object) -> str:
    return UNKNOWN if value is None else str(value)
