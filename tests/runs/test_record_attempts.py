# SPDX-License-Identifier: Apache-2.0
"""What a run keeps when its job is started again, and what is left to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from quick_order import step

from llmb import __version__
from llmb.base.errors import InfrastructureError
from llmb.base.missing import Missing
from llmb.launch.programs.conclude import finish_run
from llmb.launch.programs.engine.program import has_last_checkpoint
from llmb.launch.programs.port import End
from llmb.runs.checkpoints.checkpoint import CheckpointRecord, checkpoint_name
from llmb.runs.experiment import create_run_folder
from llmb.runs.failure import failed_host, failure_line, first_failure
from llmb.runs.folder import RunFolder, latest_attempt, tail
from llmb.runs.plan import Plan
from llmb.runs.record import BegunJob, JobEnd, attempt_plan, begin_attempt, queued_record, read_record
from llmb.runs.steps import read_steps, step_to_json


@pytest.fixture
def plan(tiny_plan: Callable[..., Plan]) -> Plan:
    return tiny_plan(steps=50, checkpoint_interval=10)


@pytest.fixture
def folder(tmp_path: Path, plan: Plan) -> RunFolder:
    return create_run_folder(tmp_path, plan)


def save(folder: RunFolder, plan: Plan, number: int) -> Path:
    """A whole checkpoint after so many steps."""
    path = folder.checkpoints / checkpoint_name(number, number * 8)
    (path / "weights").mkdir(parents=True)
    (path / "weights" / "x").write_bytes(b"1")
    recipe = plan.recipe
    record = CheckpointRecord(
        llmb_version=__version__,
        saved_at="",
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        model=recipe.model,
        layout=recipe.layout,
        training=recipe.training,
        seed=plan.seed,
        step=number,
        consumed_samples=number * 8,
        files={"weights/x": 1},
        crc32={"weights/x": "83dcefb7"},
    )
    (path / "checkpoint.json").write_text(record.model_dump_json())
    return path


def train(folder: RunFolder, *numbers: int) -> None:
    with folder.steps.open("a") as stream:
        stream.writelines(f"{step_to_json(step(number))}\n" for number in numbers)


def job(job_id: str = "7", restarts: int = 0, nodes: str = "n1") -> BegunJob:
    return BegunJob(scheduler="slurm", job_id=job_id, nodes=nodes, restarts=restarts)


def test_the_first_start_leaves_the_plan_as_it_is(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    assert read_record(folder) == record
    assert (record.status, [one.number for one in record.attempts]) == ("running", [1])
    assert attempt_plan(record) == record.plan == plan
    assert not folder.log.exists()


def test_the_next_start_goes_on_from_the_last_whole_checkpoint(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(25))
    save(folder, plan, 10)
    path = save(folder, plan, 20)
    save(folder, plan, 30).joinpath("weights", "x").unlink()
    end = JobEnd(job_id="7", restarts=0, exit_code=143, signal="TERM", ended_at="2026-11-21T10:00:00+00:00")
    folder.job_end.write_text(end.model_dump_json())
    folder.log.write_text("Training epoch 0, iteration 24/49\n")
    record = begin_attempt(folder, record, job(restarts=1, nodes="n2"))
    assert [one.step for one in read_steps(folder.steps)] == list(range(20))
    assert [one.step for one in read_steps(folder.steps_of_attempt(1))] == list(range(25))
    first, second = record.attempts
    assert (first.job.nodes, first.exit_code, first.signal, first.ended_at) == ("n1", 143, "TERM", end.ended_at)
    assert (second.job.nodes, second.first_step, second.checkpoint) == ("n2", 20, str(path))
    assert not folder.job_end.exists()
    assert folder.log.read_text().splitlines()[-1] == f"llmb: attempt 2 begins at step 20 on n2, from {path}"
    left = attempt_plan(record)
    assert (left.first_step, left.last_step, left.steps) == (20, 49, 30)
    assert left.samples_before(21) == plan.samples_before(21)
    assert (left.start is None, left.origin) == (False, plan.origin)
    # 70 % to 90 % of the thirty steps that one attempt does, as for a run that goes on from a checkpoint.
    assert (record.plan.window.first, record.plan.window.last) == (41, 46)
    train(folder, *range(20, 50))
    result = finish_run(folder, record, End(0))
    assert (result.status, result.reason, result.steps) == ("success", None, 50)
    assert result.step_time_s


def test_a_start_that_is_itself_interrupted_loses_nothing(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(25))
    save(folder, plan, 20)
    for _ in range(2):
        begin_attempt(folder, record, job(restarts=1))
    assert len(read_steps(folder.steps)) == 20
    assert len(read_steps(folder.steps_of_attempt(1))) == 25


def test_without_a_checkpoint_it_begins_anew(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, 0, 1, 2)
    record = begin_attempt(folder, record, job(restarts=1))
    assert read_steps(folder.steps) == []
    assert attempt_plan(record) == plan == record.plan
    assert "no checkpoint was saved before" in folder.log.read_text()


def test_nothing_is_left_where_the_last_checkpoint_was_saved(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(50))
    assert not has_last_checkpoint(folder, plan)
    save(folder, plan, 50)
    assert has_last_checkpoint(folder, plan)
    record = begin_attempt(folder, record, job(restarts=1))
    assert attempt_plan(record).steps == 0
    assert record.plan.window == plan.window
    assert finish_run(folder, record, End(143, "Slurm (TERM)")).status == "success"


def test_what_ends_a_run_before_its_end_is_its_reason(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, 0, 1, 2)
    result = finish_run(folder, record, End(143, "Slurm (TERM)"))
    assert (result.status, result.reason) == ("failed", "interrupted by Slurm (TERM) after 3 of 50 steps")


def test_a_window_that_a_restart_cut_has_no_statistics(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(steps=50, checkpoint_interval=10, window="35-44")
    folder = create_run_folder(tmp_path, plan)
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(42))
    save(folder, plan, 40)
    record = begin_attempt(folder, record, job(restarts=1))
    train(folder, *range(40, 50))
    result = finish_run(folder, record, End(0))
    assert result.status == "success"
    assert result.step_time_s == Missing("attempt 2 began at step 40, in the window 35-44")


@pytest.mark.parametrize(("saved", "is_measurement"), [(40, False), (30, True)])
def test_a_window_that_begins_with_an_attempt_is_no_measurement(
    tmp_path: Path, tiny_plan: Callable[..., Plan], saved: int, *, is_measurement: bool
) -> None:
    plan = tiny_plan(steps=50, checkpoint_interval=10, window="40-44")
    folder = create_run_folder(tmp_path, plan)
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(42))
    save(folder, plan, saved)
    record = begin_attempt(folder, record, job(restarts=1))
    train(folder, *range(saved, 50))
    result = finish_run(folder, record, End(0))
    assert result.step_time_s
    reason = None if is_measurement else "the window includes the first step of an attempt, which includes warm-up"
    assert result.measurement_reason == reason


def test_a_restart_after_the_window_leaves_it(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    train(folder, *range(48))
    save(folder, plan, 48)
    record = begin_attempt(folder, record, job(restarts=1))
    assert record.plan.window == plan.window


def test_a_run_is_started_as_often_as_it_may_be(folder: RunFolder, plan: Plan) -> None:
    record = queued_record(plan, (), retries=2)
    for number in range(3):
        record = begin_attempt(folder, record, job(restarts=number))
    with pytest.raises(InfrastructureError, match="was started 3 times, and its number of retries is limited to 2"):
        begin_attempt(folder, record, job(restarts=3))
    assert len(read_record(folder).attempts) == 3


def test_only_the_latest_attempt_tells_why_a_run_failed(folder: RunFolder, plan: Plan) -> None:
    record = begin_attempt(folder, queued_record(plan, ()), job())
    folder.log.write_text(failure_line(3, "n3", ValueError("old")) + "\n")
    begin_attempt(folder, record, job(restarts=1))
    assert first_failure(tail(folder.log)) is None
    with folder.log.open("a") as log:
        log.write(failure_line(1, "n1", ValueError("new")) + "\n")
    assert first_failure(tail(folder.log)) == "rank 1 on n1 failed: ValueError: new"
    assert latest_attempt("no attempt\n") == "no attempt\n"


@pytest.mark.parametrize(
    ("log", "host"),
    [
        (failure_line(1, "node-7.cluster", ValueError("x")), "node-7.cluster"),
        ("llmb: stall: rank 2 on node17 stopped responding at step 7; ranks 0, 1 wait in all_gather", "node17"),
        ("srun: error: node2: task 1: Killed", "node2"),
        (failure_line(1, "node7", RuntimeError("Connection closed by peer")), None),
        ("Training epoch 0, iteration 24/49", None),
    ],
)
def test_the_node_of_the_first_failure(log: str, host: str | None) -> None:
    assert failed_host(f"{log}\n") == host
