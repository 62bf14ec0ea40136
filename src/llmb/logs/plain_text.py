# SPDX-License-Identifier: Apache-2.0
"""Reads a log as plain text: decompressed, in UTF-8, and without the escape sequences of a terminal."""

import codecs
import gzip
import re
import zlib
from collections.abc import Callable
from typing import Protocol

GZIP = b"\x1f\x8b"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ESCAPE = re.compile(rb"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]")
"""Colors, and movements of the cursor."""
_BEGUN_ESCAPE = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,4})?\Z")
_LONGEST_ESCAPE = 40


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def seek(self, offset: int, /) -> object: ...


class PlainText:
    """The text of a log, from its beginning. ``stream`` has to be seekable only if it is compressed."""

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
