# SPDX-License-Identifier: Apache-2.0
"""Reproduces the output of the reference suite's ``parse_train_timing.sh`` and ``parse_train_timing_mbridge.sh``.

A run without steps after the window may still be successful. The divisor of variances is n or, as in the script for
Megatron-Bridge, n - 1.
"""

import csv
import io
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llmb.base.errors import UsageError
from llmb.base.input_files import open_file
from llmb.base.shown_text import csv_value, printable
from llmb.readers.logs.error_text import describe_content, find_recorder
from llmb.readers.logs.reader import RunLog, read_log


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """Statistics of a log's steps in the window; None if unknown. ``left out`` means that the log contains no run, or
    that recording slowed the run."""

    path: Path
    kind: Literal["success", "failed", "left out"]
    last_step: int | None = None
    """The last logged step; for a failed run, at most the end of the window."""
    time_mean_s: float | None = None
    time_std_s: float | None = None
    tflops_mean: float | None = None
    tflops_std: float | None = None


def read_samples(path: Path, rule: str, *, sample: bool = False) -> WindowSamples:
    """Read a log's statistics in a window; an unreadable log is a failed run. ``sample`` selects the divisor n - 1."""
    try:
        with open_file(path) as stream:
            log = read_log(stream, rule)
    except (UsageError, OSError):
        return WindowSamples(path, "failed")
    return _judged(path, log, fewer=int(sample))


def _judged(path: Path, log: RunLog, fewer: int) -> WindowSamples:
    attempt = log.attempt
    if attempt.last is None:
        is_run = not log.size or log.truncated_line or describe_content(log.head, log.tail).is_log
        return WindowSamples(path, "failed" if is_run else "left out")
    if find_recorder(log.head, log.tail):
        return WindowSamples(path, "left out")
    window, bad = attempt.window, attempt.bad_loss_step is not None or attempt.bad_grad_norm_step is not None
    times = attempt.step_time_s
    if bad or window is None or not times or attempt.missing(window) or not all(map(math.isfinite, times)):
        last = attempt.max_step if window is None else min(attempt.max_step, window.last)
        return WindowSamples(path, "failed", last)
    tflops = array("d", filter(math.isfinite, attempt.tflops_per_gpu))
    figures = (*_mean_and_std(times, fewer), *_mean_and_std(tflops, fewer))
    return WindowSamples(path, "success", attempt.max_step, *figures)


def _mean_and_std(values: "array[float]", fewer: int) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    mean = _sum(values) / len(values)
    return mean, math.sqrt(_sum((value - mean) * (value - mean) for value in values) / max(1, len(values) - fewer))


def _sum(values: Iterable[float]) -> float:
    """Sum ``values`` in order, as awk does, so that the printed digits agree."""
    total = 0.0
    for value in values:
        total += value
    return total


_TASK = r"(?:pretrain|finetune|sft|lora)_"
_BEFORE_EXPERIMENT = re.compile(rf"^log-(?:.*?\.(?={_TASK})|(?!{_TASK})[^.]*\.(?!out$))?")
"""Matches ``log-`` and the account, if any. Accounts may contain dots, so the task marks the experiment's start."""
_RULE = "=" * 80
_ROW = "{:<90} {:>8} {:>13} {:>12} {:>19} {:>18}"
_LINES = tuple("-" * width for width in (90, 8, 13, 12, 19, 18))
_DIGITS = (3, 3, 2, 2)


@dataclass(frozen=True, slots=True)
class CompatForm:
    """The parts of the output format in which the reference suite's two scripts differ."""

    title: str
    unit: str
    rate: str
    seconds: float
    """The number of seconds per unit."""
    csv_times: tuple[str, str]
    keys: tuple[str, str, str, str]

    @property
    def headers(self) -> tuple[str, ...]:
        times = (f"Time Mean ({self.unit})", f"Time Std ({self.unit})")
        return ("Experiment", "Status", *times, f"{self.rate} Mean", f"{self.rate} Std")

    @property
    def csv_header(self) -> tuple[str, ...]:
        rates = ("tflops_per_gpu_mean", "tflops_per_gpu_std_dev")
        return ("filename", "status", *self.csv_times, *rates, "max_iteration")


NEMO = CompatForm(
    title="Train Step Timing and TFLOPS Analysis",
    unit="s",
    rate="TFLOPS_per_GPU",
    seconds=1,
    csv_times=("time_mean_seconds", "time_std_dev_seconds"),
    keys=("time_mean", "time_std_dev", "tflops_per_gpu_mean", "tflops_per_gpu_std_dev"),
)
BRIDGE = CompatForm(
    title="Elapsed Time (ms) and MODEL_TFLOPS/GPU Analysis",
    unit="ms",
    rate="MODEL_TFLOPS_per_GPU",
    seconds=0.001,
    csv_times=("time_mean_ms", "time_std_dev_ms"),
    keys=("time_mean_ms", "time_std_ms", "tflops_mean", "tflops_std"),
)


