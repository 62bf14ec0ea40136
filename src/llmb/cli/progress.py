# SPDX-License-Identifier: Apache-2.0
"""Progress of a run on stderr: a bar in a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from llmb.runs.steps import Step

LINE_EVERY_S = 5.0


class RunProgress:
    """Shows steps as they are done, with step time, loss and the time that is left."""

    def __init__(self, total: int, first_step: int = 0) -> None:
        self.total = total
        self.first_step = first_step
        self.spoke_at = time.monotonic()
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.bar.add_task("starting workers", total=total)

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, step: Step) -> None:
        done = step.step + 1 - self.first_step
        text = f"step {done}/{self.total}  {step.step_time_s:.4g} s  loss {step.loss:.4g}"
        if self.bar:
            self.bar.update(self.task, completed=done, description=text)
        elif time.monotonic() - self.spoke_at > LINE_EVERY_S or done == self.total:
            self.spoke_at = time.monotonic()
            sys.stderr.write(f"{text}  {step.step_time_s * (self.total - done):.0f} s left\n")
