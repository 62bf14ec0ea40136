# SPDX-License-Identifier: Apache-2.0
"""Where a bisection stands: the runs of each candidate, and what to run next."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns, why_left_out
from llmb.analysis.bisect_state import CANDIDATE, BisectState
from llmb.analysis.copies import once
from llmb.analysis.find_runs import Say, analyzed_run, find_runs, labeled_runs
from llmb.catalogue.records import Record
from llmb.errors import UsageError
from llmb.metrics.group_difference import GroupDifference, RunMean, group_difference
from llmb.runs.folder import RunFolder
from llmb.runs.identity import differences
from llmb.runs.record_file import BrokenRecord
from llmb.verdict.bisect_search import (
    CONFIDENCE,
    BisectFinding,
    Measure,
    Observations,
    Step,
    Stuck,
    next_step,
    probabilities,
)

Status = Literal["measure", "found", "stuck"]
Standing = Literal["as before", "as after", "open", "skipped"]


class CandidateReport(Record):
    candidate: str
    label: str
    runs: int
    step_time_s: float | None
    """Median of the runs' means; None without a run."""
    delta_pct: float | None
    """From the first candidate."""
    standing: Standing
    probability: float | None
    """That the change came with this candidate; None while the first and the last one need runs."""


class BisectReport(Record):
    """The keys are a contract."""

    name: str
    status: Status
    candidate: str | None
    """The next to run, the one that was found, or the one that stops the search."""
    runs: int | None
    """How many runs of it are needed next."""
    label: str | None
    """For the next runs."""
    command: tuple[str, ...] | None
    """That makes the next runs."""
    found: tuple[str, ...]
    """Candidates that may have made the change: one, or more where some were skipped."""
    probability: float | None
    delta_pct: float | None
    """Step time of the last candidate relative to the first; above 0 is slower."""
    ci95_pct: tuple[float, float] | None
    reason: str | None
    total_runs: int
    candidates: tuple[CandidateReport, ...]


Runs = dict[int, list[AnalyzedRun]]
"""By the place of the candidate."""


def bisect_report(state: BisectState, install: Path, say: Say) -> BisectReport:
    """Reads the runs of every candidate. Raises UsageError if they are not of one recipe."""
    runs = _runs(state, install, say)
    _check_one_recipe(runs)
    means = {place: [run.step_time_s.mean for run in found if run.step_time_s] for place, found in runs.items()}
    skipped = frozenset(state.place(candidate) for candidate in state.skipped)
    known = Observations(len(state.candidates), means, skipped)
    return _report(state, known, next_step(known))


def _report(state: BisectState, known: Observations, step: Step) -> BisectReport:
    place = step.last if isinstance(step, BisectFinding) else step.place
    measure = step if isinstance(step, Measure) else None
    found = step if isinstance(step, BisectFinding) else None
    difference = _difference(known)
    return BisectReport(
        name=state.name,
        status="measure" if measure else "found" if found else "stuck",
        candidate=None if place is None else state.candidates[place],
        runs=measure and measure.runs,
        label=measure and state.labels[measure.place],
        command=measure and run_command(state, measure.place, measure.runs),
        found=state.candidates[found.first : found.last + 1] if found else (),
        probability=found and found.probability,
        delta_pct=difference and difference.delta_pct,
        ci95_pct=difference and difference.ci95_pct,
        reason=step.reason if isinstance(step, Stuck) else None,
        total_runs=sum(map(len, known.means_s.values())),
        candidates=tuple(_candidate_reports(state, known)),
    )


def run_command(state: BisectState, place: int, runs: int) -> tuple[str, ...] | None:
    """That makes runs of the candidate; None if the bisection was not begun with what it runs."""
    if not state.workload or not state.size:
        return None
    options = (option.replace(CANDIDATE, state.candidates[place]) for option in state.options)
    named = {"-w": state.workload, "-s": state.size, "--dtype": state.dtype, "--scale": state.scale}
    recipe = (word for name, value in named.items() if value is not None for word in (name, str(value)))
    return ("llmb", "run", *recipe, *options, "--label", state.labels[place], "--repeats", str(runs))


def _runs(state: BisectState, install: Path, say: Say) -> Runs:
    """The measured runs of every candidate: by its label, by what the user named, and those that a command made."""
    labeled = labeled_runs(state.labels, install, say)
    last = len(state.candidates) - 1
    named = {
        place: _named(state, text, find_runs(text, install, say), say)
        for place, text in ((0, state.good), (last, state.bad))
        if text
    }
    runs: Runs = defaultdict(list)
    for place, (candidate, label) in enumerate(zip(state.candidates, state.labels, strict=True)):
        made = _made(state.run_dirs.get(candidate, ()))
        every = once((*labeled[label].runs, *named.get(place, ()), *made))
        runs[place] = [run for run in every if _is_of(state, run)]
    return runs


def _named(state: BisectState, text: str, found: FoundRuns, say: Say) -> tuple[AnalyzedRun, ...]:
    """Runs of the recipe; says so if there are none."""
    runs = tuple(run for run in found.runs if _is_of(state, run))
    if not runs:
        left_out = "".join(f"; {one.run}: {one.reason}" for one in found.left_out)
        say(f"warning: '{text}' has no measured run of the recipe ({len(found.runs)} of others{left_out})")
    return runs


def _made(folders: Sequence[str]) -> Iterator[AnalyzedRun]:
    """Folders that were removed since are no runs any more."""
    for folder in folders:
        try:
            run = analyzed_run(RunFolder(Path(folder)))
        except (OSError, BrokenRecord, UsageError):
            continue
        if why_left_out(run) is None:
            yield run


def _is_of(state: BisectState, run: AnalyzedRun) -> bool:
    wanted = {"workload": state.workload, "size": state.size, "dtype": state.dtype, "layout.gpus": state.scale}
    values = run.identity.configuration
    return all(value in (None, values.get(key)) for key, value in wanted.items())


def _check_one_recipe(runs: Runs) -> None:
    every = {run.identity.key: run for found in runs.values() for run in found}
    if len(every) < 2:
        return
    one, other, *_ = every.values()
    keys = ", ".join(
        f"{item.key} ({item.before}, {item.after})"
        for item in differences(one.identity.configuration, other.identity.configuration)
    )
    raise UsageError(
        f"the runs are not repeats of one recipe: {one.id} and {other.id} differ in {keys}",
        do="begin with -w, -s, --dtype and --scale of the recipe, or with another --name, which labels begin with",
    )


def _difference(known: Observations) -> GroupDifference | None:
    """Between the last and the first candidate."""
    ends = [[RunMean(mean_s=mean) for mean in known.of(place)] for place in (0, known.count - 1)]
    return group_difference(ends[0], ends[1]) if all(ends) else None


def _candidate_reports(state: BisectState, known: Observations) -> Iterator[CandidateReport]:
    shares = probabilities(known)
    first = known.of(0)
    for place, candidate in enumerate(state.candidates):
        means = known.of(place)
        yield CandidateReport(
            candidate=candidate,
            label=state.labels[place],
            runs=len(means),
            step_time_s=median(means) if means else None,
            delta_pct=100 * (median(means) / median(first) - 1) if means and first else None,
            standing=_standing(known, shares, place),
            probability=shares[place] if shares else None,
        )


def _standing(known: Observations, shares: Sequence[float] | None, place: int) -> Standing:
    if place in known.skipped:
        return "skipped"
    if place in (0, known.count - 1):
        return "as after" if place else "as before"
    after = sum(shares[: place + 1]) if shares else 0.5
    return "as after" if after >= CONFIDENCE else "as before" if after <= 1 - CONFIDENCE else "open"
