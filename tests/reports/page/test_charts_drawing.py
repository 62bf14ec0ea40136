# SPDX-License-Identifier: Apache-2.0
"""Plots are drawn by processes of their own, which fail and end as the command does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_sessions import members
from recorded_runs import gpu_record, times_around, write_run

from llmb.reports.page.charts import BLUE, Line, parts_chart, series_chart

ENDS_WITHIN_S = 600
LONG_LOADING = """
import os, pathlib, time
pathlib.Path(__file__).with_name(str(os.getpid())).touch()
time.sleep(2)
"""
LONG_DRAWING = """
import os, pathlib, time
def rc_context(*_):
    pathlib.Path(__file__).with_name(str(os.getpid())).touch()
    time.sleep(600)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An install root with a run."""
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "workloads" / "w" / "experiments" / "e", gpu_record(), times_around(12.0))
    return tmp_path


def start_report(root: Path, library: str) -> subprocess.Popen[bytes]:
    """With this as the library that draws."""
    (root / "matplotlib").mkdir()
    (root / "matplotlib" / "__init__.py").write_text(library)
    # As a script: with "-m", CPython ends by the signal if it interrupted code that a dataclass made, caught or not.
    command = [sys.executable, str(Path(sys.executable).with_name("llmb")), "report"]
    environ, pipe = {**os.environ, "PYTHONPATH": str(root)}, subprocess.PIPE
    return subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe, start_new_session=True)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(
    ("library", "killed"),
    [pytest.param(LONG_LOADING, False, marks=pytest.mark.measured), (LONG_DRAWING, False), (LONG_DRAWING, True)],
    ids=["while it loads", "while it draws", "killed"],
)
def test_an_interrupt_and_a_kill_end_all_processes_quietly(root: Path, library: str, killed: bool) -> None:
    process = start_report(root, library)
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not [*(root / "matplotlib").glob("[0-9]*")]:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    if killed:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == (-signal.SIGKILL if killed else 130)
    assert b"Traceback" not in err
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert members(process.pid) == []
    assert not (root / "report.html").exists()


def test_without_the_extra_it_says_how_to_install_it(root: Path) -> None:
    process = start_report(root, "raise ImportError('no such library')")
    _, err = process.communicate()
    assert process.returncode == 3
    assert b"-m pip install -e" in err
    assert b"Traceback" not in err


def test_a_line_of_one_point_is_seen() -> None:
    drawn = [
        series_chart("loss", [Line("loss", BLUE, points)], ("step", "")).svg() for points in ([(1, 2)], [(1, 2)] * 2)
    ]
    single, several = (svg.count("<use ") for svg in drawn)
    assert single == several + 1


def test_a_png_has_no_name_that_the_page_hides() -> None:
    """Names of runs are below the axis, and names of lines are in the legend."""

    def drawn(name: str, hidden: str) -> tuple[bytes, bytes]:
        bars = parts_chart("parts", [(name, BLUE, 40.0), ("idle", BLUE, 60.0)])
        lines = series_chart("loss", [Line(name, BLUE, [(1, 2), (2, 3)]), Line("b", BLUE, [(1, 3)])], ("step", name))
        return bars.png(lambda text: text.replace(name, hidden)), lines.png(lambda text: text.replace(name, hidden))

    assert drawn("node-17", "host-1") == drawn("host-1", "host-1")
    assert drawn("node-17", "node-17") != drawn("host-1", "host-1")
