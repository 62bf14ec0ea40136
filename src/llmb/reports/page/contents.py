# SPDX-License-Identifier: Apache-2.0
"""The contents of a page: for each recipe its verdict, its runs, and plots and tables of one run."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.base.missing import Missing
from llmb.base.shown_text import value_text
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.judge_runs import Against, judge_runs
from llmb.launch.programs.conclude import read_ended_run
from llmb.reports.formats import cell, number
from llmb.reports.jobs_report import local_time
from llmb.reports.page.figures import Figure, history_figure, run_figures, scaling_figures
from llmb.reports.parse_report import one_mfu
from llmb.reports.plan_report import plan_title
from llmb.reports.run_report import cv_pct, machine_table, run_table
from llmb.reports.table import Column, Table, facts_table, fields_of, numbers, rows_table, table_of, texts
from llmb.reports.trace_report import network_table
from llmb.reports.verdict_report import explanation_tables, interval_pct, signed_pct, verdict_table
from llmb.runs.analyzed_run import AnalyzedRun, RunSet, by_reason, flaw_of, grouped
from llmb.runs.conditions import Value
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.planning import arguments_of_plan
from llmb.runs.record import ENGINE, LOCAL, RunRecord
from llmb.runs.result import BETTER, WORST, VerdictName
from llmb.verdict.catalogue_figures import NEEDED, with_catalogue_figures
from llmb.verdict.explain_run import explain_judged
from llmb.verdict.judge_run import LEAST_EARLIER, Judged, is_pretended
from llmb.verdict.judgement import TOO_MANY_RUNS, headline

MOST_DIFFERING = 3
"""The maximum number of settings that are added to titles to distinguish recipes of the same name."""
SYMBOLS: Mapping[VerdictName, str] = {
    "pass": "✓",
    "improved": "▲",
    "regressed": "▼",
    "inconclusive": "◆",
    "invalid": "✕",
    "not comparable": "—",
}
"""Symbols next to the verdicts, so that these do not differ by color alone."""


@dataclass(frozen=True, slots=True)
class Section:
    """One recipe: its repeated runs, a verdict, and plots and tables of the run ``shown``."""

    anchor: str
    title: str
    judged: Judged
    shown: AnalyzedRun
    """The newest measurement, or the newest run if there is no measurement."""
    runs: tuple[AnalyzedRun, ...]
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]
    details: tuple[Table, ...]
    """Tables that few readers need."""
    advice: tuple[str, ...]
    """The commands that help with the verdict; empty if none is needed."""
    missing: tuple[tuple[str, str], ...]
    """Missing plots, each with the reason."""

    @property
    def verdict(self) -> VerdictName:
        return self.judged.verdict.verdict

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.verdict]

    @property
    def headline(self) -> str:
        return headline(self.judged.verdict)

    def at_pace(self, value: float | None) -> float | None:
        """Scale a rate of the displayed run to the step time of the verdict; None if any of the values is unknown."""
        own, compared_s = self.shown.step_time_s, self.judged.compared_s
        return value * own.mean / compared_s if value and own and compared_s else None


HEAD: tuple[Column[Section], ...] = (
    Column("verdict", lambda section: f"{section.symbol} {section.verdict}"),
    *texts("recipe: title"),
    *numbers("now s: judged.compared_s"),
    *numbers("reference s: judged.verdict.reference.step_time_s"),
    *numbers("change %: judged.verdict.delta_pct", form=signed_pct),
    *numbers("95 % interval: judged.verdict.ci95_pct", form=interval_pct),
    Column("tokens/s per GPU", lambda section: section.at_pace(section.shown.tokens_per_s_per_gpu), number),
    Column("MFU %", lambda section: section.at_pace(one_mfu(section.shown)[0]), number),
)
"""The columns of the table of verdicts, in every format."""
WIDEST = 3.0
"""The part of an interval farther from 0 than this many times the largest change or tolerance is not drawn."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a page."""

    title: str
    selected: str
    """The selection of runs, such as a path; ``title`` contains at most the last part of a path."""
    sections: tuple[Section, ...]
    runs: Table
    failed: tuple[tuple[AnalyzedRun, str, str], ...]
    """Runs that do not count as measurements, with the reason and the command for details."""
    left_out: Mapping[str, Sequence[str]]
    """Runs that were not used, by reason."""
    conventions: Table | None
    overview: tuple[Figure, ...]
    """Plots that compare several sections."""
    acceptance: Table | None = None
    """The acceptance that the runs belong to, if any."""

    @property
    def head(self) -> Table:
        counted_by = sorted({name for section in self.sections if (name := one_mfu(section.shown)[1])})
        caption = f"MFU: FLOPs counted by the convention {' or '.join(counted_by)}" if counted_by else ""
        return table_of("Verdicts", self.sections, HEAD, caption=caption)

    @property
    def span_pct(self) -> float:
        """Return the limit, in percent, of the range around 0 in which the changes of all recipes are plotted."""
        verdicts = [section.judged.verdict for section in self.sections]
        sizes = [abs(value) for one in verdicts for value in (one.delta_pct, one.tolerance_pct) if value is not None]
        ends = [abs(end) for one in verdicts for end in one.ci95_pct or ()]
        return min(max([*sizes, *ends, 1.0]), WIDEST * max([*sizes, 1.0])) * 1.05

    @property
    def figures(self) -> dict[str, Figure]:
        """Return all plots of the page, by name."""
        return {one.name: one for one in (*self.overview, *(f for section in self.sections for f in section.figures))}

    @property
    def counts(self) -> list[tuple[str, VerdictName, int]]:
        """Return each verdict with its symbol and its number of recipes, the worst first."""
        names = [section.verdict for section in self.sections]
        return [(SYMBOLS[name], name, names.count(name)) for name in WORST if name in names]


