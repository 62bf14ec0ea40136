# SPDX-License-Identifier: Apache-2.0
"""Parsed logs, groups of repeats, and the scaling of recipes, as tables, CSV and JSON. Pure."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics
from llmb.readers.anomalies import Anomalies
from llmb.readers.logs.configuration import INFERRED_RELEASE
from llmb.readers.logs.outcome import LogOutcome, Status
from llmb.reports.formats import as_text, cell, formatted, interval_of, number, shortened, sparkline
from llmb.reports.table import Column, Table, csv_text, fields_of, getter, numbers, table_of, texts
from llmb.runs.analyzed_run import AnalyzedRun

if TYPE_CHECKING:  # they load the catalogue, which few logs need
    from llmb.verdict.parsed_scaling import RunGroup, Scaling, ScalingRow

CONVENTIONS = ("published", "full", "logged", "causal")
"""Conventions for counting FLOPs; if only one MFU is printed, the first convention with a known value is used."""
_ACCOUNT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?")
_OF_SINGLE_STEPS = ("median", "min", "max")
MOST_NOTES = 8
"""The maximum number of notes on runs below the table; the wide table has a column of notes instead."""
STEP_CELLS = 12
"""Width of a row's sparkline of step times in characters."""
_REASON_WIDTH = 44
_JOB = re.compile(r"_(\d+(?:_\d{1,2})?)$")
_DATE_LETTERS = len("2026-11-20 10:15")


@dataclass(frozen=True, slots=True)
class ParseReport:
    """All runs below ``directories``, sorted by path, each with its display name."""

    directories: tuple[str, ...]
    rule: str
    runs: tuple[AnalyzedRun, ...]
    names: dict[Path, str]
    full_names: bool = False
    """True to show the whole file name of every run."""

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(run.outcome.status for run in self.runs)
        return {status: counted[status] for status in get_args(Status)}

    def name(self, run: AnalyzedRun) -> str:
        return self.names[run.log_path]


def parse_report(roots: Sequence[Path], rule: str, runs: Iterable[AnalyzedRun], *, full_names: bool) -> ParseReport:
    """Return the report; logs of equal names are distinguished by their paths below the common directory."""
    ordered = sorted(runs, key=lambda run: run.log_path.parts)
    common = roots[0] if len(roots) == 1 else Path(os.path.commonpath([path.absolute() for path in roots]))
    paths = {run.log_path.absolute() if len(roots) > 1 else run.log_path: run.log_path for run in ordered}
    names = display_names(paths, common, full=full_names)
    shown = {own: names[path] for path, own in paths.items()}
    return ParseReport(tuple(map(text_of, roots)), rule, tuple(ordered), shown, full_names)


def one_mfu(run: AnalyzedRun) -> tuple[float, str] | tuple[None, None]:
    """Return the MFU to print if there is space for only one, and its convention; None for both if unknown."""
    for convention in CONVENTIONS:
        value = run.mfu_pct.get(convention)
        if value is not None:
            return value, convention
    return None, None


def _conventions_notes(runs: Iterable[AnalyzedRun]) -> list[str]:
    conventions = sorted({convention for run in runs if (convention := one_mfu(run)[1])})
    return [f"MFU: FLOPs counted by the convention {' or '.join(conventions)}"] if conventions else []


def date_of(run: AnalyzedRun) -> str | None:
    """Format ``started_s`` of a run in UTC, to the second; None if it is unknown."""
    return None if run.started_s is None else datetime.fromtimestamp(run.started_s, UTC).isoformat(timespec="seconds")


def time_fields(outcome: LogOutcome) -> dict[str, Any]:
    """Return the statistics of step times, if any; with a coarse clock, the median, minimum and maximum are None."""
    unknown = _OF_SINGLE_STEPS if outcome.clock_error_s else ()
    found = {} if outcome.step_time_s is None else all_statistics(outcome.step_time_s)
    return {key: None if key in unknown else value for key, value in found.items()}


