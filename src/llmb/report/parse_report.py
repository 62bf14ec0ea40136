# SPDX-License-Identifier: Apache-2.0
"""Parsed logs with their names, as CSV and as a JSON document. Pure."""

import csv
import io
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from llmb.analysis.parsed_run import ParsedRun
from llmb.logs.outcome import LogOutcome, Status
from llmb.metrics.statistics import Statistics
from llmb.report.log_names import display_names, text_of
from llmb.report.recipe_report import origin_document

CSV_COLUMNS = (
    "filename",
    "status",
    "time_mean_seconds",
    "time_std_dev_seconds",
    "tflops_per_gpu_mean",
    "tflops_per_gpu_std_dev",
    "max_iteration",
    "reason",
    "window_first",
    "window_last",
    "steps",
    "time_median_seconds",
    "time_cv",
    "time_ci95_low_seconds",
    "time_ci95_high_seconds",
    "loss_first",
    "loss_last",
    "weights",
    "data",
    "run",
    "workload",
    "size",
    "dtype",
    "gpu_type",
    "gpus",
    "layout",
    "program",
    "nodes",
    "date",
    "mfu_pct",
    "mfu_convention",
    "tokens_per_s_per_gpu",
    "figures",
    "label",
    "path",
)
CONVENTIONS = ("published", "full", "logged", "causal")
"""How FLOPs are counted, the first that is known counts where one MFU is printed."""


@dataclass(frozen=True, slots=True)
class ParseReport:
    """All runs below ``directories``, sorted by path, each with its display name."""

    directories: tuple[str, ...]
    rule: str
    runs: tuple[ParsedRun, ...]
    names: dict[Path, str]
    full_names: bool = False
    """File names are not shortened, and shown for every run."""

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(run.outcome.status for run in self.runs)
        return {status: counted[status] for status in get_args(Status)}

    def name(self, run: ParsedRun) -> str:
        return self.names[run.file.path]


def parse_report(roots: Sequence[Path], rule: str, runs: Iterable[ParsedRun], *, full_names: bool) -> ParseReport:
    """Names are relative to the one directory, or to what several have in common."""
    ordered = tuple(sorted(runs, key=lambda run: run.file.path))
    common = roots[0] if len(roots) == 1 else Path(os.path.commonpath([path.absolute() for path in roots]))
    paths = {run.file.path.absolute() if len(roots) > 1 else run.file.path: run.file.path for run in ordered}
    names = display_names(paths, common, full=full_names)
    shown = {own: names[path] for path, own in paths.items()}
    return ParseReport(tuple(map(text_of, roots)), rule, ordered, shown, full_names)


def one_mfu(run: ParsedRun) -> tuple[float, str] | tuple[None, None]:
    """The MFU to print where there is place for one, and its convention."""
    for convention in CONVENTIONS:
        value = run.mfu_pct.get(convention)
        if value is not None:
            return value, convention
    return None, None


def date_of(run: ParsedRun) -> str | None:
    """In UTC, to the second."""
    return None if run.time_s is None else datetime.fromtimestamp(run.time_s, UTC).isoformat(timespec="seconds")


def parse_csv(report: ParseReport) -> str:
    """A header and one line per file; an unknown value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(_csv_row(report.name(run), run) for run in report.runs)
    return text.getvalue()


def _csv_row(name: str, run: ParsedRun) -> list[str | float | None]:
    outcome, origin = run.outcome, run.origin
    window = outcome.window
    interval = outcome.step_time_s.ci95 if outcome.step_time_s else None
    return [
        name,
        outcome.status,
        *figures_of(outcome.step_time_s, "mean", "std"),
        *figures_of(outcome.tflops_per_gpu, "mean", "std"),
        outcome.max_step,
        outcome.reason,
        window.first if window else None,
        window.last if window else None,
        outcome.steps,
        *(known_times(outcome).get(key) for key in ("median", "cv")),
        *(interval or (None, None)),
        outcome.loss_first,
        outcome.loss_last,
        origin and origin.weights.text,
        origin and origin.data.text,
        run.id,
        *map(run.text, ("workload", "size", "dtype", "gpu_type")),
        run.gpus,
        run.layout_text or None,
        run.text("program"),
        run.node_count,
        date_of(run),
        *one_mfu(run),
        run.tokens_per_s_per_gpu,
        run.figures,
        run.label,
        text_of(run.file.path),
    ]


_OF_SINGLE_STEPS = ("median", "min", "max")


def known_times(outcome: LogOutcome) -> dict[str, Any]:
    """Statistics of the step times; a coarse clock tells nothing of single steps."""
    unknown = _OF_SINGLE_STEPS if outcome.clock_error_s else ()
    found = {} if outcome.step_time_s is None else _statistics(outcome.step_time_s)
    return {key: None if key in unknown else value for key, value in found.items()}


def figures_of(statistics: Statistics | None, *names: str) -> list[float | None]:
    return [getattr(statistics, name) if statistics else None for name in names]


def parse_document(
    report: ParseReport, groups: list[dict[str, Any]] | None = None, scaling: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The JSON document; an unknown value is null, and so are ``groups`` and ``scaling`` unless they are wanted."""
    return {
        "analysis": {
            "directories": list(report.directories),
            "window_rule": report.rule,
            "files": len(report.runs),
        },
        "results": [_result(run, report.name(run)) for run in report.runs],
        "groups": groups,
        "scaling": scaling,
        "summary": report.counts | {"files": len(report.runs)},
    }


def _result(run: ParsedRun, name: str) -> dict[str, Any]:
    outcome = run.outcome
    losses = {"first": outcome.loss_first, "last": outcome.loss_last}
    return {
        "run": run.id,
        "filename": name,
        "path": text_of(run.file.path),
        "status": outcome.status,
        "reason": outcome.reason,
        "copy_of": run.copy_of,
        **{key: run.text(key) for key in ("workload", "size", "dtype", "gpu_type", "program")},
        "gpus": run.gpus,
        "layout": run.layout,
        "layout_source": run.layout_source,
        "identity": run.key,
        "label": run.label,
        "nodes": run.node_count,
        "node_names": list(run.nodes),
        "date": date_of(run),
        "date_source": None if run.time_s is None else "record" if run.folder else "file",
        "window": outcome.window and outcome.window.model_dump(),
        "format": outcome.format,
        "steps": outcome.steps,
        "attempts": outcome.attempts,
        "max_iteration": outcome.max_step,
        "figures": run.figures,
        "step_time_s": known_times(outcome) or None,
        "clock_error_s": outcome.clock_error_s,
        "anomalies": run.anomalies and asdict(run.anomalies),
        "tflops_per_gpu": outcome.tflops_per_gpu and _statistics(outcome.tflops_per_gpu),
        "mfu_pct": dict(run.mfu_pct),
        "tokens_per_s_per_gpu": run.tokens_per_s_per_gpu,
        "days_per_1t_tokens": run.days_per_1t_tokens,
        "origin": run.origin and origin_document(run.origin),
        "loss": losses if any(value is not None for value in losses.values()) else None,
    }


def _statistics(statistics: Statistics) -> dict[str, Any]:
    keys = ("mean", "median", "std", "cv", "ci95", "min", "max")
    return {key: getattr(statistics, key) for key in keys}
