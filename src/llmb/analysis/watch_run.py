# SPDX-License-Identifier: Apache-2.0
"""Looks at a run that lasts until it ends."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from llmb.analysis.forecast import Expected
from llmb.analysis.watched import Circumstances, Outlook, StepHistory, outlook
from llmb.runs.plan import Plan
from llmb.runs.step_follower import StepNews


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


def expectation(plan: Plan | None, given_s: float | None) -> Expected | None:
    """What is given, else the published step time of the plan's recipe."""
    if given_s is not None:
        return Expected(step_time_s=given_s, source="as given")
    published = plan.recipe.expectations if plan else ()
    figures = ((item.step_time_s, item) for item in published)
    return next(
        (
            Expected(step_time_s=time_s, source=f"published, {item.source} line {item.line}")
            for time_s, item in figures
            if time_s
        ),
        None,
    )
