# SPDX-License-Identifier: Apache-2.0
"""Reads a run's log as a stream of plain text, in the format of its first step line."""

import codecs
import gzip
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, Protocol

from llmb.readers.logs.configuration import configuration_of, sizes_in
from llmb.readers.logs.formats import FORMATS
from llmb.readers.logs.formats.format import MAX_LINE_BYTES, Format, Reader, Value, has_any
from llmb.readers.logs.logged_attempt import LoggedAttempt
from llmb.readers.logs.step_line import StepLine

_MOST_LINES = 10_000
GZIP = b"\x1f\x8b"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ESCAPE = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]")
"""Escape sequences for colors and cursor movements."""
_BEGUN_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?\Z")
_LONGEST_ESCAPE = 40
CHUNK_BYTES = 1 << 19
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


class _Candidate:
    """A possible format of a log, until its first step line."""

    def __init__(self, of: Format) -> None:
        self.format = of
        self.reader: Reader = of.reader()
        self.resumed = False
        self.excluded = False
        self.lines: deque[StepLine] = deque(maxlen=_MOST_LINES)
        """Steps that only count if the log has this format."""

    def look(self, text: bytes, start: int, end: int) -> int | None:
        """Return the position of the first step line in ``text[start:end]``, or None if it has none."""
        if self.excluded or self._is_excluded(text, start, end):
            return None
        mark = self.format.find_step_mark(text, start, end)
        first = self.format.step.search(text, _line_start(text, mark, start), end) if mark >= 0 else None
        if not first:
            self.lines.extend(self.reader.find(text, start, end))
        if self.format.resumed and not self.resumed:
            until = first.start() if first else end
            signs = self.format.marks[self.format.step_marks :]
            self.resumed = has_any(text, signs, start, until) and bool(self.format.resumed.search(text, start, until))
        return first.start() if first else None

    def _is_excluded(self, text: bytes, start: int, end: int) -> bool:
        unless = self.format.unless
        hit = unless.search(text, start, end) if unless else None
        first = self.format.step.search(text, start, end) if hit else None
        self.excluded = hit is not None and (first is None or hit.start() < first.start())
        return self.excluded


class StepFinder:
    """Finds the steps in consecutive parts of a log, in the format of the first step line."""

    def __init__(self) -> None:
        self.format: Format | None = None
        """None before the first step line."""
        self.reader: Reader | None = None
        self.resumed = False
        """True if a checkpoint was loaded before the first step line."""
        self._candidates: dict[str, _Candidate] = {}
        """The candidates by name, among the formats whose marks occur."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        """Return the steps in ``text[start:end]``, which consists of complete lines."""
        end = min(end, len(text))
        if self.reader:
            return self.reader.find(text, start, end)
        chosen: _Candidate | None = None
        until = end
        for log_format in FORMATS:
            if not has_any(text, log_format.marks, start, until):
                continue
            candidate = self._candidate(log_format)
            if (place := candidate.look(text, start, until)) is not None:
                chosen, until = candidate, _line_start(text, place, start)  # Another format's must come earlier.
        if not chosen:
            return ()
        lines, steps = self._choose(chosen), chosen.reader.find(text, start, end)
        return chain(lines, steps) if lines else steps

    def find_unended(self, text: bytes) -> tuple[list[StepLine], bool]:
        """Return the steps in the last line, which has no line end, and whether a step line was truncated there."""
        if self.reader:
            return self.reader.find_unended(text)
        for candidate in map(self._candidate, FORMATS):
            steps, is_split = candidate.reader.find_unended(text)
            if not candidate.excluded and (is_split or candidate.format.step.search(text)):
                return [*self._choose(candidate), *steps], is_split
        return [], False

    def _candidate(self, log_format: Format) -> _Candidate:
        if log_format.name not in self._candidates:
            self._candidates[log_format.name] = _Candidate(log_format)
        return self._candidates[log_format.name]

    def _choose(self, candidate: _Candidate) -> Sequence[StepLine]:
        self.format, self.reader, self.resumed = candidate.format, candidate.reader, candidate.resumed
        self._candidates = {}
        return candidate.lines


def _line_start(text: bytes, at: int, start: int) -> int:
    newline = text.rfind(b"\n", start, at)
    return max(newline, text.rfind(b"\r", max(newline, start), at), start - 1) + 1


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, /) -> object: ...


class PlainText:
    """A log's text: decompressed, UTF-16 as UTF-8, without escape sequences.

    A compressed ``stream`` must be seekable.
    """

    def __init__(self, stream: _Stream) -> None:
        self.size = 0
        """Bytes read so far, decompressed."""
        self.damaged = False
        """True if the compressed file is truncated or corrupt: the text ends where decompression fails."""
        self._read_some: Callable[[int], bytes] = stream.read
        self._begin = self._first_bytes()
        if self._begin == GZIP:
            stream.seek(0)
            self._read_some = gzip.GzipFile(fileobj=stream).read1  # returns all data before the damage
            self._begin = self._first_bytes()
        if self.damaged and not self._begin:  # it only looks compressed
            self.damaged, self._read_some = False, stream.read
            stream.seek(0)
            self._begin = self._first_bytes()
        is_utf16 = self._begin in _UTF_16
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace") if is_utf16 else None
        self._rest = b""
        """The incomplete beginning of an escape sequence."""

    def read(self, size: int) -> bytes:
        """Return about the next ``size`` bytes of text; empty only at the end."""
        while data := self._read_source(size):
            if text := self._without_escapes(self._decoded(data)):
                return text
        text, self._rest = self._rest + self._decoded(b"", final=True), b""
        return text

    def _first_bytes(self) -> bytes:
        begin = b""
        while len(begin) < len(GZIP) and (more := self._read_raw(len(GZIP) - len(begin))):
            begin += more
        return begin

    def _read_source(self, size: int) -> bytes:
        begin, self._begin = self._begin, b""
        data = begin + self._read_raw(max(1, size - len(begin)))
        self.size += len(data)
        return data

    def _read_raw(self, size: int) -> bytes:
        if self.damaged:
            return b""
        try:
            return self._read_some(size)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.damaged = True
            return b""

    def _decoded(self, data: bytes, *, final: bool = False) -> bytes:
        return self._decoder.decode(data, final).encode("utf-8", "replace") if self._decoder else data

    def _without_escapes(self, data: bytes) -> bytes:
        text, self._rest = self._rest + data if self._rest else data, b""
        if b"\x1b" not in text:
            return text
        if begun := _BEGUN_ESCAPE.search(text, max(0, len(text) - _LONGEST_ESCAPE)):
            text, self._rest = text[: begun.start()], begun[0]
        return _ESCAPE.sub(b"", text)


@dataclass(frozen=True, slots=True)
class RunLog:
    size: int
    """Bytes of the log, decompressed."""
    head: bytes
    """The first 64 KiB, as plain text."""
    tail: bytes
    """The last 16 KiB, as plain text."""
    truncated_line: bool
    """True if the file ends in the middle of a step line, which is ignored, or is compressed and damaged."""
    attempt: LoggedAttempt
    """The last attempt."""
    format: str | None
    """Name of one of ``llmb.readers.logs.formats``; None if the log has no step line."""
    configuration: dict[str, Value]
    """The configuration of the run from the log's beginning and its path; see ``llmb.readers.logs.configuration``."""

    sizes_later: Mapping[str, int]
    """Sizes of the layout that are printed between steps, with keys of ``configuration``."""

    @property
    def is_in_head(self) -> bool:
        """True if ``head`` is certainly the whole text."""
        return len(self.head) < _HEAD_BYTES