def all_statistics(statistics: Statistics) -> dict[str, Any]:
    return fields_of(statistics, "mean", "median", "std", "cv", "ci95", "min", "max")


def _time(name: str) -> Callable[[AnalyzedRun], Any]:
    return lambda run: getter(name)(time_fields(run.outcome))


_RECIPE = ("workload", "size", "dtype", "gpu_type")
COLUMNS: Sequence[Column[AnalyzedRun]] = (
    *texts("outcome.status"),
    Column("time_mean_seconds", _time("mean")),
    Column("time_std_dev_seconds", _time("std")),
    *texts("tflops_per_gpu_mean: outcome.tflops_per_gpu.mean", "tflops_per_gpu_std_dev: outcome.tflops_per_gpu.std"),
    *texts("max_iteration: outcome.max_step", "outcome.reason"),
    *texts("window_first: outcome.window.first", "window_last: outcome.window.last", "outcome.steps"),
    Column("time_median_seconds", _time("median")),
    Column("time_cv", _time("cv")),
    Column("time_ci95_low_seconds", _time("ci95.0")),
    Column("time_ci95_high_seconds", _time("ci95.1")),
    *texts("outcome.loss_first", "outcome.loss_last", "weights: origin.weights.text", "data: origin.data.text"),
    *texts("run: id", *(f"configuration.{name}" for name in _RECIPE), "gpus"),
    Column("layout", lambda run: run.layout_text or None),
    *texts("configuration.program", "nodes: node_count"),
    Column("date", date_of),
    Column("mfu_pct", lambda run: one_mfu(run)[0]),
    Column("mfu_convention", lambda run: one_mfu(run)[1]),
    *texts("tokens_per_s_per_gpu", "figures", "label"),
    Column("path", lambda run: text_of(run.log_path)),
)
"""The columns of a run in CSV. Tables and JSON documents contain some of the same values."""
VALUES = {column.header: column.of for column in COLUMNS}


def parse_csv(report: ParseReport) -> str:
    """Format the report as CSV: a header and one line per run."""
    return csv_text((Column("filename", report.name), *COLUMNS), report.runs)


def display_names(paths: Iterable[Path], root: Path, *, full: bool) -> dict[Path, str]:
    """Return short names (file names if ``full``); equal names are distinguished by the differing parts of paths."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        groups[path.name if full else _short_name(path.name)].append(path)
    names: dict[Path, str] = {}
    for name, group in groups.items():
        names |= _distinguished(name, group, root) if len(group) > 1 else {group[0]: name}
    taken = Counter(names.values())
    return {path: text_of(name if taken[name] == 1 else path.relative_to(root)) for path, name in names.items()}


def _short_name(file_name: str) -> str:
    """Return a log's name without ``log-``, the account, ``.out``, ``.gz`` and the number of a first attempt."""
    return _ACCOUNT.sub("", file_name).removesuffix(".gz").removesuffix(".out").removesuffix("_0") or file_name


def _distinguished(name: str, group: Sequence[Path], root: Path) -> dict[Path, str]:
    """Return distinct names for files of one ``name``: the differing parts of their paths, or whole relative paths."""
    parts = [path.relative_to(root).parts for path in group]
    if len({len(own) for own in parts}) > 1:
        return {path: "/".join(own) for path, own in zip(group, parts, strict=True)}
    differs = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = {}
    for path, own in zip(group, parts, strict=True):
        different = "/".join(compress(own, differs))
        names[path] = different if name in different else f"{different}/{name}"
    return names


