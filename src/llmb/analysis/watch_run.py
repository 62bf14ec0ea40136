# SPDX-License-Identifier: Apache-2.0
"""Looks at a run that lasts until it ends."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llmb.analysis.forecast import Expected
from llmb.analysis.watched import Circumstances, Outlook, StepHistory, outlook
from llmb.errors import UsageError
from llmb.runs.identity import Value
from llmb.runs.plan import Plan
from llmb.runs.published_verdict import figure_of
from llmb.runs.step_follower import StepNews
from llmb.verdict.conditions import condition_values
from llmb.verdict.expectations_file import read_expectations
from llmb.verdict.tolerance import default_tolerance


class Subject(Protocol):
    """What is watched."""

    def look(self, now_s: float) -> Circumstances:
        """How it is. Steps are read afterwards: of a run that has ended, all of them are there."""

    def new(self) -> Iterator[StepNews]:
        """The steps that were done since the last call; those of a new attempt begin again."""

    def written_s(self) -> float | None:
        """When the last step was written, in seconds since 1970; None if that is not known."""


class Watcher:
    """Remembers the steps of ``subject`` between looks."""

    def __init__(self, subject: Subject, expected: Expected | None = None) -> None:
        self.subject = subject
        self.expected = expected
        self.history = StepHistory()
        self.progress_s: float | None = None
        """When there last was progress, by this host's clock: that of a file may be another host's."""

    def look(self, now_s: float) -> Outlook:
        here, before = self.subject.look(now_s), self.history.count
        for step in self.subject.new():
            self.history.add(step)
        if here.state == "running" and not self.history.steps:
            here = replace(here, state="starting")
        if self.progress_s is None:
            self.progress_s = min(now_s, self.subject.written_s() or now_s)
        elif self.history.count != before:
            self.progress_s = now_s
        return outlook(now_s, here, self.history, now_s - self.progress_s, self.expected)


def watch(
    watcher: Watcher, show: Callable[[Outlook], None], interval_s: float, pause: Callable[[float], None] = time.sleep
) -> Outlook:
    """Looks every ``interval_s`` seconds until the run has ended; its end."""
    while True:
        seen = watcher.look(time.time())
        show(seen)
        if seen.circumstances.state == "ended":
            return seen
        pause(interval_s)


def expectation_of_file(path: Path, configuration: Mapping[str, Value]) -> Expected:
    """The entry of the user's file that fits a run. Raises UsageError if there is none."""
    expectations = read_expectations(path)
    entry = expectations.entry_for(condition_values(configuration, unset="none"))
    if isinstance(entry, str):
        raise UsageError(entry, do="add an entry, or give the seconds with --expect-s")
    reference = entry.reference
    return Expected(
        step_time_s=reference.step_time_s,
        source=reference.source,
        tolerance_pct=expectations.tolerance_of(entry).pct,
    )


def expectation(plan: Plan | None, given_s: float | None) -> Expected | None:
    """What is given, else the published step time of the plan's recipe; each with the tolerance of a verdict."""
    if given_s is not None:
        return Expected(step_time_s=given_s, source="as given", tolerance_pct=default_tolerance("expectation").pct)
    figure = figure_of(plan.recipe) if plan else None
    if figure is None or figure.step_time_s is None:
        return None
    source, tolerance = f"published, {figure.source} line {figure.line}", default_tolerance("published")
    return Expected(step_time_s=figure.step_time_s, source=source, tolerance_pct=tolerance.pct)
