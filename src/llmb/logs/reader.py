# SPDX-License-Identifier: Apache-2.0
"""Reads a run's log as a stream, in memory that grows with the window's steps alone."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

from llmb.logs.attempt import Attempt
from llmb.logs.block import StepBlock, find_block
from llmb.logs.checkpoint_line import LOAD_HEAD
from llmb.logs.step_line import MAX_LINE_BYTES, find_steps, find_unended_steps

CHUNK_BYTES = 1 << 19  # stays in a core's cache between reading and searching
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class RunLog:
    """What a log says."""

    size: int
    """Bytes of the file."""
    head: bytes
    """The file's first 64 KiB."""
    tail: bytes
    """The file's last 16 KiB."""
    truncated_line: bool
    """The file ends within a step line, which is left out."""
    attempt: Attempt
    """The last one."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``text[:first]`` ends a line, ``text[first:end]`` are whole ones, the rest begins one."""

    text: bytes
    first: int
    end: int
    block: StepBlock | None
    """What the whole lines are, if they are one."""


def read_log(stream: BinaryIO, rule: str, chunk_bytes: int = CHUNK_BYTES) -> RunLog:
    """Reads ``stream`` to its end. Any bytes are accepted; ``rule`` says which steps are kept.

    A log that declares another last step midway moves the window, perhaps to steps gone by, and is read again.
    """
    log = _read(stream, Attempt(rule), chunk_bytes)
    if log.attempt.last == log.attempt.window_last:
        return log
    stream.seek(0)
    return _read(stream, Attempt(rule, log.attempt.last), chunk_bytes)


def _read(stream: BinaryIO, attempt: Attempt, chunk_bytes: int) -> RunLog:
    size, head, tail, rest = 0, b"", b"", b""
    for chunk in _chunks(stream, chunk_bytes):
        text = chunk.text
        size += len(text)
        if not attempt.number:
            attempt.continued = attempt.continued or LOAD_HEAD in rest + text
        if len(head) < _HEAD_BYTES:
            head = (head + text)[:_HEAD_BYTES]
        tail = (tail + text)[-_TAIL_BYTES:] if len(text) < _TAIL_BYTES else text[-_TAIL_BYTES:]
        if not chunk.end:
            rest = (rest + text)[-MAX_LINE_BYTES:]
            continue
        # Only the chunk's first line is joined with what was left: copying all of it would cost as much as the search.
        attempt.add_lines(find_steps(rest + text[: chunk.first]))
        if not (chunk.block and attempt.add_block(chunk.block)):
            attempt.add_lines(find_steps(text, chunk.first, chunk.end))
        rest = text[chunk.end :][-MAX_LINE_BYTES:]
    unended, truncated_line = find_unended_steps(rest)
    attempt.add_lines(unended)
    return RunLog(size, head, tail, truncated_line, attempt)


def _chunks(stream: BinaryIO, chunk_bytes: int) -> Iterator[_Chunk]:
    """All of ``stream``. Each chunk but a short one, which is not worth a thread, is cut while the next is read."""
    cut: Callable[[], _Chunk] | None = None
    with ThreadPoolExecutor(1) as pool:
        while text := stream.read(chunk_bytes):
            following = pool.submit(_cut, text).result if len(text) == chunk_bytes else partial(_cut, text)
            if cut:
                yield cut()
            cut = following
        if cut:
            yield cut()


def _cut(text: bytes) -> _Chunk:
    newline = text.rfind(b"\n")
    end = max(newline, text.rfind(b"\r", newline + 1)) + 1
    first = text.find(b"\n", 0, end) + 1 or end
    return _Chunk(text, first, end, find_block(text, first, end))
