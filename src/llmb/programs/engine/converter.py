# SPDX-License-Identifier: Apache-2.0
"""Runs the program that converts weights, follows its output, ends it on request."""

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from typing import IO

from llmb.errors import EnvironmentProblem, RunFailed, UserInterrupt
from llmb.processes.families import end_tree
from llmb.processes.signals import Interrupted, signals_as_exceptions
from llmb.runs.conversion import AnyJob, ConverterMessage, ImportedWeights, ImportJob, OnNote, OnProgress, error_from
from llmb.runs.parent_death import PARENT_DEATH

NEEDED = ("torch", "safetensors")
LAST_LINES = 12


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
    program = [sys.executable, "-m", "llmb.engine.convert", job.model_dump_json()]
    command = [sys.executable, "-m", PARENT_DEATH, str(os.getpid()), *program]
    # Files go through host memory only: a GPU would be taken for nothing.
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile() as talk, signals_as_exceptions() as signals:
        process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=talk,
            start_new_session=True,
        )
        try:
            signals.let_through()
            last = follow(process, on_progress, on_note)
        except Interrupted as signal:
            end_tree(process)
            left = "the same command resumes" if isinstance(job, ImportJob) else "nothing was kept"
            raise UserInterrupt(f"interrupted by {signal}; {left}") from signal
        except BaseException:
            end_tree(process)
            raise
        if last.error:
            raise error_from(last.error)
        if process.returncode:
            raise _failure(process.returncode, talk)
        return last.imported


def follow(process: "subprocess.Popen[bytes]", on_progress: OnProgress, on_note: OnNote) -> ConverterMessage:
    """Reads the program's output until it ends; its error, if it reports one, or its result."""
    last = ConverterMessage()
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            message = ConverterMessage.model_validate_json(line)
            if message.progress:
                on_progress(*message.progress)
            if message.note:
                on_note(message.note)
            if message.error or message.imported:
                last = message
    process.wait()
    return last


def _failure(code: int, talk: IO[bytes]) -> RunFailed:
    talk.seek(0)
    lines = talk.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    ending = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    text = "".join(f"\n  | {line}" for line in lines)
    return RunFailed(f"the program that converts weights {ending}{text}")
