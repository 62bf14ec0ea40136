# SPDX-License-Identifier: Apache-2.0
"""Reads a run's log as a stream; memory use grows only with the steps in the window."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

from llmb.logs.logged_attempt import LoggedAttempt
from llmb.logs.step_block import StepBlock, find_block
from llmb.logs.step_finder import StepFinder
from llmb.logs.step_line import MAX_LINE_BYTES, STEP_LINE_HEAD

CHUNK_BYTES = 1 << 19  # fits in a core's cache between reading and searching
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class RunLog:
    """The content of a log."""

    size: int
    """Bytes of the file."""
    head: bytes
    """The file's first 64 KiB."""
    tail: bytes
    """The file's last 16 KiB."""
    truncated_line: bool
    """The file ends in the middle of a step line, which is left out."""
    attempt: LoggedAttempt
    """The last attempt."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``text[:first]`` ends a line, ``text[first:end]`` are complete lines, the rest begins a line."""

    text: bytes
    first: int
    end: int
    block: "Future[StepBlock | None] | None"
    """The complete lines as a block, if they may form one."""


def read_log(stream: BinaryIO, rule: str, chunk_bytes: int = CHUNK_BYTES) -> RunLog:
    """Reads ``stream`` to its end. Any bytes are accepted; ``rule`` selects the steps that are kept.

    If the declared last step changes midway, the window moves, perhaps to earlier steps, and the log is read again.
    """
    log = _read(stream, LoggedAttempt(rule), chunk_bytes)
    if log.attempt.last == log.attempt.window_last:
        return log
    stream.seek(0)
    return _read(stream, LoggedAttempt(rule, log.attempt.last), chunk_bytes)


def _read(stream: BinaryIO, attempt: LoggedAttempt, chunk_bytes: int) -> RunLog:
    size, head, tail, rest = 0, b"", b"", b""
    finder = StepFinder()
    for chunk in _chunks(stream, chunk_bytes):
        text = chunk.text
        size += len(text)
        if not attempt.number:
            finder.look_for_load(rest + text)
            attempt.continued = finder.loaded
        if len(head) < _HEAD_BYTES:
            head = (head + text)[:_HEAD_BYTES]
        tail = (tail + text)[-_TAIL_BYTES:] if len(text) < _TAIL_BYTES else text[-_TAIL_BYTES:]
        if not chunk.end:
            rest = (rest + text)[-MAX_LINE_BYTES:]
            continue
        # Only the chunk's first line is joined with the remainder: copying all of it would cost as much as the search.
        attempt.add_lines(finder.find(rest + text[: chunk.first]))
        block = chunk.block.result() if chunk.block else None
        if not (block and finder.format == "nemo" and attempt.add_block(block)):
            attempt.add_lines(finder.find(text, chunk.first, chunk.end))
        rest = text[chunk.end :][-MAX_LINE_BYTES:]
    unended, truncated_line = finder.find_unended(rest)
    attempt.add_lines(unended)
    return RunLog(size, head, tail, truncated_line, attempt)


def _chunks(stream: BinaryIO, chunk_bytes: int) -> Iterator[_Chunk]:
    """All of ``stream``. While one chunk of a log dense with step lines is searched, the next one is read."""
    ahead: deque[_Chunk] = deque()
    with ThreadPoolExecutor(1) as pool:
        while text := stream.read(chunk_bytes):
            newline = text.rfind(b"\n")
            end = max(newline, text.rfind(b"\r", newline + 1)) + 1
            first = text.find(b"\n", 0, end) + 1 or end
            dense = STEP_LINE_HEAD in text[first : text.find(b"\n", first, end) + 1]
            ahead.append(_Chunk(text, first, end, pool.submit(find_block, text, first, end) if dense else None))
            while len(ahead) > (1 if dense else 0):
                yield ahead.popleft()
        yield from ahead