def gather(found: RunSet, against: Against, install: Path, say: Callable[[str], None]) -> Contents:
    """Return the contents, with a verdict on each recipe's displayed run or, against other runs, on all its runs."""
    groups = grouped(found.runs)
    shown = [[run for run in repeats if flaw_of(run) is None][-1:] or repeats[-1:] for repeats in groups]
    judged = judge_runs([run for some in (groups if against.runs else shown) for run in some], against, install, say)
    by_run = {run.counted_as: one for one in judged for run in one.runs}
    titles = _titles(groups, [by_run[run.counted_as].title for (run,) in shown])
    sections = [
        _section(anchor, title, by_run[run.counted_as], _with_rates(run), repeats, against.runs)
        for anchor, title, (run,), repeats in zip(_anchors(titles, groups), titles, shown, groups, strict=True)
    ]
    sections.sort(key=lambda section: WORST.index(section.verdict))
    failed = [(run, flaw) for run in found.runs if (flaw := flaw_of(run))]
    values = {name: text for run in found.runs if run.record for name, text in run.record.conventions.items()}
    return Contents(
        title=_heading(found.title, sections) + (f" against {_heading(against.runs, ())}" if against.runs else ""),
        selected=found.title + (f" against {against.runs}" if against.runs else ""),
        sections=tuple(sections),
        runs=runs_table(found.runs),
        failed=tuple((run, flaw, _look_at(run)) for run, flaw in failed),
        left_out=by_reason(found.left_out),
        conventions=rows_table("Conventions", ("figure", "meaning"), values.items()) if values else None,
        overview=tuple(scaling_figures([section.shown for section in sections])),
    )


def _heading(selected: str, sections: Sequence[Section]) -> str:
    """Format the selections, with paths reduced to their last part, or a single recipe's title instead of a path."""
    parts = selected.split(", ")
    paths = [part for part in parts if "/" in part or part in (".", "..", "~")]
    if paths and len(sections) == 1:
        return sections[0].title
    return ", ".join(Path(part).expanduser().resolve().name if part in paths else part for part in parts)


