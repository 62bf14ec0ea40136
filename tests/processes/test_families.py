# SPDX-License-Identifier: Apache-2.0
"""Processes and what they started are found by /proc, without ps, which small images lack."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from llmb.processes import families

PARENT = (
    "import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', 'input()']); print(c.pid, flush=True); input()"
)


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[str], int]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    child = int(process.stdout.readline())
    yield process, child
    for pid in (child, process.pid):
        families.signal_process(pid, signal.SIGKILL)
    process.communicate()


def test_a_family_is_found_without_ps(
    parent: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    process, child = parent
    found = families.family(process.pid)
    assert set(found) == {process.pid, child}
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    assert families.family(os.getpid())[process.pid] == "T"


def test_both_ways_agree(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, child = parent
    own = {process.pid, child}
    by_proc = {(pid, above) for pid, above, _ in families._by_proc() if pid in own}
    by_ps = {(pid, above) for pid, above, _ in families._by_ps() if pid in own}
    assert by_proc == by_ps == {(process.pid, os.getpid()), (child, process.pid)}
