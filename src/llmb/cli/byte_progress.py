# SPDX-License-Identifier: Apache-2.0
"""Progress of a conversion on stderr: a bar in a terminal, a line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from llmb.cli.progress import LINE_EVERY_S

GB = 10**9


class ByteProgress:
    """Shows how many bytes are done."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.spoke_at = time.monotonic()
        self.bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self.bar = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True))
            self.task = self.bar.add_task(what, total=None)

    def __enter__(self) -> Self:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar:
            self.bar.stop()

    def bytes(self, done: int, total: int) -> None:
        if self.bar:
            self.bar.update(self.task, completed=done, total=total)
        elif time.monotonic() - self.spoke_at > LINE_EVERY_S or done == total:
            self.spoke_at = time.monotonic()
            sys.stderr.write(f"{self.what}: {done / GB:.3g} of {total / GB:.3g} GB\n")
