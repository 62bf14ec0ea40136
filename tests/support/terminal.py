# SPDX-License-Identifier: Apache-2.0
"""A program on a terminal of its own, whose prompts are answered."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence

WITHIN_S = 300.0
COLUMNS = 80


def talk(
    command: Sequence[str], environ: Mapping[str, str], answers: Sequence[tuple[str, str]], within_s: float = WITHIN_S
) -> tuple[int, str]:
    """Exit code and everything that was shown. Each answer is typed when its text was shown after the one before.

    What is still asked after the last answer, or after ``within_s``, gets the end of the program.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], list(command), dict(environ))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    shown, unread, open_answers = "", "", list(answers)
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if open_answers and open_answers[0][0] in unread:
            prompt, text = open_answers.pop(0)
            unread = unread.partition(prompt)[2]
            os.write(terminal, f"{text}\n".encode())
        if not select.select([terminal], [], [], 0.2)[0]:
            continue
        try:
            read = os.read(terminal, 4096).decode(errors="replace")
        except OSError:  # the program has closed it
            read = ""
        if not read:
            break
        shown, unread = shown + read, unread + read
    else:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    return code, shown.replace("\r\n", "\n")
