# SPDX-License-Identifier: Apache-2.0
"""Runs with statistics of other steps than those of their own window."""

from collections.abc import Iterable
from dataclasses import replace

from llmb.analysis.analyzed_run import AnalyzedRun, flaw_of, step_times
from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.metrics.statistics import describe
from llmb.metrics.window import resolve_window
from llmb.programs.lookup import find_program
from llmb.programs.port import End
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord
from llmb.runs.result import Result


def in_window(runs: Iterable[AnalyzedRun], rule: str | None) -> tuple[AnalyzedRun, ...]:
    """``runs`` with the window ``rule``; None leaves theirs. Raises UsageError for runs whose steps are not kept."""
    return tuple(runs) if rule is None else tuple(_in_window(run, rule) for run in runs)


def _in_window(run: AnalyzedRun, rule: str) -> AnalyzedRun:
    if run.record is None:
        from llmb.analysis.logged_runs import log_read_again  # what reads logs takes longer to load than to judge

        if not run.path.is_file():
            what = f"the steps of {run.id} are not numbered: it is of a comparison of engines"
            raise UsageError(what, do="leave out --window")
        return log_read_again(run.path, rule)
    if flaw_of(run):
        return run
    plan, folder = run.record.plan, RunFolder(run.path)
    try:
        window = resolve_window(rule, plan.steps, plan.first_step, plan.recipe.documented_window)
    except UsageError as error:
        return replace(run, window=None, step_times_s=(), step_time_s=None, reason=error.what)
    result = _result(folder, run.record, window)
    window, kept = result.window or window, result.step_time_s or None
    times = step_times(folder, window) if kept else ()
    known = describe(times) if times else kept
    return replace(run, window=window, step_times_s=times, step_time_s=known, reason=result.flaw)


def _result(folder: RunFolder, record: RunRecord, window: Window) -> Result:
    """The result that a successful run would have ended with."""
    plan = record.plan.model_copy(update={"window": window})
    not_ended = record.model_copy(update={"plan": plan, "status": "running", "result": None})
    return find_program(record.program).result(folder, not_ended, End(0))
