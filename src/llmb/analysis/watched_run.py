# SPDX-License-Identifier: Apache-2.0
"""What is watched: a run with a record, wherever it runs, or a log that a program writes."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from llmb.analysis.explain_run import node_of_ranks, work_of
from llmb.analysis.watched import Circumstances, Expected, Outlook, State, StepHistory, outlook
from llmb.errors import EnvironmentProblem, InfrastructureError, UsageError
from llmb.jobs.job import Job
from llmb.jobspec.spec import read_spec
from llmb.logs.formats.format import MAX_LINE_BYTES
from llmb.logs.reader import CHUNK_BYTES, StepFinder
from llmb.logs.step_line import StepLine
from llmb.missing import Missing
from llmb.programs.lookup import find_program
from llmb.runs.environment import Environment, read_environment
from llmb.runs.folder import RunFolder
from llmb.runs.identity import Value
from llmb.runs.plan import Plan
from llmb.runs.published_verdict import figure_of
from llmb.runs.record import read_record, seconds_of
from llmb.runs.steps import StepNews
from llmb.verdict.conditions import condition_values
from llmb.verdict.expectations_file import read_expectations
from llmb.verdict.judgement import default_tolerance

SILENT_S = 600.0
SILENT_STEPS = 20.0
"""A log that has not grown for so long, and for so many steps, is of a run that has ended."""


class WatchedLog:
    """Only the log tells whether its run lasts: by its last step, or by growing no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: list[StepNews] = []
        """Steps that were not taken yet."""
        self._begin()

    def _begin(self) -> None:
        self.inode = self.path.stat().st_ino
        self.offset = 0
        self.rest = b""
        """The line that has no end yet."""
        self.finder = StepFinder()
        self.last: StepLine | None = None
        self.declared_last: int | None = None
        """Number of the run's last step; None if the log does not tell before it comes."""

    def look(self, now_s: float) -> Circumstances:
        """Raises OSError if the log cannot be read."""
        status = self.path.stat()
        if status.st_ino != self.inode or status.st_size < self.offset:
            self._begin()
        self.found += self._new_steps()
        last, silent_s = self.last, now_s - status.st_mtime
        ended, why = last is not None and last.step == self.declared_last, None
        if not ended and silent_s > max(SILENT_S, SILENT_STEPS * (last.step_time_s if last else 0)):
            ended, why = True, f"its log has not grown for {silent_s / 60:.0f} min" if last else "its log has no step"
        first_number = self.finder.format.first_number if self.finder.format else 0
        return Circumstances(
            state="ended" if ended else "running" if last else "starting",
            why=why,
            first_step=first_number,
            attempt_first_step=first_number,
            last_step=self.declared_last,
        )

    def new(self) -> Iterator[StepNews]:
        found, self.found = self.found, []
        return iter(found)

    def written_s(self) -> float:
        """When it last grew, in seconds since 1970."""
        return self.path.stat().st_mtime

    def _new_steps(self) -> Iterator[StepNews]:
        """Steps whose lines were completed since the last call."""
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            while part := stream.read(CHUNK_BYTES):
                self.offset += len(part)
                text = self.rest + part
                end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1
                yield from self._news(self.finder.find(text, 0, end))
                self.rest = text[end:][-MAX_LINE_BYTES:]

    def _news(self, lines: Iterable[StepLine]) -> Iterator[StepNews]:
        for line in lines:
            if line.last > line.step:
                self.declared_last = line.last
            if self.last is None or line.step != self.last.step:  # several ranks may log it
                yield StepNews(
                    line.step, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu, line.profiled
                )
            self.last = line


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
    if isinstance(entry, Missing):
        raise UsageError(entry.reason, do="add an entry, or give the seconds with --expect-s")
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
    if not figure or figure.step_time_s is None:
        return None
    source, tolerance = f"published, {figure.source} line {figure.line}", default_tolerance("published")
    return Expected(step_time_s=figure.step_time_s, source=source, tolerance_pct=tolerance.pct)


ASK_EVERY_S, ASK_AT_END_EVERY_S = 10.0, 1.0
"""Between two queries of a scheduler: while the run lasts, and once its record has ended."""
LIVE = ("queued", "running")


class WatchedRun:
    """``ask`` brings a job up to date. Without a job, or an answer, the record tells whether the run lasts.

    Raises OSError or BrokenRecord if the record cannot be read.
    """

    def __init__(self, folder: RunFolder, job: Job | None, ask: Callable[[Job], Job]) -> None:
        self.folder = folder
        self.job = job
        self.ask = ask
        self.asked_s = -math.inf
        self.unanswered: str | None = None
        self.record = read_record(folder)
        self.steps = find_program(self.record.program).new_steps(folder)
        self.limit_s = _time_limit_s(folder)

    @property
    def plan(self) -> Plan:
        return self.record.plan

    def new(self) -> Iterator[StepNews]:
        """The steps that were done since the last call."""
        return self.steps.new()

    def written_s(self) -> float | None:
        """When its last step was written, else its record, in seconds since 1970; None if the folder is gone."""
        for path in (self.folder.steps, self.folder.log, self.folder.record):
            try:
                return path.stat().st_mtime
            except OSError:
                continue
        return None

    def look(self, now_s: float) -> Circumstances:
        with suppress(OSError, ValueError):  # what cannot be read for now, as on a shared file system, stays as it was
            self.record = read_record(self.folder)
        self._ask_again(now_s)
        record, attempts = self.record, self.record.attempts
        begun = attempts[-1] if attempts else None
        environment = record.environment or self._environment()
        started_s = seconds_of(begun.started_at if begun else record.started_at)
        return Circumstances(
            state=self._state(),
            why=self._why(),
            nodes=(self.job and self.job.nodes) or (record.job and record.job.nodes) or None,
            since_start_s=now_s - started_s if started_s else None,
            attempt=max(len(attempts), 1),
            attempt_first_step=begun.first_step if begun else record.plan.first_step,
            first_step=record.plan.first_step,
            last_step=record.plan.last_step,
            limit_left_s=started_s + self.limit_s - now_s if self.limit_s and started_s else None,
            stall=self._stall(),
            work=work_of(record.plan),
            node_of=node_of_ranks(environment) if environment else {},
        )

    def _ask_again(self, now_s: float) -> None:
        every_s = ASK_EVERY_S if self.record.status in LIVE else ASK_AT_END_EVERY_S
        if self.job is None or not self.job.live or 0 <= now_s - self.asked_s < every_s:
            return
        self.asked_s = now_s
        try:
            self.job, self.unanswered = self.ask(self.job), None
        except (InfrastructureError, EnvironmentProblem) as error:
            self.unanswered = error.what

    def _state(self) -> State:
        status = self.record.status if self.job is None or self.unanswered else self.job.status
        if status not in LIVE:
            return "ended"
        if status == "queued":
            return "queued"
        return "running" if self.record.status != "queued" else "starting"

    def _why(self) -> str | None:
        own = self.job.reason if self.job else None
        return self.unanswered or own or self.record.reason

    def _environment(self) -> Environment | None:
        """What the workers have written so far."""
        try:
            return read_environment(self.folder.environment)
        except (OSError, ValueError):
            return None

    def _stall(self) -> str | None:
        try:
            return self.folder.stall.read_text().strip() or None
        except OSError:
            return None


def _time_limit_s(folder: RunFolder) -> float | None:
    try:
        spec = read_spec(folder)
    except (OSError, ValueError):
        return None
    return 60 * spec.time_limit_min if spec.time_limit_min else None
