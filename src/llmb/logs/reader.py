# SPDX-License-Identifier: Apache-2.0
"""Reads a run's log as a stream of plain text, and finds its steps in the format of its first step line.

Memory use grows only with the steps in the window.
"""

import codecs
import gzip
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from llmb.logs.configuration import configuration_of
from llmb.logs.formats.format import MAX_LINE_BYTES, Format, Reader, Value, has_any
from llmb.logs.formats.known import FORMATS
from llmb.logs.formats.nemo2 import Nemo2Reader, UsualSteps
from llmb.logs.logged_attempt import LoggedAttempt
from llmb.logs.step_line import STEP_LINE_HEAD, StepLine

if TYPE_CHECKING:
    from llmb.logs.step_block import StepBlock


_MOST_KEPT = 10_000
GZIP = b"\x1f\x8b"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ESCAPE = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]")
"""Colors, and movements of the cursor."""
_BEGUN_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?\Z")
_LONGEST_ESCAPE = 40
CHUNK_BYTES = 1 << 19  # fits in a core's cache between reading and searching
_DENSE = 2
"""Times as many bytes of a log dense with step lines are searched at once, as each search has a cost of its own."""
_LEAST_HALVED = 1 << 15
"""Bytes of lines that are no block which are searched again in halves."""
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


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
        """Where the first step line begins, in ``text[start:end]``, which has some of the format's marks."""
        if self.excluded or self._is_excluded(text, start, end):
            return None
        mark = self.format.find_step_mark(text, start, end)
        first = self.format.step.search(text, _line_start(text, mark, start), end) if mark >= 0 else None
        if not first:
            self.kept.extend(self.reader.find(text, start, end))
        if self.format.resumed and not self.resumed:
            until = first.start() if first else end
            signs = self.format.marks[self.format.step_marks :]
            self.resumed = has_any(text, signs, start, until) and bool(self.format.resumed.search(text, start, until))
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
        self._candidates: dict[str, _Candidate] = {}
        """By name; of the formats whose marks were found."""

    def find(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterable[StepLine]:
        """The steps in ``text[start:end]``, which consists of complete lines."""
        end = min(end, len(text))
        if self.reader:
            return self.reader.find(text, start, end)
        chosen: _Candidate | None = None
        until = end
        for known in FORMATS:
            if not has_any(text, known.marks, start, until):
                continue
            candidate = self._candidate(known)
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
        for candidate in map(self._candidate, FORMATS):
            steps, is_cut = candidate.reader.find_unended(text)
            if not candidate.excluded and (is_cut or candidate.format.step.search(text)):
                return [*self._choose(candidate), *steps], is_cut
        return [], False

    def _candidate(self, known: Format) -> _Candidate:
        if known.name not in self._candidates:
            self._candidates[known.name] = _Candidate(known)
        return self._candidates[known.name]

    def _choose(self, candidate: _Candidate) -> Sequence[StepLine]:
        self.format, self.reader, self.resumed = candidate.format, candidate.reader, candidate.resumed
        self._candidates = {}
        return candidate.kept


def _line_start(text: bytes, at: int, start: int) -> int:
    """Where the line at ``at`` begins, in text from ``start`` on."""
    newline = text.rfind(b"\n", start, at)
    return max(newline, text.rfind(b"\r", max(newline, start), at), start - 1) + 1


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, /) -> object: ...


class PlainText:
    """The text of a log, from its beginning: decompressed, in UTF-8, and without the escape sequences of a terminal.

    ``stream`` has to be seekable only if it is compressed."""

    def __init__(self, stream: _Stream) -> None:
        self.size = 0
        """Bytes read so far, decompressed."""
        self.damaged = False
        """The compressed file is truncated or corrupt: the text ends where it can no longer be decompressed."""
        self._read_some: Callable[[int], bytes] = stream.read
        self._begin = self._first_bytes()
        if self._begin == GZIP:
            stream.seek(0)
            self._read_some = gzip.GzipFile(fileobj=stream).read1  # all that precedes damage
            self._begin = self._first_bytes()
        if self.damaged and not self._begin:  # it only looks compressed
            self.damaged, self._read_some = False, stream.read
            stream.seek(0)
            self._begin = self._first_bytes()
        is_utf16 = self._begin in _UTF_16
        self._decoder = codecs.getincrementaldecoder("utf-16")("replace") if is_utf16 else None
        self._rest = b""
        """The beginning of an escape sequence."""

    def read(self, size: int) -> bytes:
        """Some of the text, about ``size`` bytes; empty only at its end."""
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
    """The content of a log."""

    size: int
    """Bytes of the log, decompressed."""
    head: bytes
    """The first 64 KiB, as plain text."""
    tail: bytes
    """The last 16 KiB, as plain text."""
    truncated_line: bool
    """The file ends in the middle of a step line, which is left out, or is compressed and ends too early."""
    attempt: LoggedAttempt
    """The last attempt."""
    format: str | None
    """Name of one of ``formats.known``; None without a step line."""
    configuration: dict[str, Value]
    """What the log's beginning and its path tell about the run; see ``llmb.logs.configuration``."""

    @property
    def is_in_head(self) -> bool:
        """Whether ``head`` is all of the text."""
        return len(self.head) < _HEAD_BYTES


