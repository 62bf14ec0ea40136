# SPDX-License-Identifier: Apache-2.0
"""Runs a system program, such as nvidia-smi, squeue or git, with limits on its time and its output."""

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

LONGEST_S = 1800.0
"""The upper limit of all timeouts, in seconds."""
MOST_BYTES = 32 * 2**20
"""Limit of output and errors together: squeue prints about 1 MB for 10,000 jobs."""
LAST_WORDS = 200
"""Maximum length of a program's last line in a message."""
GRACE_S = 2.0
"""Seconds that a program has to end after SIGTERM, and again after SIGKILL."""
PAUSE_S = 0.05
"""Seconds between checks whether a program has ended while other processes keep its output open."""
BLOCK = 1 << 16
NO_NUMBER = re.compile(r"\d{400}")
"""Matches numbers too long to be real: int() rejects thousands of digits, and some patterns take hours on them."""


class Output(NamedTuple):
    """The output of a program; ``problem`` is None if it succeeded."""

    text: str
    problem: str | None = None
    timed_out: bool = False
    errors: str = ""
    """The program's standard error."""
    code: int | None = None
    """The exit code; None if the program was not started or was ended, or its output is ignored."""
    not_here: bool = False
    """True if the program does not exist on this machine."""


def ask_program(
    command: Sequence[str],
    limit_s: float,
    *,
    environ: Mapping[str, str] | None = None,
    held: Sequence[int] = (),
    cwd: str | None = "/",
) -> Output:
    """Run a program for at most ``limit_s`` seconds; failures are the result's ``problem``. It inherits the descriptors
    ``held``."""
    limit_s = min(limit_s, LONGEST_S)
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            pass_fds=held,
            start_new_session=True,
        )
    except FileNotFoundError:
        return Output("", f"{command[0]} was not found", not_here=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return Output("", f"{command[0]} cannot be started: {why}")
    try:
        output, errors, ended = _read(process, time.monotonic() + limit_s)
    finally:
        _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    if len(output) + len(errors) > MOST_BYTES:
        return Output("", f"{command[0]} printed more than {MOST_BYTES / 2**20:g} MiB, and was ended")
    answer, complaint = (text.decode(errors="replace").replace("\r\n", "\n") for text in (output, errors))
    if unusable := bool(NO_NUMBER.search(answer) or NO_NUMBER.search(complaint)):
        answer = complaint = ""
    if not ended:
        return Output(answer, f"{command[0]} did not answer within {limit_s:g} s", timed_out=True, errors=complaint)
    code = process.returncode
    if unusable:
        return Output("", f"{command[0]} printed a number with hundreds of digits; its output is ignored")
    problem = f"{command[0]}: {_last_words(complaint, answer, code)}" if code else None
    return Output(answer, problem, errors=complaint, code=code)


def _read(process: "subprocess.Popen[bytes]", end_s: float) -> tuple[bytes, bytes, bool]:
    assert process.stdout and process.stderr
    buffers = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    pipes = list(buffers)
    while (left_s := end_s - time.monotonic()) > 0 and sum(map(len, buffers.values())) <= MOST_BYTES:
        if not pipes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left_s)
            break
        ready = select.select(pipes, (), (), min(left_s, PAUSE_S))[0]
        for pipe in ready:
            block = os.read(pipe, BLOCK)
            buffers[pipe] += block
            if not block:
                pipes.remove(pipe)
        if not ready and process.poll() is not None:
            break
    output, errors = map(bytes, buffers.values())
    return output, errors, process.poll() is not None


def _end(process: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _last_words(errors: str, output: str, code: int) -> str:
    lines = [line.strip() for line in (errors.strip() or output).splitlines() if line.strip()]
    return lines[-1][:LAST_WORDS] if lines else f"exit code {code} with no output"
