# SPDX-License-Identifier: Apache-2.0
"""Bisects by running the user's command once for each run that is needed."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from llmb.analysis.analyzed_run import why_left_out
from llmb.analysis.bisect_runs import BisectReport, bisect_report
from llmb.analysis.bisect_state import CANDIDATE, LABEL, BisectState, write_state
from llmb.analysis.find_runs import Say, analyzed_run, run_folders_below
from llmb.errors import LlmbError, RunFailed, UsageError
from llmb.runs.folder import RunFolder

SKIP = 125
"""The exit code of a command that cannot run this candidate, as for ``git bisect run``."""
TRIES = 2
"""A command that made no measurement is run once more: a node may have failed, and not the candidate."""


def check_command(command: Sequence[str]) -> None:
    if not any(CANDIDATE in word for word in command):
        do = f"write -- COMMAND ... {CANDIDATE} ...; {LABEL} stands for the label of its runs"
        raise UsageError(f"the command has no {CANDIDATE} to replace", do=do)


def bisect_by_command(state: BisectState, command: Sequence[str], install: Path, say: Say) -> BisectReport:
    """Runs until the search ends. State is written after each run, so that a later call resumes the search.

    Raises RunFailed if the first or the last candidate cannot be measured, EnvironmentProblem if the command cannot be
    started.
    """
    runs, skipped = -1, len(state.skipped)
    while (report := bisect_report(state, install, say)).status == "measure":
        assert report.candidate is not None
        if report.total_runs <= runs and len(state.skipped) == skipped:
            what = "the command makes copies of a run, which count once"
            raise RunFailed(what, do="see that it trains: each run gets an id of its own when it begins")
        runs, skipped = report.total_runs, len(state.skipped)
        say(f"run {runs + 1}: {report.candidate}")
        state = _measured(state, report.candidate, command, install, say)
        write_state(install, state)
    return report


def _measured(state: BisectState, candidate: str, command: Sequence[str], install: Path, say: Say) -> BisectState:
    """With one more run of the candidate, or with the candidate skipped."""
    label = state.labels[state.place(candidate)]
    words = [word.replace(CANDIDATE, candidate).replace(LABEL, label) for word in command]
    for attempt in range(TRIES):
        known = run_folders_below(install)
        code = _run(words, install)
        made = tuple(str(path) for path in sorted(run_folders_below(install) - known) if _why_unusable(path) is None)
        if made:
            return state.with_runs(candidate, made)
        reasons = [why for path in run_folders_below(install) - known if (why := _why_unusable(path))]
        said = "; ".join(dict.fromkeys(reasons)) or f"it made no run below {install}"
        say(f"{candidate}: the command ended with exit code {code} and no measurement: {said}")
        if code == SKIP:
            break
        if attempt + 1 < TRIES:
            say(f"{candidate}: it is retried once")
    if state.place(candidate) in (0, len(state.candidates) - 1):
        do = "see that the command works for it by hand; the next call resumes the search"
        raise RunFailed(f"'{candidate}' cannot be measured, and it is one of the two that are compared", do=do)
    say(f"{candidate}: it is skipped")
    return state.with_skipped(candidate)


def _why_unusable(folder: Path) -> str | None:
    try:
        return why_left_out(analyzed_run(RunFolder(folder)))
    except LlmbError as error:
        return error.what
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _run(words: Sequence[str], install: Path) -> int:
    """Its output goes to standard error: standard output has the result alone."""
    environ = {**os.environ, "LLMB_INSTALL": str(install)}
    try:
        with subprocess.Popen(list(words), stdout=sys.stderr.fileno(), env=environ) as child:
            try:
                return child.wait()
            except KeyboardInterrupt:
                child.wait()  # it is interrupted too, and ends what it has started
                raise
    except OSError as error:
        raise UsageError(f"the command cannot be started: {error.strerror}", where=words[0]) from error
