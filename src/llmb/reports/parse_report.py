# SPDX-License-Identifier: Apache-2.0
"""Parsed logs with their names, their groups, and how recipes scale: as tables, as CSV and as JSON. Pure."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics
from llmb.catalogue.records import Window
from llmb.readers.anomalies import Anomalies
from llmb.readers.logs.configuration import INFERRED_RELEASE
from llmb.readers.logs.outcome import LogOutcome, Status
from llmb.reports.formats import as_text, cell, interval_of, number, shortened, sparkline
from llmb.reports.table import Column, Table, csv_text, fields_of, number_column, table_of
from llmb.runs.analyzed_run import AnalyzedRun

if TYPE_CHECKING:  # they load the catalogue, which few logs need
    from llmb.verdict.parsed_scaling import RunGroup, Scaling, ScalingRow

CONVENTIONS = ("published", "full", "logged", "causal")
"""How FLOPs are counted, the first that is known counts where one MFU is printed."""
_ACCOUNT = re.compile(r"^log-(?:.*?\.(?=(?:pretrain|finetune|sft|lora)_))?")
_OF_SINGLE_STEPS = ("median", "min", "max")
MOST_NOTES = 8
"""Below the table; in the wide table every run has its note."""
STEP_CELLS = 12
"""Width of the line of step times in a row."""
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
    """File names are not shortened, and shown for every run."""

    @property
    def counts(self) -> dict[str, int]:
        counted = Counter(run.outcome.status for run in self.runs)
        return {status: counted[status] for status in get_args(Status)}

    @property
    def files(self) -> int:
        return len(self.runs)

    def name(self, run: AnalyzedRun) -> str:
        return self.names[run.log_path]


def parse_report(roots: Sequence[Path], rule: str, runs: Iterable[AnalyzedRun], *, full_names: bool) -> ParseReport:
    """Names are relative to the one directory, or to what several have in common."""
    ordered = sorted(runs, key=lambda run: run.log_path.parts)
    common = roots[0] if len(roots) == 1 else Path(os.path.commonpath([path.absolute() for path in roots]))
    paths = {run.log_path.absolute() if len(roots) > 1 else run.log_path: run.log_path for run in ordered}
    names = display_names(paths, common, full=full_names)
    shown = {own: names[path] for path, own in paths.items()}
    return ParseReport(tuple(map(text_of, roots)), rule, tuple(ordered), shown, full_names)


def one_mfu(run: AnalyzedRun) -> tuple[float, str] | tuple[None, None]:
    """Return the MFU to print if there is space for only one, and its convention."""
    for convention in CONVENTIONS:
        value = run.mfu_pct.get(convention)
        if value is not None:
            return value, convention
    return None, None


def date_of(run: AnalyzedRun) -> str | None:
    """Format the date in UTC, to the second."""
    return None if run.started_s is None else datetime.fromtimestamp(run.started_s, UTC).isoformat(timespec="seconds")


def time_fields(outcome: LogOutcome) -> dict[str, Any]:
    """Return statistics of the step times, without those of single steps for a coarse clock."""
    unknown = _OF_SINGLE_STEPS if outcome.clock_error_s else ()
    found = {} if outcome.step_time_s is None else all_statistics(outcome.step_time_s)
    return {key: None if key in unknown else value for key, value in found.items()}


def all_statistics(statistics: Statistics) -> dict[str, Any]:
    return fields_of(statistics, "mean", "median", "std", "cv", "ci95", "min", "max")


VALUES: Mapping[str, Callable[[AnalyzedRun], Any]] = {
    "status": lambda run: run.outcome.status,
    "time_mean_seconds": lambda run: time_fields(run.outcome).get("mean"),
    "time_std_dev_seconds": lambda run: time_fields(run.outcome).get("std"),
    "tflops_per_gpu_mean": lambda run: run.outcome.tflops_per_gpu and run.outcome.tflops_per_gpu.mean,
    "tflops_per_gpu_std_dev": lambda run: run.outcome.tflops_per_gpu and run.outcome.tflops_per_gpu.std,
    "max_iteration": lambda run: run.outcome.max_step,
    "reason": lambda run: run.outcome.reason,
    "window_first": lambda run: run.outcome.window and run.outcome.window.first,
    "window_last": lambda run: run.outcome.window and run.outcome.window.last,
    "steps": lambda run: run.outcome.steps,
    "time_median_seconds": lambda run: time_fields(run.outcome).get("median"),
    "time_cv": lambda run: time_fields(run.outcome).get("cv"),
    "time_ci95_low_seconds": lambda run: (time_fields(run.outcome).get("ci95") or (None, None))[0],
    "time_ci95_high_seconds": lambda run: (time_fields(run.outcome).get("ci95") or (None, None))[1],
    "loss_first": lambda run: run.outcome.loss_first,
    "loss_last": lambda run: run.outcome.loss_last,
    "weights": lambda run: run.origin and run.origin.weights.text,
    "data": lambda run: run.origin and run.origin.data.text,
    "run": lambda run: run.id,
    "workload": lambda run: run.text("workload"),
    "size": lambda run: run.text("size"),
    "dtype": lambda run: run.text("dtype"),
    "gpu_type": lambda run: run.text("gpu_type"),
    "gpus": lambda run: run.gpus,
    "layout": lambda run: run.layout_text or None,
    "program": lambda run: run.text("program"),
    "nodes": lambda run: run.node_count,
    "date": date_of,
    "mfu_pct": lambda run: one_mfu(run)[0],
    "mfu_convention": lambda run: one_mfu(run)[1],
    "tokens_per_s_per_gpu": lambda run: run.tokens_per_s_per_gpu,
    "figures": lambda run: run.figures,
    "label": lambda run: run.label,
    "path": lambda run: text_of(run.log_path),
}
"""Values of a run: all of them, in this order, in CSV; some, under the same names, in tables and JSON."""


def named_values(run: AnalyzedRun, *names: str) -> dict[str, Any]:
    return {name: VALUES[name](run) for name in names}


def parse_csv(report: ParseReport) -> str:
    """A header and a line for each file."""
    rows = ({"filename": report.name(run), **named_values(run, *VALUES)} for run in report.runs)
    return csv_text(("filename", *VALUES), rows)


def display_names(paths: Iterable[Path], root: Path, *, full: bool) -> dict[Path, str]:
    """Short names (with ``full`` file names); equal names are distinguished by the parts of their paths that differ."""
    groups: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        groups[path.name if full else _short_name(path.name)].append(path)
    names: dict[Path, str] = {}
    for name, group in groups.items():
        names |= _distinguished(name, group, root) if len(group) > 1 else {group[0]: name}
    taken = Counter(names.values())
    return {path: text_of(name if taken[name] == 1 else path.relative_to(root)) for path, name in names.items()}


def _short_name(file_name: str) -> str:
    """The experiment and its job: without ``log-``, the account, ``.out`` and the number of a first attempt."""
    return _ACCOUNT.sub("", file_name).removesuffix(".gz").removesuffix(".out").removesuffix("_0") or file_name


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


def text_of(name: object) -> str:
    """Bytes of a file name that are not UTF-8 are escaped, so that any output can hold them."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")


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
    table = table_of(f"Step times, window {report.rule}", runs, columns)
    conventions = sorted({convention for run in runs if (convention := one_mfu(run)[1])})
    notes = [f"MFU: FLOPs counted by the convention {' or '.join(conventions)}"] if conventions else []
    assumed = sum(run.layout_source == "recipe" for run in runs)
    notes += [f"layout of {assumed} of these logs: not reported, that of the recipe is assumed"] if assumed else []
    coarse = sum(run.outcome.clock_error_s is not None for run in runs)
    clock = f"±: the clock of {coarse} of these logs shows whole seconds; the spread of steps is unknown"
    notes += [clock] if coarse else []
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
        number_column("time (s)", _time_cell, str),
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
        number_column("time (s)", _time_cell, str),
        _steps_column(),
        number_column("median (s)", VALUES["time_median_seconds"]),
        number_column("std (s)", VALUES["time_std_dev_seconds"]),
        number_column("CV (%)", VALUES["time_cv"], lambda cv: number(None if cv is None else 100 * cv)),
        number_column("ci95 (s)", lambda run: time_fields(run.outcome).get("ci95"), interval_of),
        number_column("TFLOPS/GPU", VALUES["tflops_per_gpu_mean"]),
        number_column("std", VALUES["tflops_per_gpu_std_dev"]),
        number_column("MFU (%)", VALUES["mfu_pct"]),
        Column("figures", VALUES["figures"]),
        Column("note", note_of, optional=True),
    ]


