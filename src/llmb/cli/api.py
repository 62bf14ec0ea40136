# SPDX-License-Identifier: Apache-2.0
"""The commands as Python functions with typed results, for scripts and notebooks.

Options have their command-line names, with underscores: ``llmb.run("pretrain_llama3.1", "tiny", scale=2)``. Errors are
those of ``llmb.base.errors``, with the text that the command line prints.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from llmb.base.errors import EnvironmentProblem, UsageError, unknown
from llmb.base.input_files import parse_path
from llmb.base.options import build, options_of, valid_values
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import ModelRequest
from llmb.catalogue.resolve import resolve as resolve_request
from llmb.catalogue.window import DEFAULT_RULE, check_rule
from llmb.cli.accept import accept_with
from llmb.cli.predict import Basis, FindRuns, FurtherGpus, SearchOptions, count_memory, plan_with, predict_with
from llmb.cli.root import run_paths, write_named
from llmb.cli.share import Format as Form
from llmb.cli.share import report_on
from llmb.cli.shared_options import catalogue_for, request_of
from llmb.jobs.find_jobs import parse_since
from llmb.jobs.find_runs import earlier_runs, find_ended_runs, find_sides, in_window, run_folders
from llmb.jobs.history import read_history
from llmb.jobs.judge_runs import Against, judge_runs
from llmb.jobs.local_run import plan_here, raise_unless_successful
from llmb.jobs.read_run import parsed_run, run_of_log
from llmb.jobs.store import Filter
from llmb.launch.programs.conclude import EndedRun, read_ended_run
from llmb.launch.programs.engine.program import check_memory
from llmb.nodes.acceptance.parts import AcceptanceResult
from llmb.prediction.scale import Scaling
from llmb.prediction.search import Goal
from llmb.readers.logs.log_files import ParsedFile, find_all_logs
from llmb.reports.export import exported_run
from llmb.reports.export_tables import RESULTS, STEPS, data_frame, frame_of, step_rows
from llmb.reports.formats import number
from llmb.reports.predict_report import LayoutPlan, RunMemory, RunPrediction
from llmb.reports.run_report import run_document, run_table
from llmb.reports.table import Column, Shown, Table, html_table, numbers, plain_lines, table_of, texts
from llmb.reports.verdict_report import compare_tables, notebook_table
from llmb.runs.checkpoints.origin import Origin
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder, install_root
from llmb.runs.plan import Plan
from llmb.runs.result import Condition, Result, Verdict
from llmb.runs.steps import StepNews, read_steps
from llmb.verdict.compare_runs import Comparison, Row, compare_runs
from llmb.verdict.copies import with_copies
from llmb.verdict.judgement import tolerance_of

if TYPE_CHECKING:
    import pandas

STRICT = ConfigDict(strict=True)
MOST_RUNS = 2**63 - 1
"""The largest integer that the history's database can store, and therefore the largest ``limit``."""


@dataclass(frozen=True, slots=True, repr=False)
class Run(Shown):
    """A run that has ended; ``recipe.unspecified`` lists the defaults that have alternatives."""

    id: str
    """A short id, which commands and ``llmb.result`` accept."""
    label: str | None
    folder: Path
    recipe: Recipe
    result: Result
    origin: Origin
    """The origin of the run's weights and data."""
    plan: Plan

    @property
    def step_time_s(self) -> float | None:
        """Return the mean step time of the window; None if the run has no statistics."""
        return self.result.step_time_s.mean if self.result.step_time_s else None

    def __repr__(self) -> str:
        step = f", {number(self.step_time_s)} s per step" if self.step_time_s else ""
        return f"<run {self.id}: {self.recipe.title()}, {self.result.status}{step}>"

    def tables(self) -> tuple[Table, ...]:
        return (run_table(self.plan, self.result, read_steps(RunFolder(self.folder).steps)),)

    def document(self) -> dict[str, Any]:
        return run_document(read_ended_run(RunFolder(self.folder)))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the run's steps, one per row, with the columns of ``llmb export``."""
        return data_frame(STEPS, step_rows(iter([exported_run(RunFolder(self.folder))])))


