# SPDX-License-Identifier: Apache-2.0
"""Asks a program of the system, such as nvidia-smi, squeue or git, with a limit on its time and on its output."""

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
"""What no limit exceeds."""
MOST_BYTES = 32 * 2**20
"""Limit of output and errors together: squeue prints about 1 MB for 10,000 jobs."""
LAST_WORDS = 200
"""Characters of a program's last line that are shown."""
GRACE_S = 2.0
"""How long a program may take to end after SIGTERM, and after SIGKILL."""
PAUSE_S = 0.05
"""Between two looks at whether a program has ended whose output others hold open."""
BLOCK = 1 << 16
NO_NUMBER = re.compile(r"\d{400}")
"""What no program means: int() refuses it, and patterns that look for numbers take hours."""


class Said(NamedTuple):
    """What a program printed; ``problem`` is None if it succeeded."""

    text: str
    problem: str | None = None
    timed_out: bool = False
    errors: str = ""
    """What it printed as errors."""
    code: int | None = None
    """Its exit code; None if it was not started, or ended for a limit."""
    not_here: bool = False
    """Whether there is no such program."""


def ask_program(
    command: Sequence[str],
    limit_s: float,
    *,
    environ: Mapping[str, str] | None = None,
    held: Sequence[int] = (),
    cwd: str | None = "/",
) -> Said:
    """Runs a program; never raises for one that is missing, fails, prints without end, or hangs even when it is killed.

    ``held`` are descriptors that it inherits. Whatever it started ends with it, but for a process that waits for a
    device or a file system: that cannot be killed, and is left behind.
    """
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
        return Said("", f"{command[0]} is not on this machine", not_here=True)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        return Said("", f"{command[0]} cannot be started: {why}")
    try:
        output, errors, ended = _read(process, time.monotonic() + limit_s)
    finally:
        _end(process)
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()
    if len(output) + len(errors) > MOST_BYTES:
        return Said("", f"{command[0]} printed more than {MOST_BYTES / 2**20:g} MiB, and was ended")
    said, complaint = (text.decode(errors="replace").replace("\r\n", "\n") for text in (output, errors))
    if unusable := bool(NO_NUMBER.search(said) or NO_NUMBER.search(complaint)):
        said = complaint = ""
    if not ended:
        return Said(said, f"{command[0]} did not answer within {limit_s:g} s", timed_out=True, errors=complaint)
    code = process.returncode
    if unusable:
        return Said("", f"{command[0]} printed a number with hundreds of digits, so that its output is not used")
    problem = f"{command[0]}: {_last_words(complaint, said, code)}" if code else None
    return Said(said, problem, errors=complaint, code=code)


def _read(process: "subprocess.Popen[bytes]", end_s: float) -> tuple[bytes, bytes, bool]:
    """Until it has ended, whatever it leaves running; whether it did, within the limits."""
    assert process.stdout and process.stderr
    found = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    pipes = list(found)
    while (left_s := end_s - time.monotonic()) > 0 and sum(map(len, found.values())) <= MOST_BYTES:
        if not pipes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(left_s)
            break
        ready = select.select(pipes, (), (), min(left_s, PAUSE_S))[0]
        for pipe in ready:
            block = os.read(pipe, BLOCK)
            found[pipe] += block
            if not block:
                pipes.remove(pipe)
        if not ready and process.poll() is not None:
            break
    output, errors = map(bytes, found.values())
    return output, errors, process.poll() is not None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """And what it has left running."""
    for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else (signal.SIGKILL,):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def _last_words(errors: str, said: str, code: int) -> str:
    lines = [line.strip() for line in (errors.strip() or said).splitlines() if line.strip()]
    return lines[-1][:LAST_WORDS] if lines else f"exit code {code} with no output"
