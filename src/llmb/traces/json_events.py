# SPDX-License-Identifier: Apache-2.0
"""Streams the events of a trace in Chrome's JSON format, in bounded memory."""

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from llmb.errors import UsageError
from llmb.input_files import open_file

CHUNK_BYTES = 1 << 20
LONGEST_EVENT = 1 << 24
"""Characters. A longer event means that the file is truncated, or has no events."""
GZIP_MAGIC = b"\x1f\x8b"
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_GAP = re.compile(r"[\s,]*")


@dataclass(slots=True)
class TraceFile:
    """Iterate over ``events()`` once; then ``header`` holds everything else that was read of the file."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    """Of the event that is read, from 1; 0 before the first."""

    def events(self) -> Iterator[dict[str, Any]]:
        """Raises UsageError if the file is not a trace, is truncated or cannot be read."""
        try:
            with io.BufferedReader(cast(io.RawIOBase, open_file(self.path))) as raw:
                if raw.peek(2)[:2] == GZIP_MAGIC:
                    with gzip.open(raw) as unpacked:
                        yield from self._parse(_text(cast(BinaryIO, unpacked)))
                else:
                    yield from self._parse(_text(raw))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise self._broken(f"cannot be decompressed: {error}") from error
        except OSError as error:
            raise self._broken(f"cannot be read: {error.strerror}") from error

    def _parse(self, chunks: Iterator[str]) -> Iterator[dict[str, Any]]:
        decode = json.JSONDecoder(strict=False).raw_decode
        text = self._skip_header(chunks)
        at, self.number = 0, 1
        while True:
            gap = _GAP.match(text, at)
            at = gap.end() if gap else at
            if text.startswith("]", at):
                return
            try:
                event, at = decode(text, at)
            except json.JSONDecodeError:
                text, at = self._more(chunks, text[at:]), 0
                continue
            except (ValueError, RecursionError) as error:  # a number of too many digits, too many levels
                raise self._broken(f"has an event that cannot be read: {error}") from error
            if not isinstance(event, dict):
                raise self._broken("has events that are not JSON objects")
            yield event
            self.number += 1

    def _more(self, chunks: Iterator[str], pending: str) -> str:
        """``pending`` and at least as much again: parsing it again after each chunk would take quadratic time."""
        if len(pending) > LONGEST_EVENT:
            raise self._broken("is not valid JSON")
        parts, length = [pending], len(pending)
        for more in chunks:
            parts.append(more)
            length += len(more)
            if length >= 2 * len(pending):
                return "".join(parts)
        if length > len(pending):
            return "".join(parts)
        raise self._broken("is truncated within its events")

    def _skip_header(self, chunks: Iterator[str]) -> str:
        """The text after the bracket that opens the list of events."""
        text = next(chunks, "").lstrip()
        if text.startswith("["):
            return text[1:]
        if not text.startswith("{"):
            raise self._broken("is not JSON")
        while not (found := _EVENTS.search(text)):
            parts, length = [text], 0
            while length <= len(text) and (more := next(chunks, "")):
                parts.append(more)
                length += len(more)
            if not length or length > LONGEST_EVENT:
                raise self._broken("has no 'traceEvents'")
            text = "".join(parts)
        try:
            self.header = json.loads(text[: found.start()] + '"traceEvents": []}', strict=False)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"is not valid JSON: {error}") from error
        return text[found.end() :]

    def _broken(self, what: str) -> UsageError:
        place = f" (event {self.number:,})" if self.number else ""
        return UsageError(
            f"not a trace: the file {what}{place}",
            where=str(self.path),
            do="give a trace of the PyTorch profiler (.json, .json.gz) or an export of Nsight Systems (.sqlite)",
        )


def _text(stream: BinaryIO) -> Iterator[str]:
    """A byte order mark is skipped."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    while chunk := stream.read(CHUNK_BYTES):
        yield decoder.decode(chunk)
    yield decoder.decode(b"", final=True)
