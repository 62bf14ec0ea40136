# SPDX-License-Identifier: Apache-2.0
"""The outcomes of logs, as a table, as CSV and as a JSON document."""

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, get_args

from llmb.logs.files import ParsedFile
from llmb.logs.outcome import LogOutcome, Status
from llmb.metrics.statistics import Statistics
from llmb.report.numbers import number
from llmb.report.output import printable, result_table
from llmb.report.recipe_report import origin_document
from llmb.report.table import Table
from llmb.runs.origin import Origin

_ACCOUNT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?")
_REASON_WIDTH = 26

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
)


@dataclass(frozen=True, slots=True)
class ParseReport:
    """All files below ``directory``, sorted by path, each with its display name."""

    directory: str
    rule: str
    files: tuple[ParsedFile, ...]
    names: dict[Path, str]
    origins: dict[Path, Origin]
    """Of the logs that are in the folder of a run."""

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(file.outcome.status for file in self.files)
        return {status: counted[status] for status in get_args(Status)}


def parse_report(
    root: Path,
    rule: str,
    files: Iterable[ParsedFile],
    *,
    full_names: bool,
    origin_of: Callable[[Path], Origin | None] = lambda _: None,
) -> ParseReport:
    """``origin_of`` finds the origin of a log's run."""
    ordered = tuple(sorted(files, key=lambda file: file.path))
    paths = [file.path for file in ordered]
    origins = {path: origin for path in paths if (origin := origin_of(path))}
    return ParseReport(_text(root), rule, ordered, display_names(paths, root, full=full_names), origins)


def display_names(paths: Iterable[Path], root: Path, *, full: bool) -> dict[Path, str]:
    """Short names (with ``full`` file names); equal names are distinguished by the parts of their paths that differ."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        groups[path.name if full else _short_name(path.name)].append(path)
    names: dict[Path, str] = {}
    for name, group in groups.items():
        names |= _distinguished(name, group, root) if len(group) > 1 else {group[0]: name}
    taken = Counter(names.values())
    return {path: _text(name if taken[name] == 1 else path.relative_to(root)) for path, name in names.items()}


def _short_name(file_name: str) -> str:
    """The experiment and its job: without ``log-``, the account, ``.out`` and the number of a first attempt."""
    return _ACCOUNT.sub("", file_name).removesuffix(".out").removesuffix("_0") or file_name


def _distinguished(name: str, group: Sequence[Path], root: Path) -> dict[Path, str]:
    """Names of files that share ``name``: the parts of their paths that differ, and the name unless they contain it."""
    parts = [path.relative_to(root).parts for path in group]
    if len({len(own) for own in parts}) > 1:
        return {path: "/".join(own) for path, own in zip(group, parts, strict=True)}
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = {}
    for path, own in zip(group, parts, strict=True):
        different = "/".join(compress(own, differs))
        names[path] = different if name in different else f"{different}/{name}"
    return names


def _text(name: object) -> str:
    """Bytes of a file name that are not UTF-8 are escaped, so that any output can hold them."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")


def parse_table(report: ParseReport) -> Table:
    """The table, with counts below. Reasons are wrapped, names are never shortened."""
    right = ("time (s)", "std (s)", "CV (%)", "TFLOPS/GPU", "std")
    of_runs = ("data",) if report.origins else ()
    columns = ("run", "status", *of_runs, *right, "reason")
    table = result_table(f"Step times, window {report.rule}", *columns, right=right)
    table.columns[-1].max_width = _REASON_WIDTH
    for file in report.files:
        outcome = file.outcome
        time, std, cv = _figures(outcome.step_time_s, "mean", "std", "cv")
        figures = [time, std, None if cv is None else 100 * cv, *_figures(outcome.tflops_per_gpu, "mean", "std")]
        name = printable(report.names[file.path])
        origin = report.origins.get(file.path)
        data = [origin.data.short if origin else ""] if of_runs else []
        table.add_row(name, outcome.status, *data, *map(number, figures), outcome.reason)
    table.caption = _counts_text(report)
    return table


def _counts_text(report: ParseReport) -> str:
    """Successes first, and how many files have each other status that occurs."""
    counted = [f"{count} {status}" for status, count in report.counts.items() if count or status == "success"]
    return f"{', '.join(counted)} ({len(report.files)} {'file' if len(report.files) == 1 else 'files'})"


def parse_csv(report: ParseReport) -> str:
    """A header and one line per file; an unknown value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    writer.writerows(
        _csv_row(report.names[file.path], file.outcome, report.origins.get(file.path)) for file in report.files
    )
    return text.getvalue()


def _csv_row(name: str, outcome: LogOutcome, origin: Origin | None) -> list[str | float | None]:
    window = outcome.window
    interval = outcome.step_time_s.ci95 if outcome.step_time_s else None
    return [
        name,
        outcome.status,
        *_figures(outcome.step_time_s, "mean", "std"),
        *_figures(outcome.tflops_per_gpu, "mean", "std"),
        outcome.max_step,
        outcome.reason,
        window.first if window else None,
        window.last if window else None,
        outcome.steps,
        *_figures(outcome.step_time_s, "median", "cv"),
        *(interval or (None, None)),
        outcome.loss_first,
        outcome.loss_last,
        origin and origin.weights.text,
        origin and origin.data.text,
    ]


def _figures(statistics: Statistics | None, *names: str) -> list[float | None]:
    return [getattr(statistics, name) if statistics else None for name in names]


def parse_document(report: ParseReport) -> dict[str, Any]:
    """The JSON document; an unknown value is null."""
    return {
        "analysis": {"directory": report.directory, "window_rule": report.rule, "files": len(report.files)},
        "results": [_result(file, report.names[file.path], report.origins.get(file.path)) for file in report.files],
        "summary": report.counts | {"files": len(report.files)},
    }


def _result(file: ParsedFile, name: str, origin: Origin | None) -> dict[str, Any]:
    outcome = file.outcome
    losses = {"first": outcome.loss_first, "last": outcome.loss_last}
    return {
        "filename": name,
        "path": _text(file.path),
        "status": outcome.status,
        "reason": outcome.reason,
        "window": outcome.window and outcome.window.model_dump(),
        "steps": outcome.steps,
        "attempts": outcome.attempts,
        "max_iteration": outcome.max_step,
        "step_time_s": outcome.step_time_s and _statistics(outcome.step_time_s),
        "tflops_per_gpu": outcome.tflops_per_gpu and _statistics(outcome.tflops_per_gpu),
        "origin": origin and origin_document(origin),
        "loss": losses if any(value is not None for value in losses.values()) else None,
    }


def _statistics(statistics: Statistics) -> dict[str, Any]:
    keys = ("mean", "median", "std", "cv", "ci95", "min", "max")
    return {key: getattr(statistics, key) for key in keys}