def note_of(run: AnalyzedRun) -> str:
    """Return the caveats about the figures of a run."""
    outcome = run.outcome
    notes: list[str] = [outcome.status] if outcome.status != "success" else []
    notes += [f"attempt {outcome.attempts}"] if (outcome.attempts or 1) > 1 else []
    notes += [outcome.left_out] if outcome.left_out else []
    notes += outcome.warnings
    return ", ".join([*notes, *(_anomaly_notes(run.anomalies) if run.anomalies else [])])


def _anomaly_notes(found: Anomalies) -> Iterator[str]:
    """Yield notes on anomalies; a drift whose interval includes 0 is not one."""
    if found.outliers:
        worst = max(found.outliers, key=lambda outlier: abs(outlier.excess_s))
        count = counted(len(found.outliers), "outlier")
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
    """Return whether to hide a file: almost every log has the output of a batch script beside it."""
    return run.outcome.status == "not_training_log"


def _time_cell(run: AnalyzedRun) -> str:
    error = run.outcome.clock_error_s
    return number(VALUES["time_mean_seconds"](run)) + (f" ±{error:.2g}" if error else "")


def _short(percent: float | None) -> str:
    return number(None) if percent is None else f"{percent:.2f}"


def _window(window: Window | None) -> str:
    return f"{window.first}-{window.last}" if window else ""


