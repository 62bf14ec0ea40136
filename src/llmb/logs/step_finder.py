# SPDX-License-Identifier: Apache-2.0
"""Finds the step lines of a log, in the format of the first one."""

import sys
from collections.abc import Iterable
from typing import Literal

from llmb.logs.checkpoint_line import LOAD_HEAD
from llmb.logs.megatron_line import LOADED, MegatronLines, first_step
from llmb.logs.step_line import STEP_LINE_HEAD, StepLine, find_steps, find_unended_steps


class StepFinder:
    """Reads a log chunk by chunk; the first step line decides which format is read."""

    def __init__(self) -> None:
        self.format: Literal["nemo", "megatron"] | None = None
        self.megatron = MegatronLines()
        self.loaded = False
        """A checkpoint was loaded before the first step line."""
        self._began = False

    def look_for_load(self, text: bytes) -> None:
        """Searches the next chunk, together with as much text before it as may hold the beginning of a line."""
        if self._began:
            return
        before, head, _ = text.partition(STEP_LINE_HEAD)
        megatron = first_step(before)
        self._began = bool(head) or megatron is not None
        self.loaded |= LOAD_HEAD in before[:megatron] or LOADED in before[:megatron]

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        """The steps in ``text[start:end]``, which consists of complete lines."""
        if self.format is None:
            self._decide(text, start, end)
        if self.format == "nemo":
            return find_steps(text, start, end)
        # Before the first step, throughput that was logged is kept for it.
        return list(self.megatron.find(text, start, end))

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        """The steps in a file's last line, which has no line end, and whether a step line was truncated there."""
        if self.format == "megatron":
            return self.megatron.find_unended(text)
        steps, cut = find_unended_steps(text)
        if self.format == "nemo" or steps or cut:
            return steps, cut
        return self.megatron.find_unended(text)

    def _decide(self, text: bytes, start: int, end: int) -> None:
        megatron = first_step(text, start, end)
        before = end if megatron is None else megatron
        if next(iter(find_steps(text, start, before)), None) is not None:
            self.format = "nemo"
        elif megatron is not None:
            self.format = "megatron"
