# SPDX-License-Identifier: Apache-2.0
"""A search for what made training slower: its state in a file, its candidates' runs, and a command that makes them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import Field

from llmb.analysis.analyzed_run import AnalyzedRun, FoundRuns
from llmb.analysis.copies import once_in
from llmb.analysis.find_runs import Say, find_runs, labeled_runs, runs_in
from llmb.catalogue.records import Record
from llmb.errors import RunFailed, UsageError
from llmb.input_files import read_text_file
from llmb.jobs.history import run_folders_below
from llmb.runs.folder import write_atomically, writing
from llmb.runs.identity import Difference, differences
from llmb.runs.record_file import BrokenRecord, read_record_file
from llmb.trust import STATE_FOLDER, check_links, check_owner
from llmb.verdict.bisect_search import CONFIDENCE, Means, Status, ends_difference, next_step, probabilities
from llmb.verdict.conditions import CHANGED_COPY, condition_values, merged, rule_of

DEFAULT_NAME = "bisect"
CANDIDATE, LABEL = "{candidate}", "{label}"
"""In a command, what stands for a candidate and for the label of its runs."""
MOST_LETTERS = 64
"""Letters of a label at most."""
SKIP = 125
"""The exit code of a command that cannot run this candidate, as for ``git bisect run``."""
TRIES = 2
"""A command that made no measurement is run once more: a node may have failed, and not the candidate."""
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_NO_LABEL = re.compile(r"[^A-Za-z0-9._-]+|\.\.+")


class BisectState(Record):
    """What a search is about, and which runs it has; the content of a file that outlives every command."""

    schema_version: Literal[1] = 1
    name: str
    candidates: tuple[str, ...]
    """In order; the first one is known to be as before, the last one as after."""
    workload: str | None = None
    size: str | None = None
    dtype: str | None = None
    scale: int | None = None
    """Scale of the runs; None for whatever the runs with the labels are."""
    good: str | None = None
    """Selects further runs of the first candidate."""
    bad: str | None = None
    """Selects further runs of the last candidate."""
    options: tuple[str, ...] = ()
    """Options of the command that makes a run."""
    skipped: tuple[str, ...] = ()
    run_dirs: dict[str, tuple[Path, ...]] = Field(default_factory=dict)
    """Folders of runs that a command made, by candidate."""

    @property
    def labels(self) -> dict[str, str]:
        """The label of each candidate's runs, with the candidates' names if labels can hold them."""
        texts = [_NO_LABEL.sub("-", candidate).strip("-.") for candidate in self.candidates]
        fit = len(set(texts)) == len(texts) and all(texts) and len(max(texts, key=len)) < MOST_LETTERS - len(self.name)
        ends = texts if fit else range(1, len(texts) + 1)
        return {candidate: f"{self.name}-{end}" for candidate, end in zip(self.candidates, ends, strict=True)}

    def with_skipped(self, candidate: str) -> "BisectState":
        """Raises UsageError for the first and the last candidate: these are compared."""
        if candidate not in (inner := self.candidates[1:-1]):
            raise UsageError(f"'{candidate}' is not a candidate that can be skipped", choices=inner)
        return self.model_copy(update={"skipped": (*self.skipped, candidate)})

    def with_runs(self, candidate: str, folders: Sequence[Path]) -> "BisectState":
        known = self.run_dirs.get(candidate, ())
        return self.model_copy(update={"run_dirs": {**self.run_dirs, candidate: (*known, *folders)}})


def read_candidates(text: str) -> tuple[str, ...]:
    """Names separated by commas, or those in a file, one a line. Raises UsageError for fewer than two, or a repeat."""
    path = Path(text).expanduser()
    words = read_text_file(path).decode(errors="replace").splitlines() if path.is_file() else text.split(",")
    names = [word.strip() for word in words if word.strip() and not word.lstrip().startswith("#")]
    if len(names) < 2:
        do = "give a file with one candidate a line, oldest first, or names separated by commas"
        no_file = "" if path.is_file() or "," in text else "; there is no such file"
        raise UsageError(f"--candidates {text!r} has fewer than two candidates{no_file}", do=do)
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"candidates are listed more than once: {', '.join(repeated)}", do="list each once, in order")
    return tuple(names)


def state_path(install: Path, name: str) -> Path:
    """Raises UsageError for a name that no file can have."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--name is {name!r}; it must be up to 32 letters, digits, '_' and '-'")
    return install / STATE_FOLDER / "bisect" / f"{name}.json"