def parse_document(
    report: ParseReport, groups: list[dict[str, Any]] | None = None, scaling: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """The JSON document. An unknown value is null, and so are ``groups`` and ``scaling`` unless they are wanted."""
    return {
        "analysis": {"directories": list(report.directories), "window_rule": report.rule, "files": report.files},
        "results": [_result(run, report.name(run)) for run in report.runs],
        "groups": groups,
        "scaling": scaling,
        "summary": report.counts | {"files": report.files},
    }


def _result(run: AnalyzedRun, name: str) -> dict[str, Any]:
    outcome = run.outcome
    losses = {"first": outcome.loss_first, "last": outcome.loss_last}
    return {
        "run": run.id,
        "filename": name,
        "path": text_of(run.log_path),
        "status": outcome.status,
        "reason": outcome.reason,
        "copy_of": run.copy_of,
        **{key: run.text(key) for key in ("workload", "size", "dtype", "gpu_type", "program")},
        **fields_of(run, "gpus", "layout", "layout_source", "release", "label", "figures"),
        "release_source": _release_source(run),
        "identity": run.key,
        "nodes": run.node_count,
        "node_names": list(run.nodes),
        "date": date_of(run),
        "date_source": None if run.started_s is None else "record" if run.record else "file",
        "window": outcome.window and outcome.window.model_dump(),
        **fields_of(outcome, "format", "steps", "attempts"),
        "max_iteration": outcome.max_step,
        "step_time_s": time_fields(outcome) or None,
        "clock_error_s": outcome.clock_error_s,
        "warnings": list(outcome.warnings),
        "anomalies": run.anomalies and asdict(run.anomalies),
        "tflops_per_gpu": outcome.tflops_per_gpu and all_statistics(outcome.tflops_per_gpu),
        "mfu_pct": dict(run.mfu_pct),
        **fields_of(run, "tokens_per_s_per_gpu", "days_per_1t_tokens"),
        "origin": run.origin and run.origin.document(),
        "network": run.network and {"faults": [], **run.network.model_dump(mode="json")},
        "loss": losses if any(value is not None for value in losses.values()) else None,
    }


def _release_source(run: AnalyzedRun) -> Literal["record", "path", "form of the name"] | None:
    """Return the source of the release; only file names of one release have its form."""
    if run.release is None:
        return None
    if run.recipe and run.recipe.release:
        return "record"
    return "form of the name" if run.configuration.get(INFERRED_RELEASE) else "path"


def _median_mfu(group: "RunGroup") -> float | None:
    """MFU of the run whose mean is the median, or next to it."""
    by_mean = sorted(group.runs, key=lambda run: VALUES["time_mean_seconds"](run) or 0.0)
    return one_mfu(by_mean[len(by_mean) // 2])[0]


def _of_first(value: Callable[[AnalyzedRun], Any]) -> "Callable[[RunGroup], Any]":
    return lambda group: value(group.first)


_RECIPE = ("workload", "size", "dtype", "gpu_type")
GROUP_VALUES: "Mapping[str, Callable[[RunGroup], Any]]" = {
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
SCALE_VALUES: "Mapping[str, Callable[[ScalingRow], Any]]" = {
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


def groups_table(report: ParseReport, groups: "Sequence[RunGroup]") -> Table:
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


def _differs(group: "RunGroup | None") -> str:
    return ", ".join(map(shortened, group.differs)) if group else ""


def groups_document(groups: "Iterable[RunGroup]") -> list[dict[str, Any]]:
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


def groups_csv(groups: "Iterable[RunGroup]") -> str:
    return csv_text(GROUP_VALUES, ({name: value(group) for name, value in GROUP_VALUES.items()} for group in groups))


def scaling_tables(report: ParseReport, scalings: "Sequence[Scaling]") -> list[Table]:
    """One for each recipe."""
    if not scalings:
        why = "no log tells its recipe and its number of GPUs"
        return [Table(f"Scaling, window {report.rule}", [Column("")], caption=why)]
    return [_scaling_table(report, scaling) for scaling in scalings]


def _scaling_table(report: ParseReport, scaling: "Scaling") -> Table:
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


def _speed_columns(time: str, *keys: str) -> "Iterator[Column[ScalingRow]]":
    for header, key in zip((time, "eff. (%)", "days/1T"), keys, strict=True):
        yield number_column(header, SCALE_VALUES[key], cell)


def _sources(scaling: "Scaling") -> list[str]:
    figures = (row.published for row in scaling.rows)
    return list(dict.fromkeys(f"{one.source}, window {one.window}" for one in figures if one))


def scaling_document(scalings: "Iterable[Scaling]") -> list[dict[str, Any]]:
    return [{**_recipe(scaling), "scales": [_scale(row) for row in scaling.rows]} for scaling in scalings]


def _recipe(scaling: "Scaling") -> dict[str, Any]:
    return {
        "recipe": scaling.recipe_text,
        "gpu_type": scaling.gpu_type,
        "program": scaling.program,
        "scaling": scaling.kind,
    }


def _scale(row: "ScalingRow") -> dict[str, Any]:
    return {name: value(row) for name, value in SCALE_VALUES.items()}


def scaling_csv(scalings: "Iterable[Scaling]") -> str:
    renamed = {"median_s": "time_median_seconds", "published_s": "published_seconds"}
    names = ("recipe", "gpu_type", "program", "scaling", *(renamed.get(name, name) for name in SCALE_VALUES))
    rows = ({**_recipe(scaling), **_scale(row)} for scaling in scalings for row in scaling.rows)
    shown = ({renamed.get(name, name): value for name, value in row.items()} for row in rows)
    return csv_text(names, ({**row, "runs": len(row["runs"])} for row in shown))
