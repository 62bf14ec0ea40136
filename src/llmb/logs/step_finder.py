# SPDX-License-Identifier: Apache-2.0
"""Finds the steps of a log, in the format of its first step line."""

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from llmb.logs.formats.format import Format, Reader, has
from llmb.logs.formats.known import FORMATS
from llmb.logs.step_line import StepLine

_MOST_KEPT = 10_000


class _Candidate:
    """A format that a log may have, until its first step line."""

    def __init__(self, of: Format) -> None:
        self.format = of
        self.reader: Reader = of.reader()
        self.resumed = False
        self.excluded = False
        self.kept: deque[StepLine] = deque(maxlen=_MOST_KEPT)
        """Steps that count only if the log has this format."""

    def look(self, text: bytes, start: int, end: int) -> int | None:
        """Where the first step line begins, in ``text[start:end]``."""
        if not any(has(text, mark, start, end) for mark in self.format.marks):
            return None
        if self.excluded or self._is_excluded(text, start, end):
            return None
        mark = self.format.find_step_mark(text, start, end)
        first = self.format.step.search(text, _line_start(text, mark, start), end) if mark >= 0 else None
        if not first:
            self.kept.extend(self.reader.find(text, start, end))
        if self.format.resumed and not self.resumed:
            until = first.start() if first else end
            self.resumed = self.format.resumed.search(text, start, until) is not None
        return first.start() if first else None

    def _is_excluded(self, text: bytes, start: int, end: int) -> bool:
        unless = self.format.unless
        found = unless.search(text, start, end) if unless else None
        first = self.format.step.search(text, start, end) if found else None
        self.excluded = found is not None and (first is None or found.start() < first.start())
        return self.excluded


class StepFinder:
    """Reads consecutive parts of a log."""

    def __init__(self) -> None:
        self.format: Format | None = None
        """None before the first step line."""
        self.reader: Reader | None = None
        self.resumed = False
        """A checkpoint was loaded before the first step line."""
        self._candidates = [_Candidate(known) for known in FORMATS]

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        """The steps in ``text[start:end]``, which consists of complete lines."""
        end = min(end, len(text))
        if self.reader:
            return self.reader.find(text, start, end)
        chosen: _Candidate | None = None
        until = end
        for candidate in self._candidates:
            if (place := candidate.look(text, start, until)) is not None:
                chosen, until = candidate, _line_start(text, place, start)  # Another one has to come before.
        if not chosen:
            return ()
        kept, steps = self._choose(chosen), chosen.reader.find(text, start, end)
        return chain(kept, steps) if kept else steps

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        """The steps in a file's last line, which has no line end, and whether a step line was truncated there."""
        if self.reader:
            return self.reader.find_unended(text)
        for candidate in self._candidates:
            steps, is_cut = candidate.reader.find_unended(text)
            if not candidate.excluded and (is_cut or candidate.format.step.search(text)):
                return [*self._choose(candidate), *steps], is_cut
        return [], False

    def _choose(self, candidate: _Candidate) -> Sequence[StepLine]:
        self.format, self.reader, self.resumed = candidate.format, candidate.reader, candidate.resumed
        self._candidates = []
        return candidate.kept


def _line_start(text: bytes, at: int, start: int) -> int:
    """Where the line at ``at`` begins, in text from ``start`` on."""
    newline = text.rfind(b"\n", start, at)
    return max(newline, text.rfind(b"\r", max(newline, start), at), start - 1) + 1
