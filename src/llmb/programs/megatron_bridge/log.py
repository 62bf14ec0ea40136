# SPDX-License-Identifier: Apache-2.0
"""The steps of a run of Megatron-Bridge, which are in its log alone."""

import mmap
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from llmb.catalogue.records import Window
from llmb.logs.formats.megatron import FORMAT, MegatronReader
from llmb.logs.outcome import LogOutcome, judge_log
from llmb.logs.reader import read_log
from llmb.runs.failure import ATTEMPT
from llmb.runs.folder import RunFolder
from llmb.runs.step_follower import StepNews

LOG_RULES = ("auto", "last", "all")
"""Window rules that are resolved by what the log says of itself."""


def judge_latest_attempt(folder: RunFolder, window: Window) -> LogOutcome:
    """What the log shows of the latest start: steps of earlier ones do not count.

    The plan's window is in the numbers that the log prints, from 1: iterations 35-44, which NVIDIA's own parsers take.
    """
    first = FORMAT.first_number
    rule = window.rule if window.rule in LOG_RULES else f"{max(window.first, first)}-{max(window.last, first)}"
    try:
        with folder.log.open("rb") as stream:
            begin = _latest_attempt(stream.fileno())
            if not begin:
                return judge_log(read_log(stream, rule))
            stream.seek(begin)
            return judge_log(read_log(BytesIO(stream.read()), rule))
    except OSError as error:
        return LogOutcome("unreadable", f"the log cannot be read: {error.strerror}")


def _latest_attempt(handle: int) -> int:
    """Where in a log the latest attempt begins; 0 for the only one, and for an empty log."""
    try:
        with mmap.mmap(handle, 0, access=mmap.ACCESS_READ) as log:
            return log.rfind(f"\n{ATTEMPT}".encode()) + 1
    except ValueError:
        return 0


class NewLogSteps:
    """Reads the complete lines that were added to a log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.last = -1
        self.lines = MegatronReader()

    def new(self) -> Iterator[StepNews]:
        if not self.path.exists():
            return
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            text = stream.read()
        whole = text[: text.rfind(b"\n") + 1]
        self.offset += len(whole)
        for line in self.lines.find(whole):
            if line.step != self.last:  # several ranks may log it
                self.last = line.step
                number = line.step - FORMAT.first_number
                yield StepNews(number, line.step_time_s, line.loss, line.grad_norm, line.tflops_per_gpu)