def _section(
    anchor: str, title: str, judged: Judged, shown: AnalyzedRun, repeats: Sequence[AnalyzedRun], against: str | None
) -> Section:
    baseline = judged.baseline if against else ()
    figures, missing = run_figures(anchor, shown, baseline[-1] if baseline else None)
    history = history_figure(anchor, repeats, baseline)
    explanation = explain_judged(judged)
    return Section(
        anchor=anchor,
        title=title,
        judged=judged,
        shown=shown,
        runs=tuple(repeats),
        figures=(*([] if isinstance(history, Missing) else [history]), *figures),
        tables=(*_result_tables(shown), verdict_table(judged)),
        details=(*(explanation_tables(explanation) if explanation else ()), *_setting_tables(shown)),
        advice=tuple(_advice(judged, shown, against)),
        missing=(*([("history", history.reason)] if isinstance(history, Missing) else []), *missing),
    )


def _with_rates(run: AnalyzedRun) -> AnalyzedRun:
    return with_catalogue_figures([run], Catalogue())[0] if run.log and run.record is None else run


def _titles(groups: Sequence[Sequence[AnalyzedRun]], judged: Sequence[str]) -> list[str]:
    pairs = [(runs[0].record, title) for runs, title in zip(groups, judged, strict=True)]
    titles = [plan_title(record.plan) if record else title for record, title in pairs]
    alike: dict[str, list[AnalyzedRun]] = {}
    for title, runs in zip(titles, groups, strict=True):
        alike.setdefault(title, []).append(runs[0])
    return [title + _distinction(runs[0], alike[title]) for title, runs in zip(titles, groups, strict=True)]


def _anchors(titles: Sequence[str], groups: Sequence[Sequence[AnalyzedRun]]) -> list[str]:
    """Return anchors that are stable across pages, and without names of logs, which may contain names of people."""
    names = [
        re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") if runs[0].record else "log"
        for title, runs in zip(titles, groups, strict=True)
    ]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}-{count + 1}" if count else name for name, count in zip(names, before, strict=True)]


def _distinction(run: AnalyzedRun, alike: Sequence[AnalyzedRun]) -> str:
    own = run.identity.configuration
    differing = [key for key in own if any(other.identity.configuration.get(key) != own[key] for other in alike)]
    return "".join(f", {key.rpartition('.')[2]} {value_text(own[key])}" for key in differing[:MOST_DIFFERING])


def _result_tables(run: AnalyzedRun) -> Iterator[Table]:
    """Yield the table of ``llmb result`` without the verdict; for a log, its statistics as in ``llmb parse``."""
    if run.record is not None:
        result = read_ended_run(RunFolder(run.path)).result
        yield run_table(run.record.plan, result.model_copy(update={"verdict": None}))
    elif times := run.step_time_s:
        names = {"steps": "count"} | {f"step time s, {name}": name for name in ("mean", "median", "std")}
        rows = ((shown, cell(getattr(times, name))) for shown, name in names.items())
        yield rows_table(run.path.name, ("metric", "measured"), rows, right=("measured",))


def _setting_tables(run: AnalyzedRun) -> Iterator[Table]:
    yield _values_table("Configuration: equal in all runs of this recipe", run.identity.configuration)
    yield _values_table("Conditions: may differ between runs", run.conditions)
    if run.record is not None:
        record, result = run.record, run.record.result
        facts = {
            **fields_of(record, "run: id", "program", "started: started_at", "ended: ended_at", "exit code: exit_code"),
            "command": " ".join(record.command),
            **fields_of(record, "image", "weights: origin.weights.text", "data: origin.data.text"),
            **fields_of(record, "scheduler's job: job.job_id"),
            "attempts": len(record.attempts) or None,
        }
        variables = {f"variable {name}": value for name, value in record.variables.items()}
        yield facts_table("Record", {**facts, **variables}.items())
        if result and result.network:
            yield network_table(result.network)
        if result and result.machine:
            yield machine_table(result.machine)