def text_of(name: object) -> str:
    """Escape bytes of a file name that are not UTF-8, so that any output can contain it."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")


def parse_tables(report: ParseReport, *, wide: bool) -> list[Table]:
    """Return a table of runs with step times, and one of other runs with reasons. The last caption counts statuses."""
    measured = [run for run in report.runs if run.outcome.step_time_s]
    others = [run for run in report.runs if not run.outcome.step_time_s and (wide or not _is_hidden(run))]
    tables = [_measured_table(report, measured, wide=wide)] if measured else []
    if others or not measured:
        name = Column[AnalyzedRun]("run", lambda run: run.id if run.record else report.name(run))
        reason = texts("outcome.reason", form=str, max_width=_REASON_WIDTH)
        tables.append(table_of("No result", others, [name, *texts("outcome.status"), *reason]))
    counted = [f"{count} {status}" for status, count in report.counts.items() if count or status == "success"]
    files = "file" if len(report.runs) == 1 else "files"
    caption = f"{', '.join(counted)} ({len(report.runs)} {files})"
    if not wide and any(map(_is_hidden, report.runs)):
        caption += "\n--wide also lists files that are not training logs"
    last = tables[-1]
    last.caption = f"{last.caption}\n{caption}" if last.caption else caption
    return tables


def _measured_table(report: ParseReport, runs: Sequence[AnalyzedRun], *, wide: bool) -> Table:
    known = [run for run in report.runs if run.record is None and run.recipe_text]
    found = {run.log_path: f"job {match[1]}" for run in known if (match := _JOB.search(report.name(run)))}
    jobs = found if len({*found.values()}) == len(found) else {}
    ids = {run.log_path: jobs.get(run.log_path, run.id) for run in runs}
    columns = _wide_columns(report) if wide else _columns(report, ids)
    notes = _conventions_notes(runs)
    assumed = sum(run.layout_source == "recipe" for run in runs)
    notes += [f"layout of {assumed} of these logs: not reported, that of the recipe is assumed"] if assumed else []
    coarse = sum(run.outcome.clock_error_s is not None for run in runs)
    clock = f"±: the clock of {coarse} of these logs shows whole seconds; the spread of steps is unknown"
    notes += [clock] if coarse else []
    unknown = sum(run.gpus is None and run.node_count is not None for run in runs)
    notes += [f"GPUs of {unknown} of these logs: only the nodes are reported; add --gpu-type"] if unknown else []
    noted = [f"{ids[run.log_path]}: {note}" for run in runs if (note := note_of(run))] if not wide else []
    notes += noted[:MOST_NOTES]
    more = counted(len(noted) - MOST_NOTES, "more note")
    notes += [f"{more}: add --wide"] if len(noted) > MOST_NOTES else []
    return table_of(f"Step times, window {report.rule}", runs, columns, caption=notes)


def _columns(report: ParseReport, names: Mapping[Path, str]) -> list[Column[AnalyzedRun]]:
    short = formatted("{:.2f}", number(None))
    return [
        *([Column("file", report.name)] if report.full_names else []),
        Column("run", lambda run: names[run.log_path]),
        Column("recipe", lambda run: run.recipe_text or report.name(run)),
        *texts("GPUs: gpus", right=True, optional=True),
        Column("layout", VALUES["layout"], optional=True, drop=2),
        Column("time (s)", _time_cell, right=True),
        Column("CV %", VALUES["time_cv"], lambda cv: short(cv and 100 * cv), right=True, optional=True),
        *numbers("TFLOPS: outcome.tflops_per_gpu.mean", optional=True),
        Column("MFU %", VALUES["mfu_pct"], short, right=True, optional=True),
        _STEPS,
    ]


_STEPS = Column[AnalyzedRun](
    "[window]", lambda run: sparkline(run.outcome.step_times_s, STEP_CELLS), wrap=False, optional=True, drop=1
)
"""A sparkline of the step times in the window."""


def _wide_columns(report: ParseReport) -> list[Column[AnalyzedRun]]:
    return [
        Column("file", report.name),
        *texts("run: id", *(f"configuration.{name}" for name in _RECIPE[:3])),
        *texts("GPUs: gpus", right=True),
        *texts("type: configuration.gpu_type"),
        Column("layout", VALUES["layout"]),
        *texts("configuration.program"),
        *texts("nodes: node_count", right=True),
        Column("date (UTC)", date_of, lambda date: as_text(date).replace("T", " ")[:_DATE_LETTERS]),
        *texts("label", "data: origin.data.short", optional=True),
        *texts("window: outcome.window", form=lambda window: f"{window.first}-{window.last}" if window else ""),
        Column("time (s)", _time_cell, right=True),
        _STEPS,
        Column("median (s)", VALUES["time_median_seconds"], number),
        Column("std (s)", VALUES["time_std_dev_seconds"], number),
        Column("CV (%)", lambda run: (cv := VALUES["time_cv"](run)) and 100 * cv, number),
        Column("ci95 (s)", _time("ci95"), interval_of, right=True),
        *numbers("TFLOPS/GPU: outcome.tflops_per_gpu.mean", "std: outcome.tflops_per_gpu.std"),
        Column("MFU (%)", VALUES["mfu_pct"], number),
        *texts("figures"),
        Column("note", note_of, optional=True),
    ]


def note_of(run: AnalyzedRun) -> str:
    """Return the caveats about a run's values, separated by commas."""
    outcome = run.outcome
    notes: list[str] = [outcome.status] if outcome.status != "success" else []
    notes += [f"attempt {outcome.attempts}"] if (outcome.attempts or 1) > 1 else []
    notes += [outcome.left_out] if outcome.left_out else []
    notes += outcome.warnings
    return ", ".join([*notes, *(_anomaly_notes(run.anomalies) if run.anomalies else [])])