def read_log(
    stream: BinaryIO, rule: str, chunk_bytes: int = CHUNK_BYTES, path: Path | None = None, documented: str | None = None
) -> RunLog:
    """Read ``stream`` to its end, perhaps twice.

    Raise OSError if it is unreadable, UsageError if its progress bar is ambiguous.
    """
    log = _Pass(LoggedAttempt(rule, documented=documented)).read(PlainText(stream), chunk_bytes, path)
    if log.attempt.last != log.attempt.window_last:
        stream.seek(0)
        log = _Pass(LoggedAttempt(rule, log.attempt.last, documented)).read(PlainText(stream), chunk_bytes, path)
    log.attempt.settle()
    return log


class _Pass:
    def __init__(self, attempt: LoggedAttempt) -> None:
        self.attempt = attempt
        self.finder = StepFinder()
        self.sizes_later: dict[str, int] = {}
        self.since_step = b""
        """The text since the last step line; empty before the first."""

    def read(self, text: PlainText, chunk_bytes: int, path: Path | None) -> RunLog:
        head, tail, rest = b"", b"", b""
        while part := text.read(chunk_bytes):
            if len(head) < _HEAD_BYTES:
                head = (head + part)[:_HEAD_BYTES]
            tail = (tail + part)[-_TAIL_BYTES:]
            end = max(part.rfind(b"\n"), part.rfind(b"\r")) + 1
            if end:
                self._add(rest + part[:end])
                rest = b""
            rest = (rest + part[end:])[-MAX_LINE_BYTES:]
        unended, truncated_line = self.finder.find_unended(rest)
        self._begin()
        self.attempt.add_lines(unended)
        log_format = self.finder.format
        return RunLog(
            size=text.size,
            head=head,
            tail=tail,
            truncated_line=truncated_line or text.damaged,
            attempt=self.attempt,
            format=log_format.name if log_format else None,
            configuration=configuration_of(head, path, log_format.find_step_mark(head) if log_format else -1),
            sizes_later=self.sizes_later,
        )

    def _add(self, lines: bytes) -> None:
        steps = self.finder.find(lines)
        self._begin()
        self.attempt.add_lines(steps)
        if self.finder.format:
            text = self.since_step + lines
            first = 0 if self.since_step else max(0, self.finder.format.find_step_mark(text))
            last = max(first, self.finder.format.find_last_step_mark(text))
            self.sizes_later = sizes_in(text[first:last]) | self.sizes_later
            self.since_step = text[last:][-_HEAD_BYTES:]

    def _begin(self) -> None:
        if not self.attempt.number and self.finder.format:
            self.attempt.continued = self.finder.resumed
            self.attempt.first_number = self.finder.format.first_number
            self.attempt.means = self.finder.format.mean_of_interval
