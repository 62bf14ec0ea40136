# SPDX-License-Identifier: Apache-2.0
"""The window of a run whose rule is ``auto``, from its steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from fake_steps import steps_of
from step_series import step_times

from llmb.base.missing import Missing
from llmb.catalogue.records import Window
from llmb.launch.programs.conclude import EndedRun
from llmb.launch.programs.engine.program import EngineProgram
from llmb.launch.programs.port import End
from llmb.readers.anomalies import NO_STEADY_STATE
from llmb.reports.run_report import run_document, run_table
from llmb.runs.conclusion import RunEvidence, conclude, with_steady_window
from llmb.runs.experiment import create_run_folder
from llmb.runs.plan import Plan
from llmb.runs.record import Attempt, BegunJob, RunRecord, queued_record, with_window
from llmb.runs.steps import Step, step_to_json


def series(times: Sequence[float], first: int = 0) -> list[Step]:
    return [replace(one, step=first + one.step) for one in steps_of([float(time) for time in times])]


def warming_up(count: int, seed: int = 1) -> list[float]:
    times = step_times(count, seed)
    times[:8] *= 1.5
    return [float(time) for time in times]


@pytest.fixture
def record(tiny_plan: Callable[..., Plan]) -> RunRecord:
    return queued_record(tiny_plan(steps=50, window="auto"), ())


def began(record: RunRecord, *first_steps: int) -> RunRecord:
    attempts = [
        Attempt(
            number=number,
            started_at="2026-11-21T10:00:00+00:00",
            job=BegunJob(scheduler="slurm", job_id="1", nodes="n1"),
            first_step=first,
            checkpoint=None,
        )
        for number, first in enumerate(first_steps, 1)
    ]
    return record.model_copy(update={"attempts": tuple(attempts)})


def test_the_plan_has_a_provisional_window(record: RunRecord) -> None:
    window = record.plan.window
    assert (window.first, window.last, window.rule) == (35, 44, "auto")
    assert record.window == window


def test_the_window_is_the_steady_state(record: RunRecord) -> None:
    found, reason = with_steady_window(record, series(warming_up(50)))
    assert reason is None
    assert (found.plan.window.first, found.plan.window.last, found.plan.window.rule) == (8, 49, "auto")


def test_it_is_that_of_the_attempt_with_most_steps(record: RunRecord) -> None:
    steps = series([*warming_up(12), *warming_up(38, 2)])
    found, _ = with_steady_window(began(record, 0, 20, 12), steps)  # the third trained steps 12 to 49
    assert (found.plan.window.first, found.plan.window.last) == (20, 49)


def test_profiled_steps_are_no_change_of_level(record: RunRecord) -> None:
    steps = [replace(one, profiled=20 <= one.step < 25) for one in series(warming_up(50))]
    slowed = [replace(one, step_time_s=40.0) if one.profiled else one for one in steps]
    found, _ = with_steady_window(record, slowed)
    assert (found.plan.window.first, found.plan.window.last) == (8, 49)
    result = conclude(RunEvidence(found.plan, slowed))
    assert result.step_time_s.count == 37
    assert result.step_time_s.max < 11


def test_the_first_step_is_never_in_it(record: RunRecord) -> None:
    found, _ = with_steady_window(record, series(step_times(50, 3)))
    assert found.plan.window.first == 1
    assert conclude(RunEvidence(found.plan, series(step_times(50, 3)))).measurement_reason is None


@pytest.mark.parametrize("times", [[1.0] * 10, [1.2 ** (number // 8) for number in range(50)]])
def test_a_run_that_was_never_steady_has_no_statistics(record: RunRecord, times: list[float]) -> None:
    found, reason = with_steady_window(record, series(times))
    assert found == record
    assert reason == NO_STEADY_STATE


@pytest.mark.parametrize("rule", ["reference", "last", "all", "20-30"])
def test_other_windows_stay(tiny_plan: Callable[..., Plan], rule: str) -> None:
    record = queued_record(tiny_plan(steps=50, window=rule), ())
    assert with_steady_window(record, series(warming_up(50))) == (record, None)


def test_an_attempt_that_resumes_has_a_provisional_window_of_its_own(record: RunRecord) -> None:
    window = with_window(record.plan, 30).window
    assert (window.first, window.last, window.rule) == (44, 47, "auto")


def test_the_result_has_the_window_and_is_shown_with_it(record: RunRecord, tmp_path: Path) -> None:
    folder, times = create_run_folder(tmp_path, record.plan), warming_up(50)
    folder.steps.write_text("".join(f"{step_to_json(one)}\n" for one in series(times)))
    folder.log.write_text("")
    result = EngineProgram().result(folder, record, End(0))
    assert result.step_time_s.mean == pytest.approx(sum(times[8:]) / 42)
    assert run_document(EndedRun(folder, record, result))["window"] == Window(first=8, last=49, rule="auto")
    assert "steps 8-49 of 50" in run_table(record.plan, result).title
    ended = record.model_copy(update={"result": result, "status": "success"})
    assert (ended.window.first, ended.window.last) == (8, 49)
    assert EngineProgram().result(folder, ended, End(0)) == result


def test_the_result_says_why_there_is_no_window(record: RunRecord, tmp_path: Path) -> None:
    folder = create_run_folder(tmp_path, record.plan)
    times = [1.2 ** (number // 8) for number in range(50)]
    folder.steps.write_text("".join(f"{step_to_json(one)}\n" for one in series(times)))
    folder.log.write_text("")
    result = EngineProgram().result(folder, record, End(0))
    assert (result.status, result.step_time_s) == ("success", Missing(NO_STEADY_STATE))