@dataclass(frozen=True, slots=True)
class CompatReport:
    """The runs of a report, sorted by path; ``first`` and ``last`` are the first and last step of the window."""

    directory: str
    first: int
    last: int
    full_names: bool
    form: CompatForm
    runs: tuple[WindowSamples, ...]

    @property
    def successes(self) -> int:
        return sum(run.kind == "success" for run in self.runs)

    @property
    def failures(self) -> int:
        return len(self.runs) - self.successes

    @property
    def rate(self) -> int | None:
        """Return the success rate in whole percent, rounded down; None if there are no runs."""
        return 100 * self.successes // len(self.runs) if self.runs else None


def compat_report(
    directory: str, window: str, samples: Sequence[WindowSamples], *, full_names: bool = False, form: CompatForm = NEMO
) -> CompatReport:
    """Return a report on ``samples`` except the kind ``left out``; ``window`` has the form ``A-B``."""
    first, _, last = window.partition("-")
    runs = sorted((run for run in samples if run.kind != "left out"), key=lambda run: run.path)
    return CompatReport(directory, int(first), int(last), full_names, form, tuple(runs))


def compat_table(report: CompatReport) -> str:
    lines = [
        f"{report.form.title} (iterations {report.first}-{report.last})",
        _RULE,
        _ROW.format(*report.form.headers),
        _ROW.format(*_LINES),
        *(_table_row(run, report) for run in report.runs),
        "",
        "Summary:",
        f"  Success experiments: {report.successes}",
        f"  Failed experiments: {report.failures}",
        f"  Success rate: {'N/A' if report.rate is None else f'{report.rate}%'}",
    ]
    return "".join(f"{line}\n" for line in lines)


def _table_row(run: WindowSamples, report: CompatReport) -> str:
    name = printable(run.path.name if report.full_names else short_name(run.path.name))
    if run.kind == "success":
        return _ROW.format(name, "Success", *(text or "-" for text in _figures(run, report.form)))
    if run.last_step is None:
        return _ROW.format(name, "Failed", *"----")
    return f"{name:<90} {'Failed':>8} {f'({run.last_step} iterations)':>30}"


def short_name(file_name: str) -> str:
    """Remove the text before the experiment, and the suffix ``_0.out``, but not the suffix of a retry."""
    return re.sub(r"_0\.out$", "", _BEFORE_EXPERIMENT.sub("", file_name))


def compat_csv(report: CompatReport) -> str:
    """Format the report as CSV; failed and successful runs have the same number of fields."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(report.form.csv_header)
    for run in report.runs:
        success = run.kind == "success"
        figures = [figure or "-" for figure in _figures(run, report.form)] if success else [""] * len(_DIGITS)
        writer.writerow(
            [csv_value(_text(run)), "Success" if success else "Failed", *figures, "" if success else run.last_step]
        )
    total = len(report.runs)
    text.write(f"# Summary: {report.successes} success, {report.failures} failed, {total} total\n")
    return text.getvalue()


def compat_json(report: CompatReport) -> str:
    """Format the report as JSON; unknown figures of a successful run are null."""
    results = ",\n".join(f"    {{{_json_fields(_json_result(run, report.form), ', ')}}}" for run in report.runs)
    results += "\n" if results else ""
    analysis = {"min_iteration": report.first, "max_iteration": report.last, "experiments_directory": report.directory}
    summary = {
        "success_experiments": report.successes,
        "failed_experiments": report.failures,
        "success_rate": report.rate,
    }
    inner = ",\n    "
    return (
        f'{{\n  "analysis": {{\n    {_json_fields(analysis, inner)}\n  }},\n  "results": [\n{results}  ],\n'
        f'  "summary": {{\n    {_json_fields(summary, inner)}\n  }}\n}}\n'
    )


def _json_result(run: WindowSamples, form: CompatForm) -> dict[str, Any]:
    if run.kind == "success":
        values = zip(form.keys, _figures(run, form), strict=True)
        figures = {key: Decimals(text) if text else None for key, text in values}
        return {"filename": _text(run), "status": "Success", **figures}
    reached = {} if run.last_step is None else {"max_iteration": run.last_step}
    return {"filename": _text(run), "status": "Failed", **reached}


class Decimals(str):
    """A number as text, to be printed in JSON with exactly these digits."""

    __slots__ = ()


def _json_fields(values: Mapping[str, Any], between: str) -> str:
    return between.join(
        f"{json.dumps(key)}: {value if isinstance(value, Decimals) else json.dumps(value)}"
        for key, value in values.items()
    )


def _figures(run: WindowSamples, form: CompatForm) -> list[str | None]:
    times = (None if one is None else one / form.seconds for one in (run.time_mean_s, run.time_std_s))
    figures = (*times, run.tflops_mean, run.tflops_std)
    return [None if one is None else f"{one:.{digits}f}" for one, digits in zip(figures, _DIGITS, strict=True)]


def _text(run: WindowSamples) -> str:
    return run.path.name.encode("utf-8", "backslashreplace").decode("utf-8")


FORMATS: Mapping[str, Callable[[CompatReport], str]] = {"table": compat_table, "csv": compat_csv, "json": compat_json}
