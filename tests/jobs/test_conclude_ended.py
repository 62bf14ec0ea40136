# SPDX-License-Identifier: Apache-2.0
"""Conclusions about jobs that could not write their own result."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_steps import step_of
from job_rows import job_row
from quick_order import spec_of

from llmb.base.errors import UsageError
from llmb.jobs.begin import begin
from llmb.jobs.conclude_ended import conclude_job
from llmb.jobs.finish import finish_job
from llmb.jobs.job import Job, Status
from llmb.jobs.refresh import SETTLE_S, look
from llmb.jobs.states import decide, read_folder
from llmb.jobs.store import Store
from llmb.jobs.wait import exit_code
from llmb.launch.jobspec.spec import write_spec
from llmb.launch.programs.conclude import stored_run
from llmb.launch.slurm.job_state import SlurmJob, with_meaning
from llmb.runs.conditions import faults_of
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import queued_record, read_record, write_record
from llmb.runs.result import ERROR_AT_END
from llmb.runs.steps import step_to_json

IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": "1"}


def step_line(number: int) -> str:
    return step_to_json(step_of(number, 0.1, tokens=1, padded_tokens=1024)) + "\n"


@pytest.fixture
def folder(tmp_path: Path, tiny_plan: Callable[..., Plan]) -> RunFolder:
    folder, plan = RunFolder(tmp_path), tiny_plan(steps=5)
    write_record(folder, queued_record(plan, ("sbatch", "x")))
    write_spec(folder, spec_of(plan, tmp_path))
    return folder


def test_a_run_is_queued_then_running_then_ended(folder: RunFolder) -> None:
    assert read_record(folder).status == "queued"
    assert read_record(folder).started_at is None
    folder.job_end.write_text("of an attempt before")
    begin(folder, IN_A_JOB)
    record = read_record(folder)
    assert record.status == "running"
    assert record.started_at
    assert record.job
    assert (record.job.job_id, record.job.nodes, record.job.restarts) == ("7", "node[1-2]", 1)
    assert not folder.job_end.exists()
    folder.steps.write_text("".join(map(step_line, range(5))))
    assert finish_job(folder, 0).status == "success"
    assert read_record(folder).result


def test_a_second_job_does_not_take_a_run_over(folder: RunFolder) -> None:
    begin(folder, IN_A_JOB)
    before = folder.record.read_bytes()
    with pytest.raises(
        UsageError, match=r"job 7 already started this run, and job 8 would write .* the run's status is running"
    ):
        begin(folder, {**IN_A_JOB, "SLURM_JOB_ID": "8"})
    assert folder.record.read_bytes() == before
    begin(folder, {**IN_A_JOB, "SLURM_RESTART_COUNT": "2"})
    finish_job(folder, 1)
    with pytest.raises(UsageError, match=r"job 7 already started this run, .* the run's status is failed"):
        begin(folder, {**IN_A_JOB, "SLURM_JOB_ID": "8"})


def test_a_run_that_is_queued_again_begins_in_a_job_of_another_id(folder: RunFolder) -> None:
    begin(folder, IN_A_JOB)
    write_record(folder, read_record(folder).model_copy(update={"status": "queued"}))
    begin(folder, {**IN_A_JOB, "SLURM_JOB_ID": "8"})
    assert [attempt.job.job_id for attempt in read_record(folder).attempts] == ["7", "8"]


@pytest.mark.parametrize(
    ("state", "marker", "status", "reason"),
    [
        ("NODE_FAIL", None, "failed", "interrupted by Slurm (NODE_FAIL) after 2 of 5 steps"),
        ("CANCELLED", None, "cancelled", "interrupted by Slurm (CANCELLED) after 2 of 5 steps"),
        ("OUT_OF_MEMORY", None, "failed", "interrupted by Slurm (OUT_OF_MEMORY) after 2 of 5 steps"),
        ("LOST", (1, ""), "failed", "the workers ended with exit code 1, after 2 of 5 steps"),
        ("LOST", (143, "TERM"), "failed", "interrupted by Slurm (TERM: cancelled, preempted, or out of time)"),
    ],
)
def test_a_job_that_could_not_conclude_is_concluded(
    folder: RunFolder, state: str, marker: tuple[int, str] | None, status: str, reason: str
) -> None:
    begin(folder, IN_A_JOB)
    folder.steps.write_text("".join(map(step_line, range(2))))
    if marker:
        text = (
            '{"job_id": "7", "restarts": 1, "exit_code": %d, "signal": "%s", "ended_at": "2026-01-01T00:00:00+00:00"}'
        )
        folder.job_end.write_text(text % marker)
    concluded(folder, state, "cancelled" if state == "CANCELLED" else "failed")
    record = read_record(folder)
    assert record.status == status
    assert reason in str(record.reason)
    concluded(folder, "COMPLETED", "success")
    assert read_record(folder) == record, "what is concluded stays"


def test_only_the_scheduler_knows_that_a_signal_was_a_cancellation(folder: RunFolder) -> None:
    begin(folder, IN_A_JOB)
    folder.steps.write_text("".join(map(step_line, range(2))))
    folder.job_end.write_text(
        '{"job_id": "7", "restarts": 1, "exit_code": 143, "signal": "TERM", "ended_at": "2026-01-01T00:00:00+00:00"}'
    )
    assert finish_job(folder, 143, "TERM").status == "failed"
    ended = with_meaning(SlurmJob(job_id="7", state="CANCELLED", restarts=1, ended_s=1000.0))
    row = look(row_of(folder), ended, 1000.0 + SETTLE_S)
    assert row is not None and row.status == "cancelled"
    assert read_record(folder).status == "failed", "states are written, and nothing else"
    with history(row) as store:
        conclude_job(store, row, print)
    record = read_record(folder)
    assert (record.status, record.reason) == ("cancelled", "interrupted by Slurm (CANCELLED) after 2 of 5 steps")


def test_the_mark_of_a_job_that_was_not_let_in_says_nothing_of_the_run(folder: RunFolder) -> None:
    begin(folder, IN_A_JOB)
    mark = '{"job_id": "8", "restarts": 0, "exit_code": 2, "signal": "", "ended_at": "2026-01-01T00:00:00+00:00"}'
    folder.job_end.write_text(mark)
    concluded(folder, "FAILED", "failed", exit_code=9)
    assert "Slurm (FAILED)" in str(read_record(folder).reason)
    assert read_record(folder).exit_code == 9


def concluded(folder: RunFolder, state: str, status: Status, **values: Any) -> Job:
    """The job of the history, which has ended, once its result was asked for."""
    row = replace(row_of(folder), state=state, status=status, **values)
    with history(row) as store:
        return conclude_job(store, row, print)


def history(row: Job) -> Store:
    store = Store(Path(row.run_dir) / "jobs.sqlite", "memory")
    store.add([row])
    return store


def row_of(folder: RunFolder) -> Job:
    return job_row(job_id="7", run_dir=str(folder.path), status="running", restarts=1)


def delete(folder: RunFolder) -> None:
    shutil.rmtree(folder.path)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (delete, "the run folder is gone"),
        (lambda folder: folder.record.unlink(), "run.json is gone"),
        (lambda folder: folder.record.write_text('{"status": "suc'), "run.json cannot be read"),
        (lambda folder: folder.record.write_bytes(b"\xff\xfe"), "run.json cannot be read"),
    ],
)
def test_a_job_without_a_record_of_its_run_is_no_success(
    folder: RunFolder, harm: Callable[[RunFolder], object], said: str
) -> None:
    begin(folder, IN_A_JOB)
    harm(folder)
    ended = with_meaning(SlurmJob(job_id="7", state="COMPLETED", exit_code=0, restarts=1, ended_s=1000.0))
    assert look(row_of(folder), ended, 1001.0) is None, "files of other nodes may be visible later"
    change = look(row_of(folder), ended, 1000.0 + SETTLE_S)
    assert change
    assert (change.status, change.reason) == (
        "invalid",
        f"the job completed, but the result of the run is unknown: {said}",
    )
    assert exit_code([replace(row_of(folder), status=change.status)]) == 6


def test_a_submission_that_was_given_up_has_a_result(folder: RunFolder) -> None:
    given_up = {"status": "failed", "reason": "it never reached Slurm", "exit_code": 3}
    write_record(folder, read_record(folder).model_copy(update=given_up))
    assert stored_run(folder, read_record(folder))[0].reason == "it never reached Slurm"


def test_a_result_that_comes_late_is_awaited(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    begin(folder, IN_A_JOB)
    folder.steps.write_text("".join(map(step_line, range(5))))
    row = row_of(folder)
    ended = with_meaning(SlurmJob(job_id="7", state="COMPLETED", restarts=1, ended_s=1000.0))
    assert look(row, ended, 1001.0) is None, "its own result may not be seen here yet"
    assert read_record(folder).status == "running"
    late = look(row, ended, 1000.0 + SETTLE_S)
    assert late and late.status == "success"
    assert (late.reason, late.step_time_s) == (f"not concluded; run 'llmb result {late.id}'", None)
    assert read_record(folder).status == "running", "states are written, and nothing else"
    with history(late) as store:
        found, said = conclude_job(store, late, print), capsys.readouterr().out
        assert store.jobs() == [found]
    assert (found.status, found.reason, found.step_time_s) == ("success", None, pytest.approx(0.1))
    assert said == f"run {late.id} ended without a result (COMPLETED); concluding it now from its files\n"
    assert read_record(folder).status == "success"


@pytest.mark.parametrize(("state", "code"), [("FAILED", 1), ("OUT_OF_MEMORY", 137), ("TIMEOUT", 143)])
def test_what_ends_a_run_after_its_last_step_is_noted(folder: RunFolder, state: str, code: int) -> None:
    begin(folder, IN_A_JOB)
    folder.steps.write_text("".join(map(step_line, range(5))))
    result = finish_job(folder, code, "TERM" if state == "TIMEOUT" else "")
    assert (result.status, result.reason) == ("success", None)
    assert str(result.note).endswith(", after its last step")
    assert faults_of(read_record(folder), result).get(ERROR_AT_END) == (
        None if state == "TIMEOUT" else (f"exit code {code}",)
    )
    again = stored_run(folder, read_record(folder))[0]
    assert (again.status, again.note) == ("success", result.note)
    left = read_folder(str(folder.path))
    change = decide(
        row_of(folder), with_meaning(SlurmJob(job_id="7", state=state, exit_code=code, restarts=1)), left, 0.0
    )
    assert change.status == "success" and str(change.reason).endswith(", after its last step")