def read_state(install: Path, name: str) -> BisectState:
    """Raises UsageError if there is none, or if its file is damaged or of another user than this one and the root's."""
    path = state_path(install, name)
    if not path.is_file():
        others = sorted(found.stem for found in path.parent.glob("*.json"))
        do = "'llmb bisect start --candidates A,B,C' begins one"
        raise UsageError(f"there is no bisection '{name}'", where=str(path), choices=others, do=do)
    check_links(path)
    check_owner(path, install)
    try:
        return read_record_file(path, BisectState)
    except BrokenRecord as error:
        do = f"begin again with --fresh: 'llmb bisect start --fresh --name {name} --candidates A,B,C'; runs are kept"
        raise UsageError(f"the bisection '{name}' cannot be resumed: {error.what}", where=error.where, do=do) from error


def write_state(install: Path, state: BisectState) -> None:
    """Raises NotWritable."""
    path = state_path(install, state.name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, state.model_dump_json(indent=2) + "\n")


Standing = Literal["as before", "as after", "open", "skipped"]


class CandidateReport(Record):
    """The keys are a contract, and the reference of files explains them."""

    candidate: str
    label: str
    runs: int
    step_time_s: float | None
    delta_pct: float | None
    standing: Standing
    probability: float | None


class BisectReport(Record):
    """The keys are a contract, likewise."""

    name: str
    status: Status
    candidate: str | None
    runs: int | None
    label: str | None
    command: tuple[str, ...] | None
    found: tuple[str, ...]
    probability: float | None
    delta_pct: float | None
    ci95_pct: tuple[float, float] | None
    reason: str | None
    total_runs: int
    candidates: tuple[CandidateReport, ...]
    differences: tuple[Difference, ...] = ()
    """Important settings of nodes that the runs of the first and of the last candidate differ in."""


def bisect_report(state: BisectState, install: Path, say: Say) -> BisectReport:
    """Reads the runs of every candidate. Raises UsageError if they are not of one recipe."""
    runs = _runs(state, install, say)
    _check_one_recipe([run for found in runs for run in found])
    means_s = [[run.step_time_s.mean for run in found if run.step_time_s] for found in runs]
    step = next_step(means_s, {state.candidates.index(candidate) for candidate in state.skipped})
    difference = ends_difference(means_s)
    candidate = None if step.place is None else state.candidates[step.place]
    return BisectReport(
        name=state.name,
        status=step.status,
        candidate=candidate,
        runs=step.runs,
        label=state.labels[candidate] if candidate and step.runs else None,
        command=_run_command(state, candidate, step.runs) if candidate and step.runs else None,
        found=() if step.first is None or step.place is None else state.candidates[step.first : step.place + 1],
        probability=step.probability,
        delta_pct=difference and difference.delta_pct,
        ci95_pct=difference and difference.ci95_pct,
        reason=step.reason,
        total_runs=sum(map(len, means_s)),
        candidates=tuple(_candidate_reports(state, means_s)),
        differences=tuple(_changed_settings(runs[0], runs[-1])),
    )


def _changed_settings(before: Sequence[AnalyzedRun], after: Sequence[AnalyzedRun]) -> Iterator[Difference]:
    """What may have made the change in place of the candidates, if it is none of them."""
    sides = [merged(condition_values(run.conditions) for run in runs) for runs in (before, after)]
    for item in differences(*sides):
        if rule_of(item.key).important and None not in (item.before, item.after):
            yield item


def _run_command(state: BisectState, candidate: str, runs: int) -> tuple[str, ...] | None:
    """That makes runs of the candidate; None if the bisection was not begun with what it runs."""
    if not state.workload or not state.size:
        return None
    options = (option.replace(CANDIDATE, candidate) for option in state.options)
    named = {"-w": state.workload, "-s": state.size, "--dtype": state.dtype, "--scale": state.scale}
    recipe = (word for name, value in named.items() if value is not None for word in (name, str(value)))
    return ("llmb", "run", *recipe, *options, "--label", state.labels[candidate], "--repeats", str(runs))


def _runs(state: BisectState, install: Path, say: Say) -> list[list[AnalyzedRun]]:
    """The measured runs of every candidate: by its label, by what the user named, and those that a command made."""
    labeled = labeled_runs(state.labels.values(), install, say)
    named = {state.candidates[0]: state.good, state.candidates[-1]: state.bad}
    runs = []
    for candidate, label in state.labels.items():
        found = [*labeled[label].runs, *runs_in(state.run_dirs.get(candidate, ())).runs]
        if text := named.get(candidate):
            selected = find_runs(text, install, say)
            if not any(_is_of(state, run) for run in selected.runs):
                left_out = "".join(f"; {one.run}: {one.reason}" for one in selected.left_out)
                say(f"warning: '{text}' has no measured run of the recipe ({len(selected.runs)} of others{left_out})")
            found += selected.runs
        (every,) = once_in(FoundRuns(candidate, tuple(found)))
        of_recipe = [run for run in every.runs if _is_of(state, run)]
        if doubt := next((run.faults[CHANGED_COPY] for run in of_recipe if CHANGED_COPY in run.faults), None):
            raise UsageError(f"the runs of '{candidate}' cannot be compared: {doubt[0]}")
        runs.append(of_recipe)
    return runs