def _anomaly_notes(found: Anomalies) -> Iterator[str]:
    """Yield notes on anomalies; a drift is ignored if its interval includes 0."""
    if found.outliers:
        worst = max(found.outliers, key=lambda outlier: abs(outlier.excess_s))
        count = counted(len(found.outliers), "outlier")
        yield f"{count} (step {worst.step}: {worst.excess_s:+.3g} s)"
    if found.period_steps and found.period_excess_s:
        yield f"a stall of {found.period_excess_s:.3g} s every {found.period_steps} steps"
    low, high = found.drift_ci95_pct or (0, 0)
    if found.drift_pct is not None and not low <= 0 <= high:
        yield f"drift {found.drift_pct:+.2g} %"


def _is_hidden(run: AnalyzedRun) -> bool:
    """Return whether to hide a file, such as the output of a batch script, which is next to almost every log."""
    return run.outcome.status == "not_training_log"


def _time_cell(run: AnalyzedRun) -> str:
    error = run.outcome.clock_error_s
    return number(VALUES["time_mean_seconds"](run)) + (f" ±{error:.2g}" if error else "")


def parse_document(
    report: ParseReport, groups: list[dict[str, Any]] | None = None, scaling: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Return the JSON of a report; unknown values are null, as are ``groups`` and ``scaling`` unless requested."""
    return {
        "analysis": {**fields_of(report, "directories", "window_rule: rule"), "files": len(report.runs)},
        "results": [_result(run, report.name(run)) for run in report.runs],
        "groups": groups,
        "scaling": scaling,
        "summary": report.counts | {"files": len(report.runs)},
    }


def _result(run: AnalyzedRun, name: str) -> dict[str, Any]:
    outcome = run.outcome
    losses = {"first": outcome.loss_first, "last": outcome.loss_last}
    return {
        "run": run.id,
        "filename": name,
        "path": text_of(run.log_path),
        **fields_of(run, "outcome.status", "outcome.reason", "copy_of"),
        **fields_of(run, *(f"configuration.{name}" for name in (*_RECIPE, "program"))),
        **fields_of(run, "gpus", "layout", "layout_source", "release", "label", "figures"),
        "release_source": _release_source(run),
        **fields_of(run, "identity: key", "nodes: node_count", "node_names: nodes"),
        "date": date_of(run),
        "date_source": None if run.started_s is None else "record" if run.record else "file",
        **fields_of(outcome, "window", "format", "steps", "attempts", "max_iteration: max_step"),
        "step_time_s": time_fields(outcome) or None,
        **fields_of(run, "outcome.clock_error_s", "outcome.warnings", "anomalies"),
        "tflops_per_gpu": outcome.tflops_per_gpu and all_statistics(outcome.tflops_per_gpu),
        **fields_of(run, "mfu_pct", "tokens_per_s_per_gpu", "days_per_1t_tokens"),
        "origin": run.origin and run.origin.document(),
        "network": run.network and {"faults": [], **run.network.model_dump(mode="json")},
        "loss": losses if any(value is not None for value in losses.values()) else None,
    }


def _release_source(run: AnalyzedRun) -> Literal["record", "path", "form of the name"] | None:
    if run.release is None:
        return None
    if run.recipe and run.recipe.release:
        return "record"
    return "form of the name" if run.configuration.get(INFERRED_RELEASE) else "path"


def _group_mfu(group: "RunGroup") -> tuple[float, str] | tuple[None, None]:
    """Return the MFU at the median of the mean step times, and its convention; None for both if unknown."""
    mfu, convention = one_mfu(group.first)
    if mfu is None or convention is None or group.first.step_time_s is None:
        return None, None
    return mfu * group.first.step_time_s.mean / group.run_means_s.median, convention


GROUP_COLUMNS: "Sequence[Column[RunGroup]]" = (
    *texts(*(f"first.configuration.{name}" for name in _RECIPE), "first.gpus"),
    Column("layout", lambda group: group.first.layout_text or None),
    *texts("first.configuration.program", "identity: first.key"),
    Column("runs", lambda group: len(group.runs)),
    *texts("time_median_seconds: run_means_s.median", "time_mean_seconds: run_means_s.mean"),
    *texts("time_std_dev_seconds: run_means_s.std", "spread_pct"),
    Column("mfu_pct", lambda group: _group_mfu(group)[0]),
    Column("mfu_convention", lambda group: _group_mfu(group)[1]),
    Column("differs", lambda group: "; ".join(group.differs)),
)
"""The columns of groups in CSV."""
_MEASURED = ("step_time_s", "efficiency_pct", "days_per_1t_tokens")
_PUBLISHED = ("published.step_time_s", "published_efficiency_pct", "published.days_per_1t_tokens")
_SCALE = (
    *("median_s: step_time_s", "efficiency_pct", "days_per_1t_tokens", f"published_s: {_PUBLISHED[0]}"),
    *(_PUBLISHED[1], f"published_days_per_1t_tokens: {_PUBLISHED[2]}", "published_source: published.source"),
)
_SCALING = ("recipe: recipe_text", "gpu_type", "program", "scaling: kind")


def groups_table(report: ParseReport, groups: "Sequence[RunGroup]") -> Table:
    columns: list[Column[RunGroup]] = [
        Column("recipe", lambda group: group.first.recipe_text or report.name(group.first)),
        *texts("GPUs: first.gpus", right=True),
        Column("layout", lambda group: group.first.layout_text or None),
        *texts("n: runs", form=_count, right=True),
        *numbers("median (s): run_means_s.median", "spread (%): spread_pct"),
        Column("MFU (%)", lambda group: _group_mfu(group)[0], number),
        *texts("differs in: differs", form=_differs, optional=True),
    ]
    left_out = len(report.runs) - sum(len(group.runs) for group in groups)
    caption = "median of the runs' means; spread from the fastest to the slowest run, in percent of the median"
    notes = [caption, *_conventions_notes(group.first for group in groups)]
    if left_out:
        notes.append(f"left out: {left_out} of {len(report.runs)} files, without success; omit --group to list them")
    return table_of(f"Repeats, window {report.rule}", groups, columns, caption=notes)


def _differs(keys: Iterable[str] | None) -> str:
    return ", ".join(map(shortened, keys or ()))


def _count(runs: Sequence[AnalyzedRun] | None) -> str:
    return str(len(runs)) if runs else ""


def groups_document(groups: "Iterable[RunGroup]") -> list[dict[str, Any]]:
    return [
        {
            **fields_of(group.first, *(f"configuration.{name}" for name in (*_RECIPE, "program")), "gpus"),
            **fields_of(group, "first.layout", "identity: first.key", "differs"),
            "runs": [run.id for run in group.runs],
            "run_means_s": [VALUES["time_mean_seconds"](run) for run in group.runs],
            **fields_of(group, "median_s: run_means_s.median", "std_s: run_means_s.std", "spread_pct"),
            **dict(zip(("mfu_pct", "mfu_convention"), _group_mfu(group), strict=True)),
        }
        for group in groups
    ]


def groups_csv(groups: "Iterable[RunGroup]") -> str:
    return csv_text(GROUP_COLUMNS, groups)


def scaling_tables(report: ParseReport, scalings: "Sequence[Scaling]") -> list[Table]:
    """Return one table per recipe, or a table with the reason if there are none."""
    if not scalings:
        why = "no log reports both its recipe and its number of GPUs"
        return [Table(f"Scaling, window {report.rule}", [Column("")], caption=why)]
    return [_scaling_table(report, scaling) for scaling in scalings]


def _scaling_table(report: ParseReport, scaling: "Scaling") -> Table:
    on = f" on {scaling.gpu_type}" if scaling.gpu_type else ""
    title = f"{scaling.recipe_text}{on}, {scaling.kind or 'one scale'}{' scaling' if scaling.kind else ''}"
    published = any(row.published for row in scaling.rows)
    speeds = [("step (s)", _MEASURED), *([("publ. (s)", _PUBLISHED)] if published else [])]
    named = (zip((time, "eff. (%)", "days/1T"), paths, strict=True) for time, paths in speeds)
    columns = [
        *numbers("GPUs: gpus", form=str),
        *texts("layout: layout_text"),
        *texts("n: group.runs", form=_count, right=True),
        *(Column[Any](header, path, cell) for columns in named for header, path in columns),
        *texts("differs in: group.differs", form=_differs, optional=True),
    ]
    notes = ["eff.: throughput of a GPU relative to that at the smallest scale; step: median of the runs' means"]
    if scaling.kind == "mixed":
        notes.append("the global batch size grows, but not with the GPUs")
    figures = (row.published for row in scaling.rows)
    notes += dict.fromkeys(f"published: {one.source}, window {one.window}" for one in figures if one)
    return table_of(f"{title}, window {report.rule}", scaling.rows, columns, caption=notes)


def scaling_document(scalings: "Iterable[Scaling]") -> list[dict[str, Any]]:
    return [
        {**fields_of(scaling, *_SCALING), "scales": [_scale_document(row) for row in scaling.rows]}
        for scaling in scalings
    ]


def _scale_document(row: "ScalingRow") -> dict[str, Any]:
    runs = [run.id for run in row.group.runs] if row.group else []
    return {**fields_of(row, "gpus", "layout: layout_text", "gbs"), "runs": runs, **fields_of(row, *_SCALE)}


def scaling_csv(scalings: "Iterable[Scaling]") -> str:
    columns: list[Column[dict[str, Any]]] = [
        *texts("recipe", "gpu_type", "program", "scaling", "gpus", "layout", "gbs"),
        Column("runs", lambda row: len(row["runs"])),
        *texts("time_median_seconds: median_s", "efficiency_pct", "days_per_1t_tokens"),
        *texts("published_seconds: published_s", "published_efficiency_pct", "published_days_per_1t_tokens"),
        *texts("published_source"),
    ]
    rows = ({**fields_of(one, *_SCALING), **_scale_document(row)} for one in scalings for row in one.rows)
    return csv_text(columns, rows)
