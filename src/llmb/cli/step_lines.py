# SPDX-License-Identifier: Apache-2.0
"""Lines on stderr of a run whose log is followed."""

import time
from pathlib import Path
from typing import Annotated

import typer

from llmb.analysis.watched import Standing, WatchedRun
from llmb.cli.root import say
from llmb.jobs.job import Job
from llmb.report.watch_report import pace_warning, watch_line
from llmb.runs.folder import RunFolder
from llmb.runs.record import unreadable_record

LINE_EVERY_S = 10.0
ExpectS = Annotated[
    float | None,
    typer.Option(
        "--expect", metavar="SECONDS", min=1e-9, help="Expected seconds of a step. Default: the published figure."
    ),
]


class StepLines:
    """A line of a run's steps at intervals and as its state changes, and one when its pace leaves what was expected."""

    def __init__(self, run: WatchedRun) -> None:
        self.run = run
        self.news: tuple[object, ...] = ()
        self.wrote_s = 0.0
        self.standing: Standing = "too early"

    def look(self, job: Job) -> None:
        seen = self.run.look(job, time.time())
        news = (seen.state, seen.reason, seen.attempt, seen.done)
        if news[:3] != self.news[:3] or (news != self.news and seen.at_s - self.wrote_s >= LINE_EVERY_S):
            self.news, self.wrote_s = news, seen.at_s
            say(watch_line(seen))
        if seen.comparison and seen.comparison.standing != self.standing:
            self.standing = seen.comparison.standing
            if self.standing in ("slower", "faster"):
                say(pace_warning(seen.comparison))


def lines_of(job: Job, expected_s: float | None) -> StepLines:
    """Raises UsageError if the run's record cannot be read."""
    folder = RunFolder(Path(job.run_dir))
    try:
        return StepLines(WatchedRun(folder, expected_s))
    except (OSError, ValueError) as error:
        raise unreadable_record(folder, error) from error
