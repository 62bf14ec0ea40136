# SPDX-License-Identifier: Apache-2.0
"""A log that grows, of any program whose steps the readers know."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from llmb.analysis.watched import Circumstances
from llmb.logs.formats.format import MAX_LINE_BYTES
from llmb.logs.plain_text import PlainText
from llmb.logs.reader import CHUNK_BYTES
from llmb.logs.step_finder import StepFinder
from llmb.logs.step_line import StepLine
from llmb.runs.step_follower import StepNews

SILENT_S = 600.0
SILENT_STEPS = 20.0
"""A log that has not grown for so long, and for so many steps, is of a run that has ended."""


class _Growing:
    """Reads what was added to a file; it is open only meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        with path.open("rb") as stream:
            self.inode = os.fstat(stream.fileno()).st_ino

    @property
    def was_replaced(self) -> bool:
        found = self.path.stat()
        return found.st_ino != self.inode or found.st_size < self.offset

    def read(self, size: int, /) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            data = stream.read(size)
        self.offset += len(data)
        return data

    def seek(self, offset: int, /) -> object:
        self.offset = offset
        return offset


class _LogText:
    """The steps of a file from its beginning."""

    def __init__(self, path: Path) -> None:
        self.file = _Growing(path)
        self.text = PlainText(self.file)
        self.finder = StepFinder()
        self.rest = b""
        self.last: StepLine | None = None
        self.declared_last: int | None = None
        """Number of the run's last step; None if the log does not tell before it comes."""
        self.closed = False
        """Its last line, which has no end, was read."""

    def new(self) -> Iterator[StepNews]:
        """Steps whose lines were completed since the last call."""
        while part := self.text.read(CHUNK_BYTES):
            text = self.rest + part
            end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1
            yield from self._news(self.finder.find(text, 0, end))
            self.rest = text[end:][-MAX_LINE_BYTES:]

    def close(self) -> Iterator[StepNews]:
        """Steps that were kept back in case that more follows."""
        self.closed = True
        steps, _ = self.finder.find_unended(self.rest)
        yield from self._news(steps)

    @property
    def first_number(self) -> int:
        return self.finder.format.first_number if self.finder.format else 0

    def _news(self, lines: Iterable[StepLine]) -> Iterator[StepNews]:
        for line in lines:
            if line.last > line.step:
                self.declared_last = line.last
            if self.last is None or line.step != self.last.step:  # several ranks may log it
                yield StepNews(line.step, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu)
            self.last = line


class WatchedLog:
    """Only the log tells whether its run lasts: by its last step, or by growing no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log: _LogText | None = None
        self.found: list[StepNews] = []
        """Steps that were not taken yet."""

    def look(self, now_s: float) -> Circumstances:
        """Raises OSError if the log cannot be read."""
        log = self.log
        if log is None or log.file.was_replaced or (log.closed and self.path.stat().st_size > log.file.offset):
            log = self.log = _LogText(self.path)
        self.found += log.new()
        silent_s = now_s - self.written_s()
        ended = log.last is not None and log.last.step == log.declared_last
        if not ended and silent_s > max(SILENT_S, SILENT_STEPS * (log.last.step_time_s if log.last else 0)):
            self.found += () if log.closed else log.close()
            why = f"its log has not grown for {silent_s / 60:.0f} min" if log.last else "its log has no step"
            done = log.last is not None and log.last.step == log.declared_last
            return self._circumstances(log, ended=True, why=None if done else why)
        return self._circumstances(log, ended=ended)

    def new(self) -> Iterator[StepNews]:
        found, self.found = self.found, []
        return iter(found)

    def written_s(self) -> float:
        """When it last grew, in seconds since 1970."""
        return self.path.stat().st_mtime

    def _circumstances(self, log: _LogText, *, ended: bool, why: str | None = None) -> Circumstances:
        return Circumstances(
            state="ended" if ended else "running" if log.last else "starting",
            why=why,
            first_step=log.first_number,
            attempt_first_step=log.first_number,
            last_step=log.declared_last,
        )