class Runs(tuple[Run, ...]):
    """Several runs; a notebook shows them as a table."""

    __slots__ = ()

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the runs, one per row, with the columns of ``llmb export``."""
        return data_frame(RESULTS, (exported_run(RunFolder(run.folder)) for run in self))

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no runs"

    def _repr_html_(self) -> str:
        return html_table(table_of("", self, _COLUMNS))


class ParsedLogs(list[ParsedFile]):
    """Logs with their statistics and outcomes; a notebook shows them as a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(plain_lines(table_of("", self, _LOG_COLUMNS))) if self else "no logs"

    def _repr_html_(self) -> str:
        return html_table(table_of("", self, _LOG_COLUMNS))


class RunVerdict(Verdict):
    """A verdict that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return html_table(notebook_table(self))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the verdict's conditions, one per row."""
        return frame_of([one.model_dump() for one in self.conditions], [*Condition.model_fields])


class RunComparison(Comparison):
    """A comparison that a notebook shows as tables."""

    def _repr_html_(self) -> str:
        return "".join(map(html_table, compare_tables(self)))

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the recipes, one per row, with the columns of ``llmb compare --json``."""
        return frame_of([row.model_dump(mode="json") for row in self.rows], [*Row.model_fields])


Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")
_WORDS: Mapping[object, str] = {
    str: "text",
    Path: "a path",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    NoneType: "None",
}
_MOST_SHOWN = 80


def _checked(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Wrap a function so that it raises UsageError for an argument of the wrong type."""
    expected = signature(function)

    @cache
    def adapters() -> Mapping[str, tuple[str, TypeAdapter[Any]]]:
        hints = get_type_hints(function)
        named = (name for name, one in expected.parameters.items() if one.kind is not one.VAR_KEYWORD)
        return {name: (_type_text(hints[name]), TypeAdapter(hints[name], config=STRICT)) for name in named}

    @wraps(function)
    def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        given = expected.bind(*args, **kwargs).arguments
        for name, (text, adapter) in adapters().items():
            value = given.get(name, expected.parameters[name].default)
            try:
                adapter.validate_python(value)
                if isinstance(value, str):
                    value.encode()  # lone surrogates cannot be written to files or databases
            except ValueError as error:  # includes pydantic's ValidationError
                raise UsageError(f"{name} is {repr(given[name])[:_MOST_SHOWN]}; it must be {text}") from error
        return function(*args, **kwargs)

    return call


def _type_text(annotation: Any) -> str:  # noqa: ANN401 (of any type)
    if origin := get_origin(annotation):
        if origin in (UnionType, Union):  # Union if a member is a Literal
            return " or ".join(map(_type_text, get_args(annotation)))
        if origin is Literal:
            return " or ".join(get_args(annotation))
        return "a function" if origin is Callable else "a list of texts"
    return _WORDS[annotation]


_COLUMNS: tuple[Column[Run], ...] = (
    *texts("run: id", "label"),
    Column("recipe", lambda run: run.recipe.title()),
    *texts("status: result.status"),
    *numbers("step s: step_time_s", "tokens/s per GPU: result.tokens_per_s_per_gpu"),
    *texts("verdict: result.verdict_name", "reason: result.reason"),
)


_LOG_COLUMNS: tuple[Column[ParsedFile], ...] = (
    *texts("log: path.name", "outcome.status"),
    *numbers("step s: outcome.step_time_s.mean"),
    *texts("outcome.reason"),
)


def _run_of(run: EndedRun) -> Run:
    record = run.record
    plan = record.plan
    return Run(record.id, record.label, run.folder.path, plan.recipe, run.result, plan.origin, plan)


