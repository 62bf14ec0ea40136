# SPDX-License-Identifier: Apache-2.0
"""A program does not outlive the process that started it, whenever that ends."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmb.base.parent_death import GONE, PARENT_DEATH, has_ended


def test_a_process_that_nobody_waited_for_has_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    while not has_ended(process.pid):
        time.sleep(0.01)
    os.kill(process.pid, 0)  # it still has its id
    process.wait()
    assert has_ended(process.pid)
    assert not has_ended(os.getpid())


def test_a_process_that_ends_while_its_state_is_read_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel lets its file be opened, and then has nothing to read."""

    def gone(_: Path) -> str:
        raise ProcessLookupError

    monkeypatch.setattr(Path, "read_text", gone)
    assert has_ended(os.getpid())


def test_a_program_is_not_started_for_a_process_that_has_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    while not has_ended(parent.pid):
        time.sleep(0.01)
    program = [sys.executable, "-c", "print('started')"]
    for pid, ending in ((parent.pid, (GONE, "")), (os.getpid(), (0, "started\n"))):
        started = subprocess.run(
            [sys.executable, "-m", PARENT_DEATH, str(pid), *program], capture_output=True, text=True, check=False
        )
        assert (started.returncode, started.stdout) == ending
    parent.wait()
