# SPDX-License-Identifier: Apache-2.0
"""Shows the progress of long work on stderr: as a bar on a terminal, otherwise as a line every few seconds."""

import sys
import time
from collections.abc import Callable
from threading import Timer
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from llmb.base.shown_text import printable, printable_lines
from llmb.jobs.job import Job
from llmb.nodes.bench.protocol import BenchProgress
from llmb.runs.steps import StepNews

LINE_EVERY_S = 5.0
GB = 10**9


def clock(seconds: float) -> str:
    """Format a number of seconds as a duration, such as 0:46 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _Clock(ProgressColumn):
    def render(self, task: Task) -> Text:
        left = "" if task.time_remaining is None else f"  left {clock(task.time_remaining)}"
        return Text(f"elapsed {clock(task.elapsed or 0)}{left}")


class _LongWork:
    """Shows text, ``columns``, elapsed and remaining time, and a bar, on a terminal; otherwise, prints lines."""

    def __init__(self, text: str, total: int | None, *columns: ProgressColumn) -> None:
        self.began_at = self.spoke_at = time.monotonic()
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            parts = (TextColumn("{task.description}"), *columns, _Clock(), BarColumn(bar_width=None))
            self.bar = Progress(*parts, console=Console(stderr=True), expand=True)
            self.task = self.bar.add_task(text, total=total)

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def _show(self, done: int, total: int | None, text: str, line: str) -> None:
        """Show ``text`` next to the bar or, if there is no bar, print ``line`` every few seconds and at the end."""
        if self.bar:
            self.bar.update(self.task, completed=done, total=total, description=text)
        elif time.monotonic() - self.spoke_at > LINE_EVERY_S or done == total:
            self.spoke_at = time.monotonic()
            sys.stderr.write(printable_lines(f"{line}\n"))


class RunProgress(_LongWork):
    """Shows the last step of a run, with step time, loss, elapsed and remaining time."""

    def __init__(self, total: int, first_step: int = 0) -> None:
        super().__init__("starting: processes, model, data, first step", total)
        self.total = total
        self.first_step = first_step

    def step(self, step: StepNews) -> None:
        done = step.step + 1 - self.first_step
        loss = "" if step.loss is None else f"  loss {step.loss:.4g}"
        text = f"{done}/{self.total}  {step.step_time_s:.3g} s/step{loss}"
        elapsed, left = time.monotonic() - self.began_at, step.step_time_s * (self.total - done)
        self._show(done, self.total, text, f"{text}  elapsed {clock(elapsed)}  left {clock(left)}")


class JobStates:
    """Reports the state of a job whenever it changes."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self.tell = tell
        self.last = ""

    def __call__(self, job: Job) -> None:
        waits = f" ({job.reason})" if job.reason and job.status == "queued" else ""
        nodes = f" on {job.nodes}" if job.nodes else ""
        text = f"job {job.job_id} {job.state}{waits}{nodes}"
        if text != self.last:
            self.last = text
            self.tell(text)


class JobProgress(RunProgress):
    """Shows the states of a queued job until it runs, and then its steps."""

    def __init__(self, total: int, first_step: int = 0) -> None:
        super().__init__(total, first_step)
        self.job = JobStates(self._tell)

    def _tell(self, text: str) -> None:
        if self.bar:
            self.bar.update(self.task, description=text)
        else:
            sys.stderr.write(printable_lines(f"{text}\n"))


class ByteProgress(_LongWork):
    """Shows the number of bytes that are done, the rate and the remaining time. A new total resets the bar."""

    def __init__(self, what: str) -> None:
        super().__init__(what, None, DownloadColumn(), TransferSpeedColumn())
        self.what = what
        self.total = 0
        self.done_before = 0
        """Number of bytes that were done at the start, above 0 if the work is resumed."""

    def bytes(self, done: int, total: int) -> None:
        if total != self.total:
            self.total, self.began_at, self.done_before = total, time.monotonic(), done
            if self.bar:
                self.bar.reset(self.task)
        text = f"{self.what}: {done / GB:.3g} of {total / GB:.3g} GB"
        self._show(done, total, self.what, f"{text}{self._speed(done)}")

    def _speed(self, done: int) -> str:
        seconds, here = time.monotonic() - self.began_at, done - self.done_before
        if here <= 0 or seconds <= 0 or done == self.total:
            return ""
        left = (self.total - done) * seconds / here
        return f", {here / GB / seconds:.3g} GB/s, {left:.0f} s left"


class CountProgress(_LongWork):
    """Shows the number of items that are done, and the total if it is known."""

    def __init__(self) -> None:
        super().__init__("", None, MofNCompleteColumn())
        self.what = ""

    def __enter__(self) -> Self:
        return self  # the bar starts with the first item, because there may be none

    def count(self, what: str, done: int, total: int | None) -> None:
        if what != self.what:
            self.what = what
            if self.bar:
                self.bar.start()
                self.bar.reset(self.task, total=total)
        of = "" if total is None else f" of {total:,}"
        self._show(done, total, what, f"{what}: {done:,}{of}")


class CaseProgress(_LongWork):
    """Shows which of several measurements is running."""

    def __init__(self) -> None:
        super().__init__("starting", None, MofNCompleteColumn())

    def case(self, case: BenchProgress) -> None:
        """Show the case; without a bar, print its line immediately if it takes long."""
        if case.seconds and case.seconds > LINE_EVERY_S:
            self.spoke_at = -LINE_EVERY_S
        text = f"measuring {case.number + 1} of {case.total}: {case.name}"
        self._show(case.number, case.total, case.name, text)


class PhaseProgress:
    """Shows the current phase: next to a spinner on a terminal, otherwise as a line if it takes long."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        self.timer: Timer | None = None
        self.spinner = Console(stderr=True).status(verb) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self.spinner:
            self.spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.spinner:
            self.spinner.stop()
        if self.timer:
            self.timer.cancel()

    def phase(self, what: str) -> None:
        if self.spinner:
            self.spinner.update(f"{self.verb} {escape(printable(what))}")
            return
        if self.timer:
            self.timer.cancel()
        self.timer = Timer(LINE_EVERY_S, sys.stderr.write, (f"llmb: {self.verb} {printable(what)}\n",))
        self.timer.daemon = True
        self.timer.start()
