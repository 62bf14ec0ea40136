# SPDX-License-Identifier: Apache-2.0
"""Runs one child process at a time, with a time limit, and never leaves one behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llmb.base.parent_death import PARENT_DEATH

GRACE_S = 20
"""An interrupted ``llmb run`` ends its workers itself within 8 s."""
TAIL = 2000
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]: )?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended; ``exit_code`` is None if the time limit ended it."""

    exit_code: int | None
    stdout: str
    stderr: str
    wall_s: float


def run_limited(command: Sequence[str], environ: Mapping[str, str], log: Path, limit_s: float) -> Ended:
    """The output of the process goes to ``log``; its result is written to the same folder.

    The process ends with this one, also if this one is killed: it would keep the GPU's memory from the next call.
    """
    command = [sys.executable, "-m", PARENT_DEATH, str(os.getpid()), *command]
    began = time.monotonic()
    results = log.with_suffix(".out")
    with results.open("w") as out, log.open("w") as err:
        process = subprocess.Popen(command, env=environ, stdout=out, stderr=err, start_new_session=True)
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            end(process)
    wall_s = time.monotonic() - began
    return Ended(exit_code, results.read_text(errors="replace"), log.read_text(errors="replace"), wall_s)


def end(process: "subprocess.Popen[bytes]") -> None:
    """Terminates the process, then kills everything that is left of its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def failure_reason(ended: Ended) -> str:
    """The last error that a process reported, or how it ended if it reported none."""
    errors: list[str] = ERROR_LINE.findall(ended.stderr)
    if short := [error for error in errors if "OutOfMemoryError" in error]:
        return f"out of memory: {short[0][:300]}"
    if errors:
        return errors[-1][:300]
    code = ended.exit_code or 0
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"


def tail(ended: Ended) -> str:
    return ended.stderr[-TAIL:]
