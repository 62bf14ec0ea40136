# SPDX-License-Identifier: Apache-2.0
"""The pace of a run, the time left, and whether it is as expected."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_steps import steps_of
from timed_runs import write_run

from llmb.cli import jobs
from llmb.cli.jobs import lines_of
from llmb.jobs.follow import job_of_folder
from llmb.jobs.pace import Expected, WatchedRun, compare_with, find_pace
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record, write_record
from llmb.runs.steps import StepNews, step_to_json

EXPECTED = Expected(step_time_s=2.0, source="as given", tolerance_pct=3.0)


def news(*times_s: float, profiled: int = -1) -> list[StepNews]:
    return [StepNews(step, time, 5.0, profiled=step == profiled) for step, time in enumerate(times_s)]


def test_the_pace_is_that_of_the_last_steps() -> None:
    pace = find_pace(news(9.0, *30 * [2.0], *20 * [3.0]))
    assert pace and (pace.first_step, pace.last_step, pace.step_time_s.median) == (31, 50, 3.0)


@pytest.mark.parametrize(
    ("steps", "median_s"),
    [
        (news(9.0), 9.0),
        (news(9.0, 2.0, 5.0, 2.0, profiled=2), 2.0),
        (news(9.0, 2.0, math.nan), 2.0),
        (news(math.nan), None),
        ([], None),
    ],
    ids=["one step", "without a profiled one", "without a time", "no time", "no step"],
)
def test_steps_whose_time_does_not_count(steps: list[StepNews], median_s: float | None) -> None:
    pace = find_pace(steps)
    assert (pace and pace.step_time_s.median) == median_s


@pytest.mark.parametrize(
    ("count", "step_s", "standing"),
    [(10, 2.5, "too early"), (11, 2.5, "slower"), (11, 2.05, "as expected"), (11, 1.5, "faster")],
)
def test_how_the_pace_stands_to_what_was_expected(count: int, step_s: float, standing: str) -> None:
    assert compare_with(EXPECTED, find_pace(news(*count * [step_s]))).standing == standing


@pytest.fixture
def running(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> tuple[RunFolder, Callable[[int, float], None]]:
    """A run without any step yet, and what adds steps to it."""
    plan = tiny_plan(steps=50)
    folder = write_run(tmp_path, plan, 50 * [1.0])
    write_record(folder, read_record(folder).model_copy(update={"status": "running"}))
    folder.steps.write_text("")

    def add(until: int, step_s: float) -> None:
        done = folder.steps.read_text().count("\n")
        with folder.steps.open("a") as stream:
            stream.writelines(f"{step_to_json(step)}\n" for step in steps_of(50 * [step_s], plan)[done:until])

    return folder, add


def test_the_time_left(running: tuple[RunFolder, Callable[[int, float], None]]) -> None:
    folder, add = running
    run, job = WatchedRun(folder, None), job_of_folder(folder)
    assert run.look(job, folder.steps.stat().st_mtime).state == "starting"
    add(20, 2.0)
    written_s = folder.steps.stat().st_mtime
    seen = run.look(job, written_s + 7)
    assert (seen.state, seen.done, seen.total, seen.since_last_s) == ("running", 20, 50, pytest.approx(7))
    assert seen.remaining_s == pytest.approx(30 * 2.0 - 7)
    assert run.look(job, written_s + 100).remaining_s == 0


def test_one_line_when_the_pace_leaves_what_was_expected(
    running: tuple[RunFolder, Callable[[int, float], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, add = running
    said: list[str] = []
    monkeypatch.setattr(jobs, "say", said.append)
    lines, job = lines_of(job_of_folder(folder), 2.0), job_of_folder(folder)
    for until, step_s in ((15, 2.0), (35, 2.2), (36, 2.2), (50, 2.0)):
        add(until, step_s)
        lines.look(job)
    assert said[0].startswith("step 15/50  2 s  loss")
    assert [line for line in said if "WARNING" in line] == [
        "WARNING: steps take 10.0 % longer than expected (2 s, as given)"
    ]