@_checked
def recipe(workload: str | None = None, size: str | None = None, **options: Any) -> Recipe:  # noqa: ANN401 (by option)
    """Return a recipe with its layout and published figures, like ``llmb show``; raise UsageError if it is invalid."""
    request, _ = _requested(options, workload, size)
    return resolve_request(catalogue_for(request), request)


def _finder(on_message: Callable[[str], None]) -> FindRuns:
    return lambda selector: find_ended_runs(selector, install_root(os.environ, Path.cwd()), on_message)


@_checked
def predict(
    workload: str | None = None,
    size: str | None = None,
    *,
    calibrate: str | Path | None = None,
    hardware: str | Path | None = None,
    software: str | None = None,
    scaling: Scaling | None = None,
    imbalance: float | None = None,
    tokens: float | None = None,
    price: float | None = None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (by the option)
) -> RunPrediction:
    """Predict the time and the memory of a training step, like ``llmb predict``.

    ``calibrate`` is a run, a trace, or measurements of ``llmb bench``; ``hardware`` is a file of GPU types. Raise
    UsageError for invalid options and unpredictable recipes, EnvironmentProblem for a damaged record.
    """
    request, values = _requested(options, workload, size, Choices)
    basis, choices = Basis(None if calibrate is None else str(calibrate), software), build(Choices, values)
    catalogue, find, further = (
        _catalogue(request, hardware),
        _finder(on_message),
        FurtherGpus(scaling, tokens=tokens, price=price),
    )
    return predict_with(catalogue, request, choices, further, basis, find, imbalance)


def _catalogue(request: ModelRequest, hardware: str | Path | None) -> Catalogue:
    return catalogue_for(request, None if hardware is None else parse_path(hardware))


@_checked
def plan(
    workload: str | None = None,
    size: str | None = None,
    *,
    goal: Goal = "step",
    top: int = 10,
    max_memory_gib: float | None = None,
    price: float | None = None,
    tokens: float | None = None,
    calibrate: str | Path | None = None,
    hardware: str | Path | None = None,
    software: str | None = None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (by the option)
) -> LayoutPlan:
    """Find the fastest layouts of a recipe, like ``llmb plan``. Sizes that are passed apply to every layout.

    Raise UsageError for invalid options, and if no layout fits and the recipe's layout is invalid.
    """
    request, values = _requested(options, workload, size, Choices)
    return plan_with(
        _catalogue(request, hardware),
        request,
        build(Choices, values),
        SearchOptions(goal=goal, top=top, price=price, tokens=tokens, max_memory_gib=max_memory_gib),
        Basis(None if calibrate is None else str(calibrate), software),
        _finder(on_message),
        on_message,
        explicit=values,
    )


@_checked
def memory(
    workload: str | None = None,
    size: str | None = None,
    *,
    rank: int | None = None,
    all_stages: bool = False,
    estimate: bool = False,
    hardware: str | Path | None = None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (by the option)
) -> RunMemory:
    """Return the memory of ranks, counted or, with ``estimate``, estimated, like ``llmb memory``."""
    request, values = _requested(options, workload, size, Choices)
    catalogue, choices = _catalogue(request, hardware), build(Choices, values)
    return count_memory(catalogue, request, choices, on_message, rank=rank, all_stages=all_stages, estimated=estimate)