@dataclass(frozen=True, slots=True)
class _Part:
    """Complete lines of a chunk: a block, or none."""

    first: int
    end: int
    block: "StepBlock | None"


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``text[:first]`` ends a line, ``text[first:end]`` are complete lines, the rest begins a line."""

    text: bytes
    first: int
    end: int
    parts: "Future[list[_Part]] | None"
    """The complete lines, if they may form blocks."""


def read_log(
    stream: BinaryIO,
    rule: str,
    chunk_bytes: int = CHUNK_BYTES,
    path: Path | None = None,
    documented: str | None = None,
) -> RunLog:
    """Reads ``stream`` to its end. Any bytes are accepted; ``rule`` selects the steps that are kept.

    If the declared last step changes midway, or is not declared, the window moves, perhaps to earlier steps, and the
    log is read again. The name of the experiment is taken from ``path``; ``documented`` is the window that the source
    of the recipe takes. Raises OSError.
    """
    log = _Pass(LoggedAttempt(rule, documented=documented)).read(PlainText(stream), chunk_bytes, path)
    if log.attempt.last != log.attempt.window_last:
        stream.seek(0)
        log = _Pass(LoggedAttempt(rule, log.attempt.last, documented)).read(PlainText(stream), chunk_bytes, path)
    log.attempt.settle()
    return log


class _Pass:
    """Reads a log once."""

    def __init__(self, attempt: LoggedAttempt) -> None:
        self.attempt = attempt
        self.finder = StepFinder()

    def read(self, text: PlainText, chunk_bytes: int, path: Path | None) -> RunLog:
        head, tail, rest = b"", b"", b""
        for chunk in _chunks(text, chunk_bytes):
            part = chunk.text
            if len(head) < _HEAD_BYTES:
                head = (head + part)[:_HEAD_BYTES]
            tail = (tail + part)[-_TAIL_BYTES:] if len(part) < _TAIL_BYTES else part[-_TAIL_BYTES:]
            if not chunk.end:
                rest = (rest + part)[-MAX_LINE_BYTES:]
                continue
            first = chunk.first if rest or chunk.parts else 0
            if first:
                # Only this line is joined with the remainder: copying the chunk would cost as much as the search.
                self._add(rest + part[:first])
            for lines in chunk.parts.result() if chunk.parts else (_Part(first, chunk.end, None),):
                if not self._add_block(lines.block):
                    self._add(part, lines.first, lines.end)
            rest = part[chunk.end :][-MAX_LINE_BYTES:]
        unended, truncated_line = self.finder.find_unended(rest)
        self._begin()
        self.attempt.add_lines(unended)
        known = self.finder.format
        return RunLog(
            size=text.size,
            head=head,
            tail=tail,
            truncated_line=truncated_line or text.damaged,
            attempt=self.attempt,
            format=known.name if known else None,
            configuration=configuration_of(head, path, known.find_step_mark(head) if known else -1),
        )

    def _add(self, text: bytes, start: int = 0, end: int = sys.maxsize) -> None:
        """Complete lines."""
        end = min(end, len(text))
        steps = self.finder.find(text, start, end)
        self._begin()
        if not isinstance(steps, UsualSteps) or not self.attempt.add_block(steps):
            self.attempt.add_lines(steps)

    def _begin(self) -> None:
        """Tells the attempt what came before its first step."""
        if not self.attempt.number and self.finder.format:
            self.attempt.continued = self.finder.resumed
            self.attempt.first_number = self.finder.format.first_number
            self.attempt.means = self.finder.format.mean_of_interval

    def _add_block(self, block: "StepBlock | None") -> bool:
        reader = self.finder.reader
        if not block or not isinstance(reader, Nemo2Reader):
            return False
        first, final = block.bodies
        if reader.is_cut(first) or not self.attempt.add_block(block):
            return False
        if block.count > 1:
            reader.note(final)  # the line before it has the same fields
        reader.note(final)
        return True


def _chunks(stream: PlainText, chunk_bytes: int) -> Iterator[_Chunk]:
    """All of ``stream``. While chunks of a log dense with step lines are searched, the next one is read."""
    ahead: deque[_Chunk] = deque()
    dense = False
    with ExitStack() as stack:
        pool: ThreadPoolExecutor | None = None
        while text := stream.read(chunk_bytes * _DENSE if dense else chunk_bytes):
            newline = text.rfind(b"\n")
            end = max(newline, text.rfind(b"\r", newline + 1)) + 1
            first = text.find(b"\n", 0, end) + 1 or end
            dense = _is_dense(text, first, end)
            if dense and not pool:
                pool = stack.enter_context(ThreadPoolExecutor(1))
            block = pool.submit(_find_blocks, text, first, end) if dense and pool else None
            ahead.append(_Chunk(text, first, end, block))
            while len(ahead) > dense:
                yield ahead.popleft()
        yield from ahead


def _is_dense(text: bytes, first: int, end: int) -> bool:
    """Whether the complete lines begin and end with a step line."""
    lines = text[first : text.find(b"\n", first, end) + 1], text[text.rfind(b"\n", first, end - 1) + 1 : end]
    return all(STEP_LINE_HEAD in line for line in lines)


def _find_blocks(text: bytes, first: int, end: int) -> list[_Part]:
    """Lines that are no block are halved, so that only a part around an odd line is none."""
    from llmb.logs.step_block import find_block  # with NumPy, which takes longer to load than most logs to read

    block = find_block(text, first, end)
    middle = text.find(b"\n", (first + end) // 2, end) + 1
    if block or end - first < _LEAST_HALVED or not 0 < middle < end:
        return [_Part(first, end, block)]
    return _find_blocks(text, first, middle) + _find_blocks(text, middle, end)
