# SPDX-License-Identifier: Apache-2.0
"""Reads a run's log as a stream, in memory that does not grow with what lies between the step lines."""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

from llmb.logs.step_line import MAX_LINE_BYTES, StepLine, find_steps, find_unended_steps

CHUNK_BYTES = 1 << 18  # stays in a core's cache between reading and searching
_HEAD_BYTES = 1 << 16
_TAIL_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class RunLog:
    """What a log says. The columns hold the steps of the last attempt, in order; a value not logged is nan."""

    size: int
    """Bytes of the file."""
    head: bytes
    """The file's first 64 KiB."""
    tail: bytes
    """The file's last 16 KiB."""
    last: int | None
    """Number of the run's last step, as the log declares it; None without a step line."""
    attempts: int
    """How often the run was begun: step numbers that fall back begin a new attempt."""
    truncated_line: bool
    """The file ends within a step line, which is left out."""
    bad_loss_step: int | None
    """The first step whose loss is logged and not finite."""
    step: "array[int]"
    step_time_s: "array[float]"
    loss: "array[float]"
    tflops_per_gpu: "array[float]"


def read_log(stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES) -> RunLog:
    """Reads ``stream`` to its end. Any bytes are accepted."""
    columns = _Columns()
    size, head, tail, rest = 0, b"", b"", b""
    while chunk := stream.read(chunk_bytes):
        size += len(chunk)
        if len(head) < _HEAD_BYTES:
            head = (head + chunk)[:_HEAD_BYTES]
        tail = (tail + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]
        newline = chunk.rfind(b"\n")
        end = max(newline, chunk.rfind(b"\r", newline + 1)) + 1
        if not end:
            rest = (rest + chunk)[-MAX_LINE_BYTES:]
            continue
        # Only the chunk's first line is joined with what was left: copying all of it would cost as much as the search.
        first = chunk.find(b"\n", 0, end) + 1 or end
        columns.extend(find_steps(rest + chunk[:first]))
        columns.extend(find_steps(chunk, first, end))
        rest = chunk[end:][-MAX_LINE_BYTES:]
    unended, truncated_line = find_unended_steps(rest)
    columns.extend(unended)
    return RunLog(
        size=size,
        head=head,
        tail=tail,
        last=columns.last,
        attempts=columns.attempts,
        truncated_line=truncated_line,
        bad_loss_step=columns.bad_loss_step,
        step=columns.step,
        step_time_s=columns.step_time_s,
        loss=columns.loss,
        tflops_per_gpu=columns.tflops_per_gpu,
    )


def _integers() -> "array[int]":
    return array("q")


def _floats() -> "array[float]":
    return array("d")


@dataclass(slots=True)
class _Columns:
    """Collects the steps of the latest attempt."""

    attempts: int = 0
    last: int | None = None
    bad_loss_step: int | None = None
    step: "array[int]" = field(default_factory=_integers)
    step_time_s: "array[float]" = field(default_factory=_floats)
    loss: "array[float]" = field(default_factory=_floats)
    tflops_per_gpu: "array[float]" = field(default_factory=_floats)

    def extend(self, lines: Iterable[StepLine]) -> None:
        previous = self.step[-1] if self.step else -1
        for step, last, step_time_s, loss, tflops_per_gpu in lines:
            if step == previous:  # several ranks log it
                continue
            if step < previous or not self.attempts:
                self._begin_attempt()
            previous = step
            self.last = last
            if self.bad_loss_step is None and loss is not None and not math.isfinite(loss):
                self.bad_loss_step = step
            self.step.append(step)
            self.step_time_s.append(step_time_s)
            self.loss.append(math.nan if loss is None else loss)
            self.tflops_per_gpu.append(math.nan if tflops_per_gpu is None else tflops_per_gpu)

    def _begin_attempt(self) -> None:
        self.attempts += 1
        self.bad_loss_step = None
        for column in (self.step, self.step_time_s, self.loss, self.tflops_per_gpu):
            del column[:]
