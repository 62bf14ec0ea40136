# SPDX-License-Identifier: Apache-2.0
"""New steps of a run, as they are done."""

import os
from collections.abc import Iterator
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import NamedTuple

from llmb.input_files import open_regular
from llmb.runs.record_file import BrokenRecord
from llmb.runs.steps import Step, step_from_json


class StepNews(NamedTuple):
    """A completed step. What not every program reports is None where it is not known."""

    step: int
    step_time_s: float
    loss: float | None
    grad_norm: float | None = None
    tflops_per_gpu: float | None = None
    """As the program logs it, in a convention of its own."""
    profiled: bool = False
    """Slowed down by what is recorded of it."""
    whole: Step | None = None
    """Everything that llmb's engine records of it."""


class StepFollower:
    """Reads the complete lines that were added to ``metrics.jsonl`` since the last call.

    A run that is started again gets a new file, with the steps that it keeps; they are read again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.inode: int | None = None

    def new(self) -> Iterator[StepNews]:
        try:
            stream = open_regular(self.path, buffering=DEFAULT_BUFFER_SIZE)
        except FileNotFoundError:
            return
        except OSError as error:
            raise BrokenRecord(f"the steps cannot be read: {error.strerror}", where=str(self.path)) from error
        with stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    step = step_from_json(line)
                except ValueError as error:
                    where = f"{self.path}, byte {self.offset - len(line)}"
                    raise BrokenRecord("the line is not a complete step", where=where) from error
                yield StepNews(
                    step.step, step.step_time_s, step.loss, step.grad_norm, profiled=step.profiled, whole=step
                )