def _values_table(title: str, values: Mapping[str, Value]) -> Table:
    rows = ((key, "unknown" if value is None else value_text(value)) for key, value in sorted(values.items()))
    return rows_table(title, ("key", "value"), rows)


def runs_table(runs: Sequence[AnalyzedRun]) -> Table:
    """Return a table with one row per run."""
    columns: list[Column[AnalyzedRun]] = [
        *texts("run: id"),
        Column("started", lambda run: local_time(run.started_s) if run.started_s else "unknown"),
        Column("recipe", lambda run: run.recipe.title() if run.recipe else run.path.name),
        Column("label", lambda run: run.label or run.campaign, optional=True),
        Column("status", lambda run: run.status.replace("_", " ")),
        *numbers("step s: step_time_s.mean", form=cell),
        Column("CV %", lambda run: cv_pct(run.step_time_s), cell),
        *numbers("tokens/s: record.result.tokens_per_s", form=cell),
        *texts("verdict, published: record.result.verdict_name", optional=True),
        Column("reason", flaw_of, optional=True),
    ]
    return table_of("Runs", runs, columns)


def _advice(judged: Judged, shown: AnalyzedRun, against: str | None) -> Iterator[str]:
    verdict = judged.verdict
    if verdict.verdict in BETTER or is_pretended(shown):
        return
    others = f" --against {shlex.quote(against)}" if against else ""
    name = shown.id if shown.record else shlex.quote(str(shown.path))
    if len(judged.runs) > 1 and {run.label for run in judged.runs} == {shown.label} != {None}:
        name = shlex.quote(str(shown.label))
    if verdict.verdict == "invalid":
        yield _look_at(shown)
    elif verdict.verdict == "inconclusive" and (again := list(_more_runs(judged, shown))):
        yield from again
    elif verdict.reference:
        yield f"llmb judge {name}{others} --explain"
    elif shown.record and not against and (again_here := _same_run(shown.record, LEAST_EARLIER)):
        yield again_here
    else:
        needed = (
            [key for key in NEEDED if shown.configuration.get(key) is None] if not (shown.record or against) else []
        )
        options = ["scale" if key == "layout.gpus" else key.replace("_", "-") for key in needed]
        stated = [f"--{option} {option.upper()}" for option in options] or ["--against RUNS"]
        yield " ".join(["llmb judge", name, *stated])


def _more_runs(judged: Judged, shown: AnalyzedRun) -> Iterator[str]:
    """Yield the commands for the runs that a verdict requires, if any, so that both sides become equally large."""
    more, sides = judged.verdict.more_runs, [judged.baseline[-1:], (shown,)]
    if judged.verdict.reason and TOO_MANY_RUNS in judged.verdict.reason:
        return
    counts = [len(judged.baseline), sum(flaw_of(run) is None for run in judged.runs)]
    wanted = [0, 0 if more else LEAST_EARLIER + 1]
    for _ in range(more or 0):
        side = counts.index(min(counts)) if judged.baseline else 1
        counts[side], wanted[side] = counts[side] + 1, wanted[side] + 1
    for runs, repeats in zip(sides, wanted, strict=True):
        if repeats and (record := runs[0].record) and (command := _same_run(record, repeats)):
            yield command


def _same_run(record: RunRecord, repeats: int) -> str | None:
    if record.program != ENGINE or not isinstance(record.plan, EnginePlan):
        return None
    try:
        words = arguments_of_plan(Catalogue(), record.plan)
    except UsageError:
        return None
    command = "run" if record.job is None or record.job.scheduler == LOCAL else "submit"
    label = ["--label", record.label] if record.label else []
    return shlex.join(["llmb", command, *words, *label, *(["--repeats", str(repeats)] if repeats > 1 else [])])


def _look_at(run: AnalyzedRun) -> str:
    return f"llmb parse {run.path}" if run.record is None else f"llmb jobs log {run.id} --tail 40"
