# SPDX-License-Identifier: Apache-2.0
"""A log that grows, of any program whose steps the readers know."""

import os
from collections.abc import Iterator
from pathlib import Path

from llmb.analysis.watched import Circumstances
from llmb.logs.formats.format import MAX_LINE_BYTES
from llmb.logs.reader import CHUNK_BYTES
from llmb.logs.step_finder import StepFinder
from llmb.logs.step_line import StepLine
from llmb.runs.step_follower import StepNews

SILENT_S = 600.0
SILENT_STEPS = 20.0
"""A log that has not grown for so long, and for so many steps, is of a run that has ended."""


class WatchedLog:
    """Only the log tells whether its run lasts: by its last step, or by growing no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.inode: int | None = None
        self.rest = b""
        self.finder = StepFinder()
        self.found: list[StepNews] = []
        """Steps that were not taken yet."""
        self.last: StepLine | None = None

    def look(self, now_s: float) -> Circumstances:
        """Raises OSError if the log cannot be read."""
        self._read()
        last, silent_s = self.last, now_s - self.written_s()
        if last is None:
            ended = silent_s > SILENT_S
            return Circumstances(state="ended" if ended else "starting", why="its log has no step" if ended else None)
        if last.step >= last.last:
            return Circumstances(state="ended", last_step=last.last)
        if silent_s > max(SILENT_S, SILENT_STEPS * last.step_time_s):
            why = f"its log has not grown for {silent_s / 60:.0f} min"
            return Circumstances(state="ended", why=why, last_step=last.last)
        return Circumstances(state="running", last_step=last.last)

    def new(self) -> Iterator[StepNews]:
        found, self.found = self.found, []
        return iter(found)

    def written_s(self) -> float:
        """When it last grew, in seconds since 1970."""
        return self.path.stat().st_mtime

    def _read(self) -> None:
        """The lines that were completed since the last call; of a file that was replaced, all."""
        with self.path.open("rb") as stream:
            now = os.fstat(stream.fileno())
            if now.st_ino != self.inode or now.st_size < self.offset:
                self.inode, self.offset, self.rest, self.finder = now.st_ino, 0, b"", StepFinder()
            stream.seek(self.offset)
            while chunk := stream.read(CHUNK_BYTES):
                self.offset += len(chunk)
                self._add(self.rest + chunk)

    def _add(self, text: bytes) -> None:
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1)) + 1
        self.rest = text[end:][-MAX_LINE_BYTES:]
        for line in self.finder.find(text, 0, end):
            if self.last is None or line.step != self.last.step:  # several ranks may log it
                self.last = line
                self.found.append(StepNews(line.step, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu))