@_checked
def run(
    workload: str | None = None,
    size: str | None = None,
    *,
    on_step: Callable[[StepNews], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
    force: bool = False,
    **options: Any,  # noqa: ANN401 (by the option)
) -> Run:
    """Train on this machine, like ``llmb run``; call it from the main thread. ``force`` ignores a lack of GPU memory.

    Raise UsageError or EnvironmentProblem if it cannot run, RunFailed or InvalidRun afterward, UserInterrupt on Ctrl-C.
    """
    request, values = _requested(options, workload, size, Choices)
    install = install_root(os.environ, Path.cwd())
    local = plan_here(catalogue_for(request), request, build(Choices, values), os.environ, install)
    local.check()
    check_memory(local.plan, on_message, force=force)
    ended = local.start(on_step, on_message)
    raise_unless_successful(ended)
    return _run_of(ended)


@_checked
def result(run: str | Path, *, on_message: Callable[[str], None] = lambda _: None) -> Run:
    """Return a run that has ended, even if it failed, like ``llmb result``.

    ``run`` is its id, its folder, its label if no other run has the same, or ``"latest"``, the newest that ended
    successfully. Raise UsageError unless one run matches, is readable and has ended, EnvironmentProblem if its steps
    cannot be read.
    """
    text = str(run.absolute() if isinstance(run, Path) else run)
    folders = run_folders(text, install_root(os.environ, Path.cwd()), on_message)
    if len(folders) > 1:
        raise UsageError(f"{len(folders)} runs match '{run}'", do="pass the id of one; see llmb.list_runs()")
    return _run_of(read_ended_run(folders[0]))


@_checked
def list_runs(
    *,
    label: str | None = None,
    workload: str | None = None,
    campaign: str | None = None,
    since: str | None = None,
    limit: int | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Runs:
    """Return the runs that have ended, the newest last, like ``llmb runs``.

    ``on_message`` receives a message for each run that is skipped because it has not ended or cannot be read.
    """
    if limit is not None and not 0 <= limit <= MOST_RUNS:
        raise UsageError(f"limit is {str(limit)[:_MOST_SHOWN]}; it must be a whole number from 0 to {MOST_RUNS}")
    selection = Filter(
        label=label,
        workload=workload,
        campaign=campaign,
        since_s=parse_since(since, time.time()) if since else None,
        runs_only=True,
        limit=limit,
    )
    with read_history(install_root(os.environ, Path.cwd()), on_message) as store:
        jobs = store.jobs(selection)
    ended = []
    for job in jobs:
        try:
            ended.append(_run_of(read_ended_run(RunFolder(Path(job.run_dir)))))
        except (UsageError, EnvironmentProblem) as error:
            on_message(f"skipped: {error}")
    return Runs(ended)


@_checked
def judge(
    path: str | Path,
    *,
    against: str | Path | None = None,
    expect: str | Path | None = None,
    tolerance: float | None = None,
    gpu_type: str | None = None,
    window: str | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> RunVerdict:
    """Judge whether a run is as fast as it should be, like ``llmb judge``.

    ``path`` is its id, folder or log, or ``"latest"``. Repeats with a label or in a folder have one verdict ``against``
    other runs. ``tolerance`` is in percent, ``gpu_type`` is the GPU type of logs that do not report it, and ``window``
    selects the steps to average. Raise UsageError for invalid options, and unless there is exactly one verdict.
    """
    limit = tolerance_of(tolerance, "tolerance")
    if window is not None:
        check_rule(window)
    if expect is not None and against is not None:
        raise UsageError("expect cannot be combined with against", do="pass only one")
    install = install_root(os.environ, Path.cwd())
    found = find_ended_runs(str(path.absolute() if isinstance(path, Path) else path), install, on_message)
    reference = Against(
        runs=None if against is None else str(against),
        expectations=None if expect is None else Path(expect).expanduser(),
        tolerance=limit,
        logs={"gpu_type": gpu_type} if gpu_type else {},
        window=window,
    )
    judged = judge_runs(in_window(found.runs, window), reference, install, on_message)
    if len(judged) != 1:
        count = f"these runs have {len(judged)} verdicts" if judged else "no run has ended"
        do = "pass one run, or repeats of one recipe with against=" if judged else None
        raise UsageError(f"there must be exactly one verdict, but {count}", where=str(path), do=do)
    return RunVerdict(**dict(judged[0].verdict))


@_checked
def accept(
    *,
    minutes: float | None = None,
    nodes: int | None = None,
    checks: str | None = None,
    start_new: bool = False,
    on_message: Callable[[str], None] = lambda _: None,
) -> AcceptanceResult:
    """Check whether this machine, or each of ``nodes`` nodes, is as fast as it should be, like ``llmb accept``.

    The checks take minutes; an interrupted acceptance is resumed. Raise UsageError for invalid options,
    EnvironmentProblem for unusable GPUs or files, InfrastructureError if the scheduler does not answer, UserInterrupt
    on Ctrl-C.
    """
    return accept_with(on_message, minutes, nodes, checks, start_new=start_new)


@_checked
def parse(path: str | Path, *, window: str = DEFAULT_RULE) -> ParsedLogs:
    """Return the outcome of one log, of every log in a folder, or of runs by id or label, like ``llmb parse``.
    Raise UsageError for an invalid window or path."""
    check_rule(window)
    found = find_all_logs(run_paths([parse_path(path)]))
    read = (parsed_run(log, window) for log in found.logs)
    runs = with_copies([*(run_of_log(file, window) for file in found.refused), *read])
    return ParsedLogs(sorted((run.log for run in runs if run.log), key=lambda file: file.path))


@_checked
def compare(
    before: str | Path,
    after: str | Path | None = None,
    *,
    vary: Sequence[str] = (),
    tolerance: float | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> RunComparison:
    """Compare two groups of runs, like ``llmb compare``: folders, labels, campaigns, ids or dates.

    Without ``after``, groups within ``before`` that differ in ``vary`` are compared. ``tolerance`` is in percent. Raise
    UsageError for invalid arguments, but no error for a regression: see ``rows``.
    """
    limit = tolerance_of(tolerance, "tolerance")
    install = install_root(os.environ, Path.cwd())
    sides = find_sides(str(before), None if after is None else str(after), install, on_message)
    earlier = earlier_runs(install, on_message)
    return RunComparison(**dict(compare_runs(*sides, vary=vary, tolerance_pct=limit and limit.pct, earlier=earlier)))


@_checked
def report(
    runs: str | Path | Sequence[str] | None = None,
    *,
    against: str | Path | None = None,
    output: str | Path = "report.html",
    full: bool = False,
    on_message: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a page about runs, by default all runs here, and return its path, like ``llmb report``.

    The name of ``output`` ends with .html, .md or .pdf. ``full`` shows names of users, hosts and home folders. Raise
    UsageError for another name or if no run has ended, EnvironmentProblem if the page cannot be written.
    """
    path = parse_path(output)
    if path.suffix not in _PAGES:
        do = "pass an output that ends with one of these"
        raise UsageError(f"output {path.name} has an unknown file extension", choices=_PAGES, do=do)
    selectors = [str(runs)] if isinstance(runs, str | Path) else None if runs is None else [*runs]
    install = install_root(os.environ, Path.cwd())
    chosen = None if against is None else str(against)
    _, page = report_on(selectors, chosen, install, on_message, _PAGES[path.suffix], full=full)
    write_named(path, page, "output")
    return path


_PAGES: Mapping[str, Form] = {".html": "html", ".md": "md", ".pdf": "pdf"}


def _requested(
    options: Mapping[str, Any], workload: str | None, size: str | None, *more: type
) -> tuple[ModelRequest, dict[str, Any]]:
    known = {key: option for option in options_of(ModelRequest, *more).values() for key in option.keys}
    values: dict[str, Any] = {}
    for name, value in {**options, "workload": workload, "size": size}.items():
        if name not in known:
            raise unknown("option", name, known)
        option = known[name]
        if option.name in values:
            same = " and ".join(sorted(options.keys() & option.keys))
            raise UsageError(f"{same} are the same option", do="pass only one")
        if value is not None and not option.takes(value):
            raise UsageError(f"{name} is {value!r}; it must be {valid_values(option)}")
        values[option.name] = value
    return request_of(values), values
