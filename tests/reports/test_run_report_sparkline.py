# SPDX-License-Identifier: Apache-2.0
"""The line of step times: its heights, its width, the window in it, and where it is shown; colors of verdicts."""

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from called_here import Run
from fake_steps import steps_of
from job_rows import job_row
from timed_runs import write_run

from llmb.catalogue.records import Window
from llmb.jobs.job import Job
from llmb.jobs.states import read_step_times
from llmb.reports.formats import sparkline, step_chart, window_sparkline
from llmb.reports.jobs_report import MOST_DRAWN, runs_table
from llmb.reports.table import rows_table, terminal_lines
from llmb.runs.plan import Plan
from llmb.runs.record import SubmittedJob

DATA = Path(__file__).parent.parent / "data" / "root"
WINDOW = Window(first=4, last=7, rule="4-7")
TIMES = [9.0, 2.0, 2.0, 2.0, 1.0, 1.5, 2.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (range(1, 9), "▁▁▁▁▁▃▆█"),
        ([100.0, 1.0, 1.0, 1.0, 1.04, 1.0], "█▁▁▁▄▁"),
        ([2.0] * 5, "▁▁▁▁▁"),
        ([0.0, 0.0, 0.0], "▁▁▁"),
        ([1.0, math.nan, 2.0, 1.0], "▁?█▁"),
        ([1.0, 2.0], ""),
        ([], ""),
        ([math.nan] * 4, ""),
    ],
)
def test_heights_are_of_the_second_half_and_small_noise_stays_low(values: list[float], line: str) -> None:
    assert sparkline(list(values)) == line


def test_a_long_series_keeps_its_peaks() -> None:
    values = [1.0] * 1000
    values[700] = 2.0
    line = sparkline(values, 20)
    assert len(line) == 20 and [place for place, block in enumerate(line) if block == "█"] == [14]
    assert sum(map(len, (sparkline(values[:n], 20) for n in (3, 19, 20, 21)))) == 3 + 19 + 20 + 20


def test_the_window_is_in_brackets_and_sets_the_scale() -> None:
    assert window_sparkline(steps_of(TIMES), WINDOW) == "████[▁▅█▁]▁▁"
    assert window_sparkline(steps_of(TIMES[:3]), WINDOW) == sparkline(TIMES[:3])
    assert window_sparkline([], WINDOW) == ""
    wide = window_sparkline(steps_of([1.0] * 500), Window(first=100, last=399, rule="100-399"), 50)
    assert wide == f"{'▁' * 10}[{'▁' * 30}]{'▁' * 10}"


@pytest.fixture
def install(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> Path:
    plan = tiny_plan()
    folder = write_run(tmp_path, plan, [9.0, *[2.0 + step % 2 * (step > 30) for step in range(plan.steps - 1)]])
    job = SubmittedJob(scheduler="local", job_id="local-1", key="k", submitted_at="2026-11-01T12:00:00+00:00")
    folder.job.write_text(job.model_dump_json())
    return tmp_path


def test_commands_show_it(llmb: Run, install: Path, tmp_path: Path) -> None:
    (row,) = (line for line in llmb("result", "latest").stdout.splitlines() if "[window]" in line)
    before, inside = row.split()[-1].split("[")
    assert before[0] == "█" and set(inside) <= {*"▁█]"} and "█" in inside
    (listed,) = (line for line in llmb("runs").stdout.splitlines() if "tiny" in line)
    assert "█" in listed and "▁" in listed
    parsed = llmb("parse", str(DATA), "--window", "4-8").stdout
    assert "[window]" in parsed and "▁" in parsed


def test_an_output_without_block_characters_gets_digits(install: Path) -> None:
    command = [sys.executable, "-m", "llmb", "result", "latest"]
    environ = {**os.environ, "LLMB_INSTALL": str(install), "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, capture_output=True, check=False, env=environ)
    (row,) = (line for line in done.stdout.decode("latin-1").splitlines() if "[window]" in line)
    assert done.returncode == 0 and row.split()[-1].startswith("8") and "[" in row.split()[-1]


def test_a_list_of_many_runs_reads_no_steps() -> None:
    """Nor those of a run whose file is large."""
    read: list[str] = []
    runs = [job_row(key=str(number)) for number in range(MOST_DRAWN + 1)]

    def times(job: Job) -> list[float]:
        read.append(job.key)
        return [1.0, 2.0, 3.0]

    assert "steps" not in [column.header for column in runs_table(runs, len(runs), times).columns] and not read
    assert "steps" in [column.header for column in runs_table(runs[1:], len(runs), times).columns]
    assert len(read) == MOST_DRAWN


def test_steps_of_a_long_run_are_not_read_for_a_list(install: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (steps,) = install.rglob("metrics.jsonl")
    job = job_row(run_dir=str(steps.parent))
    assert len(read_step_times(job)) == 50
    monkeypatch.setattr("llmb.jobs.states.MOST_LISTED_BYTES", steps.stat().st_size - 1)
    assert read_step_times(job) == []
    assert read_step_times(job_row(run_dir=str(install / "none"))) == []


def test_a_chart_has_its_limits_its_window_and_its_steps() -> None:
    assert step_chart(steps_of(TIMES), WINDOW, rows=2) == [
        "2 s |████  █",
        "1 s |████▁██▁▁▁",
        "    |    ====",
        "steps 0-9; = is the window 4-7",
    ]
    folded = step_chart(steps_of([1.0, 1.0, 5.0, 1.0] * 30), Window(first=60, last=119, rule=""), cells=60, rows=1)
    assert folded[0].endswith(f"|{'▁█' * 30}") and folded[1].endswith(f"|{' ' * 30}{'=' * 30}")
    assert folded[2].startswith("steps 0-119, the slowest of up to 2 a column;")
    assert step_chart([], WINDOW) == []
    assert step_chart(steps_of([1.0, math.nan, 1.0]), WINDOW, rows=1)[0].endswith("|▁█▁")


def test_the_command_draws_one_run(llmb: Run, install: Path, tmp_path: Path) -> None:
    drawn = llmb("result", "latest", "--plot")
    assert drawn.returncode == 0 and drawn.stdout.splitlines()[0].startswith("3 s |█")
    assert "= is the window 35-44" in drawn.stdout and "step time s, mean" in drawn.stdout
    assert llmb("result", "latest", "--plot", "--json").returncode == 2


@pytest.mark.parametrize(
    ("text", "color"),
    [
        ("PASS: as fast", 32),
        ("0.1 s a step, 9 tokens/s; regressed: 5 %", 31),
        ("inconclusive (soft)", 33),
        ("noise", 0),
    ],
)
def test_a_verdict_has_a_color_on_a_terminal(text: str, color: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    table = rows_table(text, ("verdict",), [(text,)])
    title, _, cell = terminal_lines(table, 80)
    for line in (title, cell):
        assert {int(code) for code in re.findall(r"(?<=[;\[])3\d(?=m)", line)} == ({color} if color else set())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in terminal_lines(table, 80)[-1]