def _is_of(state: BisectState, run: AnalyzedRun) -> bool:
    wanted = {"workload": state.workload, "size": state.size, "dtype": state.dtype, "layout.gpus": state.scale}
    values = run.identity.configuration
    return all(value in (None, values.get(key)) for key, value in wanted.items())


def _check_one_recipe(runs: Sequence[AnalyzedRun]) -> None:
    other = next((run for run in runs if run.identity.key != runs[0].identity.key), None)
    if other is None:
        return
    keys = ", ".join(
        f"{item.key} ({item.before}, {item.after})"
        for item in differences(runs[0].identity.configuration, other.identity.configuration)
    )
    raise UsageError(
        f"the runs are not repeats of one recipe: {runs[0].id} and {other.id} differ in {keys}",
        do="begin with -w, -s, --dtype and --scale of the recipe, or with another --name, which labels begin with",
    )


def _candidate_reports(state: BisectState, means_s: Means) -> Iterator[CandidateReport]:
    shares = probabilities(means_s)
    for place, ((candidate, label), means) in enumerate(zip(state.labels.items(), means_s, strict=True)):
        yield CandidateReport(
            candidate=candidate,
            label=label,
            runs=len(means),
            step_time_s=median(means) if means else None,
            delta_pct=100 * (median(means) / median(means_s[0]) - 1) if means and means_s[0] else None,
            standing=_standing(state, shares, place),
            probability=shares[place] if shares else None,
        )


def _standing(state: BisectState, shares: Sequence[float] | None, place: int) -> Standing:
    if state.candidates[place] in state.skipped:
        return "skipped"
    if place in (0, len(state.candidates) - 1):
        return "as after" if place else "as before"
    after = sum(shares[: place + 1]) if shares else 0.5
    return "as after" if after >= CONFIDENCE else "as before" if after <= 1 - CONFIDENCE else "open"


def bisect_by_command(state: BisectState, command: Sequence[str], install: Path, say: Say) -> BisectReport:
    """Runs the command until the search ends. State is written after each run, so that a later call resumes it.

    Raises RunFailed if the first or the last candidate cannot be measured, UsageError if the command cannot be started.
    """
    runs: int | None = None
    while (report := bisect_report(state, install, say)).status == "measure":
        assert report.candidate
        if report.total_runs == runs:
            what = "the command's run does not count: it is a copy of another one, or not of the recipe"
            raise RunFailed(what, do="see that it trains what --workload, --size, --dtype and --scale say")
        say(f"run {report.total_runs + 1}: {report.candidate}")
        skipped = state.skipped
        state = _with_run(state, report.candidate, command, install, say)
        write_state(install, state)
        runs = report.total_runs if state.skipped == skipped else None
    return report


def _with_run(state: BisectState, candidate: str, command: Sequence[str], install: Path, say: Say) -> BisectState:
    """With one more run of the candidate, or with the candidate skipped."""
    words = [word.replace(CANDIDATE, candidate).replace(LABEL, state.labels[candidate]) for word in command]
    for _ in range(TRIES):
        known = run_folders_below(install)
        code = _exit_code(words, install)
        made = runs_in(run_folders_below(install) - known)
        if made.runs:
            return state.with_runs(candidate, [run.path for run in made.runs])
        why = "; ".join(dict.fromkeys(one.reason for one in made.left_out)) or f"it made no run below {install}"
        say(f"{candidate}: the command ended with exit code {code} and no measurement: {why}")
        if code == SKIP:
            break
    if candidate in (state.candidates[0], state.candidates[-1]):
        do = "see that the command works for it by hand; the next call resumes the search"
        raise RunFailed(f"'{candidate}' cannot be measured, and it is one of the two that are compared", do=do)
    say(f"{candidate}: it is skipped")
    return state.with_skipped(candidate)


def _exit_code(words: Sequence[str], install: Path) -> int:
    """Runs a command, whose output goes to standard error: standard output has the result alone."""
    environ = {**os.environ, "LLMB_INSTALL": str(install)}
    try:
        with subprocess.Popen(words, stdout=sys.stderr.fileno(), env=environ) as child:
            try:
                return child.wait()
            except KeyboardInterrupt:
                child.wait()  # it is interrupted too, and ends what it has started
                raise
    except OSError as error:
        raise UsageError(f"the command cannot be started: {error.strerror}", where=words[0]) from error
