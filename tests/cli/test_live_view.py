# SPDX-License-Identifier: Apache-2.0
"""A watched run as a view in a terminal, and as lines."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from llmb.analysis.watched import Circumstances, Expected, Outlook, StepHistory, outlook
from llmb.cli.watch import LineView, frame
from llmb.report.watch_report import WatchedTitle
from llmb.runs.plan import Plan
from llmb.runs.steps import StepNews

RUNNING = Circumstances(
    state="running", nodes="node[001-016]", since_start_s=4000, attempt=2, last_step=49, limit_left_s=30.0
)
PUBLISHED = Expected(step_time_s=1.5, source="published, pretrain_llama3.1/README.md line 84", tolerance_pct=5.0)


@pytest.fixture
def title(tiny_plan: Callable[..., Plan]) -> WatchedTitle:
    return WatchedTitle(path=Path("run"), job_id="4711", plan=tiny_plan())


def seen(count: int, here: Circumstances = RUNNING, since_last_s: float = 1.0) -> Outlook:
    history = StepHistory()
    for number in range(count):
        history.add(StepNews(number, 2 + number * 7 % 5 / 1000, 5.0, 1.25))
    return outlook(1.8e9, here, history, since_last_s, PUBLISHED)


def shown(title: WatchedTitle, outlook: Outlook, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(frame(title, outlook, width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits_the_terminal(title: WatchedTitle, width: int) -> None:
    lines = shown(title, seen(30), width, 40)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    assert "[##############..........] 30 of 50 (60 %)" in text
    assert "running on node[001-016], attempt 2 for 1 h 6 min" in text
    assert text.count("WARNING") == 2
    assert "33.5 % slower" in text
    assert lines[-1].split() == ["29", "2.003", "5", "1.25"]


def test_a_low_terminal_has_fewer_steps(title: WatchedTitle) -> None:
    high, low = (shown(title, seen(30), 80, height) for height in (60, 24))
    assert len(high) > 24 > len(low)
    assert "Last steps" in low
    assert "Last steps" not in shown(title, seen(30), 80, 10)


def test_lines_tell_what_is_new() -> None:
    told: list[str] = []
    view = LineView(told.append)
    queued = Circumstances(state="queued", why="Resources")
    views = [
        seen(0, queued), seen(0, queued), seen(3, replace(RUNNING, limit_left_s=None)),
        seen(3, replace(RUNNING, limit_left_s=None)), seen(30), seen(31), seen(31, replace(RUNNING, state="ended")),
    ]  # fmt: skip
    for one in views:
        view.show(one)
    assert [line.split("  ")[0].split(":")[0] for line in told] == [
        "queued", "step 3/50", "step 30/50", "WARNING", "WARNING", "step 31/50", "step 31/50",
    ]  # fmt: skip
    assert told[0] == "queued: Resources"
    assert told[-1].endswith("ended on node[001-016], attempt 2")


def test_a_warning_that_comes_back_is_told_again() -> None:
    told: list[str] = []
    view = LineView(told.append)
    for since_last_s in (1.0, 60.0, 70.0, 1.0, 60.0):
        view.show(seen(9, replace(RUNNING, limit_left_s=None), since_last_s))
    assert [line.split(",")[0] for line in told[1:]] == ["WARNING: no step for 60 s"] * 2
