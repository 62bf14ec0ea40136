# SPDX-License-Identifier: Apache-2.0
"""Runs the program that converts weights, and follows its output."""

import os
from importlib.util import find_spec

from llmb.checkpoints.conversion import (
    AnyJob,
    ConverterMessage,
    ImportedWeights,
    ImportJob,
    OnNote,
    OnProgress,
    error_from,
)
from llmb.errors import EnvironmentProblem
from llmb.processes.talking import run_talking

NEEDED = ("torch", "safetensors")


def check_converter() -> None:
    """Raises EnvironmentProblem where this machine has not what the converting program needs."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        what = f"converting weights needs {' and '.join(missing)}, which this Python does not have"
        raise EnvironmentProblem(what, do="pip install 'llmb[engine]'")


def run_converter(job: AnyJob, on_progress: OnProgress, on_note: OnNote) -> ImportedWeights | None:
    """Returns when ``job`` is done, with what an import wrote.

    Raises the program's own error, RunFailed where it left none, or UserInterrupt.
    """
    last = ConverterMessage()

    def follow(line: bytes) -> None:
        nonlocal last
        message = ConverterMessage.model_validate_json(line)
        if message.progress:
            on_progress(*message.progress)
        if message.note:
            on_note(message.note)
        if message.error or message.imported:
            last = message

    # Files go through host memory only: a GPU would be taken for nothing.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    left = "the same command resumes" if isinstance(job, ImportJob) else "nothing was kept"
    ended = run_talking(("-P", "-m", "llmb.weights.worker.convert", job.model_dump_json()), variables, follow, left)
    if last.error:
        raise error_from(last.error)
    if ended.code:
        raise ended.failure("the program that converts weights")
    return last.imported
