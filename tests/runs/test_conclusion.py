# SPDX-License-Identifier: Apache-2.0
"""What is concluded from what a run left behind."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from fake_steps import steps_of

from llmb.readers.samples.sample_records import NodeOtherWork, OtherRun, OtherWork
from llmb.reports.run_report import add_other_runs, run_table
from llmb.runs.conclusion import RunEvidence, conclude
from llmb.runs.plan import Plan, Start
from llmb.runs.result import Loss
from llmb.runs.steps import Step

NAN = float("nan")


def steps(times: Sequence[float], **last: float) -> list[Step]:
    """``last`` are values of the last step."""
    made = [replace(step, peak_memory_bytes=step.step * 2**20, loss=step.loss - 4) for step in steps_of(times)]
    return [*made[:-1], *(replace(step, **last) for step in made[-1:])]


@pytest.mark.parametrize(
    ("options", "resumes", "reason"),
    [
        (
            {"steps": 1},
            True,
            "the only step is the first one, which includes warm-up; it shows that the checkpoint loads",
        ),
        ({"steps": 1}, False, "the only step is the first one, which includes warm-up"),
        ({"steps": 5, "window": "all"}, False, "the window includes the first step, which includes warm-up"),
        ({"steps": 5}, False, None),
        ({"steps": 2}, True, None),
    ],
)
def test_a_first_step_is_no_measurement(
    tiny_plan: Callable[..., Plan], options: dict[str, object], resumes: bool, reason: str | None
) -> None:
    plan = tiny_plan(**options)
    if resumes:
        plan = plan.model_copy(update={"start": Start(path="/saved", step=0, consumed_samples=0)})
    result = conclude(RunEvidence(plan, steps([0.5] * plan.steps)))
    assert result.step_time_s
    assert result.measurement_reason == reason
    assert result.document()["measurement_reason"] == reason
    row = ("NOT A MEASUREMENT", "", reason)
    assert (run_table(plan, result).rows[0] == row) == (reason is not None)
    failed = conclude(RunEvidence(plan, steps([0.5] * (plan.steps - 1)), 1, ""))
    assert failed.measurement_reason is None


def test_a_brief_table_has_ten_rows_and_no_table_has_names_of_other_programs(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan()
    busy = NodeOtherWork.model_construct(
        node="n1", runs=(OtherRun(program="llmb.x", folder="/b/c", pid=7, since_s=None),)
    )
    work = OtherWork.model_construct(disturbing=("another run",), nodes=(busy,))
    result = conclude(RunEvidence(plan, steps([0.5] * plan.steps))).model_copy(update={"other_work": work})
    full, brief = run_table(plan, result), run_table(plan, result, answer="0.5 s a step", brief=True)
    assert {row[0] for row in brief.rows} < {row[0] for row in full.rows} and len(brief.rows) <= 10 < len(full.rows)
    assert brief.title.startswith("0.5 s a step\n")
    assert not any("llmb.x" in cell for row in full.rows for cell in row)
    add_other_runs(full, result)
    assert full.rows[-1][-1] == "llmb.x in .../b, on n1"


@pytest.mark.parametrize("spoiled", [{}, {"loss": NAN}, {"grad_norm": NAN}])
def test_spoiled_and_skipped_steps_are_counted(tiny_plan: Callable[..., Plan], spoiled: dict[str, float]) -> None:
    made = steps([1.0] * 13, **spoiled)
    made[3] = replace(made[3], updated=False)
    counters = conclude(RunEvidence(tiny_plan(), made)).document()["counters"]
    assert counters == {"non_finite_steps": len(spoiled), "skipped_steps": 1}


def test_what_was_not_counted_is_not_zero(tiny_plan: Callable[..., Plan]) -> None:
    assert conclude(RunEvidence(tiny_plan(), [], 1, "")).document()["counters"] is None


def test_statistics_are_taken_over_the_window_alone(tiny_plan: Callable[..., Plan]) -> None:
    times = [100.0] * 35 + [1.0, 2.0] * 5 + [100.0] * 5
    result = conclude(RunEvidence(tiny_plan(), steps(times)))
    assert result.status == "success"
    assert result.step_time_s
    assert (result.step_time_s.count, result.step_time_s.mean, result.step_time_s.median) == (10, 1.5, 1.5)
    assert result.step_time_s.std == pytest.approx(0.52705, abs=1e-5)
    assert result.tokens_per_s == 1024 / 1.5
    assert result.loss == Loss(first=6.0, last=6.0 - 0.49)
    assert result.peak_memory_gib == 49 / 1024


@pytest.mark.parametrize("spoiled", [{"loss": NAN}, {"loss": float("inf")}, {"grad_norm": NAN}])
def test_a_value_that_is_not_finite_makes_a_run_invalid(
    tiny_plan: Callable[..., Plan], spoiled: dict[str, float]
) -> None:
    result = conclude(RunEvidence(tiny_plan(), steps([1.0] * 13, **spoiled)))
    assert result.status == "invalid"
    assert result.reason is not None
    assert "step 12" in result.reason
    assert not result.step_time_s
    json.dumps(result.document(), allow_nan=False)


@pytest.mark.parametrize(
    ("count", "exit_code", "interrupted", "said"),
    [
        (20, 1, None, "exit code 1, after 20 of 50 steps"),
        (20, 0, None, "ended after 20 of 50 steps"),
        (0, 1, None, "after 0 of 50 steps"),
        (20, 130, "SIGINT", "interrupted by SIGINT after 20 of 50 steps"),
    ],
)
def test_a_run_that_did_not_reach_its_end_failed(
    tiny_plan: Callable[..., Plan], count: int, exit_code: int, interrupted: str | None, said: str
) -> None:
    result = conclude(RunEvidence(tiny_plan(), steps([1.0] * count), exit_code, "", interrupted))
    assert result.status == "failed"
    assert said in str(result.reason)
    assert not result.step_time_s
    assert result.document()["tokens_per_s"] is None
