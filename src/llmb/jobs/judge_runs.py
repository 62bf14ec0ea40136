# SPDX-License-Identifier: Apache-2.0
"""Judges runs against what a word, a path or a file stands for: other runs, expectations, or the published figure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.base.errors import unknown
from llmb.catalogue.catalogue import Catalogue
from llmb.jobs.find_runs import earlier_runs, find_runs, in_window
from llmb.runs.analyzed_run import AnalyzedRun, RunSet, grouped, without_unmeasured
from llmb.verdict.copies import once_in
from llmb.verdict.expectations_file import Expectations, read_expectations
from llmb.verdict.judge_run import Judged, is_pretended, judge_against, judge_alone, judge_expected, judge_pretended
from llmb.verdict.judgement import Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """The reference to judge against: at most one of ``runs`` and ``expectations``, else the published figure."""

    runs: str | None = None
    """A selector for ``find_runs``."""
    expectations: Path | Expectations | None = None
    tolerance: Tolerance | None = None
    """None for the default."""
    gpu_type: str | None = None
    """GPU type of logs that do not name theirs, for the published figure."""
    window: str | None = None
    """The rule of the window that the runs have been read with, for those that they are judged against."""


def judge_runs(
    runs: Sequence[AnalyzedRun], against: Against, install: Path, say: Callable[[str], None]
) -> list[Judged]:
    """Judge runs. Raises UsageError if there is nothing to judge them against, or for an unknown GPU type."""
    if against.gpu_type and against.gpu_type not in (known := Catalogue().gpus):
        raise unknown("GPU type", against.gpu_type, known)
    pretended, others = [run for run in runs if is_pretended(run)], [run for run in runs if not is_pretended(run)]
    judged = [judge_pretended(repeats) for repeats in grouped(pretended)]
    return [*judged, *_judge_runs(others, against, install, say)] if others else judged


def _judge_runs(
    runs: Sequence[AnalyzedRun], against: Against, install: Path, say: Callable[[str], None]
) -> list[Judged]:
    def earlier(run: AnalyzedRun) -> Sequence[AnalyzedRun]:
        return in_window(known(run), against.window)

    known = earlier_runs(install, say)
    if against.runs is not None:
        _, baseline = once_in(RunSet("", tuple(runs)), find_runs(against.runs, install, say))
        baseline = without_unmeasured(replace(baseline, runs=in_window(baseline.runs, against.window)))
        for one in baseline.left_out:
            say(f"left out of {baseline.title}: {one.run}: {one.reason}")
        judged = {run.counted_as for run in runs}
        others = [run for run in baseline.runs if run.counted_as not in judged]
        return judge_against(runs, others, baseline.title, against.tolerance, earlier)
    if against.expectations is not None:
        given = against.expectations
        expectations = read_expectations(given) if isinstance(given, Path) else given
        for where in expectations.without_source:
            say(f"note: {where}: the entry has no source")
        return [judge_expected(run, expectations, against.tolerance) for run in runs]
    return [judged for run in runs for judged in judge_alone(run, against.tolerance, against.gpu_type, earlier)]
