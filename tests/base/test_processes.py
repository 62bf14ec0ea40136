# SPDX-License-Identifier: Apache-2.0
"""Processes and what they started are found by /proc, without ps, which small images lack."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from llmb.base import processes as families
from llmb.base.parent_death import has_ended

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
    assert families.family(process.pid) == [process.pid, child]


def test_both_ways_agree(parent: tuple[subprocess.Popen[str], int]) -> None:
    process, child = parent
    own = {process.pid, child}
    by_proc = {(pid, above) for pid, above in families._by_proc() if pid in own}
    by_ps = {(pid, above) for pid, above in families._by_ps() if pid in own}
    assert by_proc == by_ps == {(process.pid, os.getpid()), (child, process.pid)}


@pytest.mark.parametrize("reused", [False, True])
def test_what_is_left_of_a_family_is_killed_and_no_process_that_has_got_its_id(
    parent: tuple[subprocess.Popen[str], int], monkeypatch: pytest.MonkeyPatch, reused: bool
) -> None:
    process, child = parent
    began = families._began(child)
    seen = iter([began, "later" if reused else began])
    monkeypatch.setattr(families, "_began", lambda pid: next(seen) if pid == child else "")
    assert int(began) > 0
    families.end_tree(process)
    assert process.returncode == -signal.SIGTERM
    assert has_ended_within(child, 0.5 if reused else 60) is not reused


def has_ended_within(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not has_ended(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
