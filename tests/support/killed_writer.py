# SPDX-License-Identifier: Apache-2.0
"""Writers of checkpoint files that other processes are started with."""

import os
import signal

from llmb.engine.weights.chunk_files import WeightFile
from llmb.runs.checkpoints.conversion_request import FinishedFile


def write_or_die(file: WeightFile) -> FinishedFile:
    """Is killed as if the machine were short of memory when it writes the file 'fatal'."""
    if file.name == "fatal":
        os.kill(os.getpid(), signal.SIGKILL)
    return FinishedFile(name=file.name, bytes=file.bytes, crc32="", places=())


def write_or_fail(file: WeightFile) -> FinishedFile:
    """Raises an error that no caller expects when it writes the file 'fatal'."""
    if file.name == "fatal":
        raise KeyError(file.name)
    return write_or_die(file)
