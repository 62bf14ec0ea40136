# SPDX-License-Identifier: Apache-2.0
"""llmb from Python, such as in a notebook: the commands as functions with typed results.

Options have the names of the command line's, with underscores: ``llmb.run("pretrain_llama3.1", "tiny", scale=2)``.
Errors are those of ``llmb.errors``; each has the text that the command line prints.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmb.analysis.compare_runs import compare_runs
from llmb.analysis.comparison import Comparison
from llmb.analysis.copies import with_copies
from llmb.analysis.find_runs import earlier_runs, find_ended_runs, find_sides
from llmb.analysis.judge_run import Against, judge_runs
from llmb.analysis.parsed_run import known_run
from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import Request
from llmb.catalogue.resolve import resolve as resolve_request
from llmb.checkpoints.origin import Origin
from llmb.errors import UsageError, unknown
from llmb.jobs.local_run import plan_here, raise_unless_successful
from llmb.logs.files import ParsedFile, find_logs, parse_file
from llmb.metrics.window import DEFAULT_RULE, check_rule
from llmb.options.option import build, options_of
from llmb.options.text import valid_values
from llmb.programs.conclude import finished_result
from llmb.runs.choices import Choices
from llmb.runs.folder import RunFolder, chosen_root
from llmb.runs.record import read_record, unreadable_record
from llmb.runs.result import Result
from llmb.runs.step_follower import StepNews
from llmb.verdict.records import Verdict
from llmb.verdict.tolerance import given_tolerance


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended; ``recipe.unspecified`` lists what was left open."""

    folder: Path
    recipe: Recipe
    result: Result
    origin: Origin
    """Where its weights and data come from."""


def recipe(workload: str, size: str, **options: Any) -> Recipe:  # noqa: ANN401 (by the option)
    """A recipe of the catalogue with its layout and published figures, as ``llmb show``. Raises UsageError."""
    values = _known(options, Request, workload, size)
    return resolve_request(Catalogue(), build(Request, values))


def run(
    workload: str,
    size: str,
    *,
    on_step: Callable[[StepNews], None] = lambda _: None,
    on_message: Callable[[str], None] = lambda _: None,
    **options: Any,  # noqa: ANN401 (by the option)
) -> Run:
    """Trains on this machine, as ``llmb run``; call it from the main thread.

    Raises UsageError and EnvironmentProblem before the training, RunFailed and InvalidRun after it.
    """
    values = _known(options, Request, workload, size, Choices)
    local = plan_here(
        Catalogue(),
        build(Request, values),
        build(Choices, values),
        os.environ,
        chosen_root(os.environ, Path.cwd()).path,
    )
    local.check()
    folder, ended = local.start(on_step, on_message)
    raise_unless_successful(folder, ended)
    return Run(folder.path, local.plan.recipe, ended, local.plan.origin)


def result(folder: str | Path) -> Run:
    """A run that has ended, from its folder, as ``llmb result``; also one that failed. Raises UsageError."""
    home = RunFolder(Path(folder).expanduser().absolute())
    try:
        record = read_record(home)
    except (OSError, ValueError) as error:
        raise unreadable_record(home, error) from error
    if record.status in ("queued", "running"):
        raise UsageError(f"the run has no result yet: it is {record.status}", where=str(home.path))
    return Run(home.path, record.plan.recipe, finished_result(home, record), record.plan.origin)


def judge(
    path: str | Path,
    *,
    against: str | Path | None = None,
    expect: str | Path | None = None,
    tolerance: float | None = None,
    gpu_type: str | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Whether a run, its folder or log, is as fast as it should be, as ``llmb judge``.

    Also repeats in a folder, which have one verdict ``against`` other runs. ``tolerance`` is in percent, ``gpu_type``
    that of a log that does not report it. Raises UsageError if there is no run that ended, or if there would be several
    verdicts.
    """
    limit = given_tolerance(tolerance, "tolerance")
    if against is not None and expect is not None:
        raise UsageError("against and expect cannot be combined", do="give one of them")
    install = chosen_root(os.environ, Path.cwd()).path
    found = find_ended_runs(str(Path(path).expanduser().absolute()), install, on_message)
    reference = Against(
        runs=None if against is None else str(against),
        expectations=None if expect is None else Path(expect).expanduser(),
        tolerance=limit,
        gpu_type=gpu_type,
    )
    judged = judge_runs(found.runs, reference, install, on_message)
    if len(judged) != 1:
        count = f"{len(judged)} verdicts" if judged else "no run has ended"
        raise UsageError(f"one run, or repeats of one recipe, are needed: {count}", where=str(path))
    return judged[0].verdict


def parse(path: str | Path, *, window: str = DEFAULT_RULE) -> list[ParsedFile]:
    """The outcome of every log in a folder, or of one file, by path, as ``llmb parse``. Raises UsageError."""
    check_rule(window)
    found = find_logs(Path(path).expanduser())
    runs = with_copies([*map(known_run, found.refused), *(known_run(parse_file(log, window)) for log in found.logs)])
    return sorted((run.file for run in runs), key=lambda file: file.path)


def compare(
    before: str | Path,
    after: str | Path | None = None,
    *,
    vary: Sequence[str] = (),
    tolerance: float | None = None,
    on_message: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Two groups of runs, as ``llmb compare``: folders, labels, campaigns, ids or dates. Raises UsageError.

    Without ``after``, groups within ``before`` that differ in ``vary``. ``tolerance`` is in percent. A verdict raises
    nothing: see ``rows``.
    """
    limit = given_tolerance(tolerance, "tolerance")
    install = chosen_root(os.environ, Path.cwd()).path
    sides = find_sides(str(before), None if after is None else str(after), install, on_message)
    earlier = earlier_runs(install, on_message)
    return compare_runs(*sides, vary=vary, tolerance_pct=limit and limit.pct, earlier=earlier)


def _known(options: Mapping[str, Any], request: type, workload: str, size: str, *more: type) -> dict[str, Any]:
    """Values by option. Raises UsageError for an option that does not exist or has a value of another type."""
    known = {key: option for option in options_of(request, *more).values() for key in option.keys}
    values: dict[str, Any] = {}
    for name, value in {**options, "workload": workload, "size": size}.items():
        if name not in known:
            raise unknown("option", name, known)
        option = known[name]
        if option.name in values:
            raise UsageError(f"{name} is another name of {option.spelled}, which has a value", do="give one of them")
        if value is not None and not option.takes(value):
            raise UsageError(f"{name} is {value!r}; it must be {valid_values(option)}")
        values[option.name] = value
    return values
