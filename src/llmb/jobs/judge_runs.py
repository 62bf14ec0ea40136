# SPDX-License-Identifier: Apache-2.0
"""Judges runs against a reference: other runs, an expectations file, the published figure or a prediction."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.find_runs import earlier_runs, find_runs, in_window
from llmb.prediction.prediction import SOFTWARE_OF_PROGRAMS, TORCHTITAN, predicted_step
from llmb.runs.analyzed_run import AnalyzedRun, RunSet, grouped, without_unmeasured
from llmb.runs.choices import Choices
from llmb.runs.conditions import Value
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.result import Condition, Reference
from llmb.verdict.catalogue_figures import as_catalogued, find_recipe, with_stated
from llmb.verdict.copies import once_in
from llmb.verdict.expectations_file import Expectations, read_expectations
from llmb.verdict.judge_run import Judged, is_pretended, judge_against, judge_alone, judge_expected, judge_pretended
from llmb.verdict.judgement import Tolerance, judge_against_figure, stated_conditions


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The reference to judge against: ``runs`` or ``expectations``. If both are None, it is the published figure or, if
    there is none, earlier runs of the recipe or a prediction."""

    runs: str | None = None
    """A selector for ``find_runs``."""
    expectations: Path | Expectations | None = None
    tolerance: Tolerance | None = None
    """The tolerance of the verdicts; None for the default of the reference."""
    logs: Mapping[str, Value] = field(default_factory=dict)
    """Facts that logs do not report, by configuration key."""
    window: str | None = None
    """The window rule with which the runs were read; reference runs use it too."""


def judge_runs(
    runs: Sequence[AnalyzedRun], against: Against, install: Path, say: Callable[[str], None]
) -> list[Judged]:
    """Judge runs; raise LlmbError if the selected reference cannot be used, or if logs contradict ``against.logs``."""
    runs = with_stated(runs, against.logs, Catalogue()) if against.logs else runs
    pretended, others = [run for run in runs if is_pretended(run)], [run for run in runs if not is_pretended(run)]
    judged = [judge_pretended(repeats) for repeats in grouped(pretended)]
    return [*judged, *_judge_runs(others, against, install, say)] if others else judged


def _judge_runs(
    runs: Sequence[AnalyzedRun], against: Against, install: Path, say: Callable[[str], None]
) -> list[Judged]:
    def earlier(run: AnalyzedRun) -> Sequence[AnalyzedRun]:
        return in_window(before(run), against.window)

    before = earlier_runs(install, say)
    if against.runs is not None:
        _, baseline = once_in(RunSet("", tuple(runs)), find_runs(against.runs, install, say))
        known_runs = with_stated(in_window(baseline.runs, against.window), against.logs, Catalogue())
        baseline = without_unmeasured(replace(baseline, runs=known_runs))
        for one in baseline.left_out:
            say(f"left out of {baseline.title}: {one.run}: {one.reason}")
        judged = {run.counted_as for run in runs}
        others = [run for run in baseline.runs if run.counted_as not in judged]
        return judge_against(runs, others, baseline.title, against.tolerance, earlier)
    if against.expectations is not None:
        explicit = against.expectations
        expectations = read_expectations(explicit) if isinstance(explicit, Path) else explicit
        for where in expectations.without_source:
            say(f"note: {where}: the entry has no source")
        return [judge_expected(run, expectations, against.tolerance) for run in runs]
    judged_alone = (judged for run in runs for judged in judge_alone(run, against.tolerance, earlier))
    return [_against_prediction(judged, against.tolerance) for judged in judged_alone]


def _against_prediction(judged: Judged, tolerance: Tolerance | None) -> Judged:
    run = judged.runs[0]
    if run.step_time_s is None or judged.verdict.reference or judged.verdict.verdict == "invalid":
        return judged
    catalogue = Catalogue()
    try:
        plan = run.record.plan if run.record else _plan_of_log(run, catalogue)
        program = str(stated_conditions(run).get("program"))
        software = SOFTWARE_OF_PROGRAMS.get(program, TORCHTITAN)
        predicted = predicted_step(catalogue, plan, software) if isinstance(plan, EnginePlan) else None
    except UsageError:  # the engine cannot train it
        return judged
    if plan is None or predicted is None:
        return judged
    pct = 100 * (predicted.ci95_s[1] / predicted.step_time_s - 1)
    source = f"a prediction of llmb predict, ±{pct:.0f} %, as {judged.verdict.reason}"
    reference = Reference(kind="prediction", step_time_s=predicted.step_time_s, source=source)
    limit = tolerance or Tolerance(pct, "the interval of the prediction")
    other = Condition(key="program", own=program, reference="llmb predict", effect="weakens")
    verdict = judge_against_figure([run], reference, (other,), limit)
    return replace(judged, title=plan.recipe.title(), verdict=verdict)


def _plan_of_log(run: AnalyzedRun, catalogue: Catalogue) -> EnginePlan | None:
    recipe = find_recipe(as_catalogued(run.configuration, catalogue), catalogue, own_sizes=True)
    return make_plan(recipe, Choices(), device="cuda") if recipe else None
