# SPDX-License-Identifier: Apache-2.0
"""States of jobs: every state of Slurm, with and without the files that the job left in its folder."""

from dataclasses import replace

import pytest
from job_rows import job_row

from llmb.jobs.job import Job
from llmb.jobs.refresh import look
from llmb.jobs.states import FolderState, decide, job_states
from llmb.launch.scheduler_port import UNKNOWN as UNKNOWN_WORD
from llmb.launch.scheduler_port import JobState
from llmb.launch.slurm.job_state import SlurmJob, with_meaning
from llmb.launch.slurm.scheduler import accounted, is_same
from llmb.runs.record import JobEnd

NOW = 1000.0
JOB = job_row("k", job_id="7", state="RUNNING", status="running", nodes="n[1-2]")
NOTHING = FolderState()
HALF = FolderState(begun=True, run_status="running", steps=5, planned=10)
WHOLE = FolderState(begun=True, run_status="success", steps=10, planned=10, complete=True)
OVER = ("TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE", "BOOT_FAIL", "CANCELLED")


def marked(folder: FolderState, exit_code: int, signal: str = "", job_id: str = "7", **values: object) -> FolderState:
    """As the batch script has marked its end."""
    end = JobEnd(job_id=job_id, restarts=0, exit_code=exit_code, signal=signal, ended_at="2026-01-01T00:00:00+00:00")
    return replace(folder, end=end, **values)


def seen(state: str, **values: object) -> JobState:
    return with_meaning(SlurmJob(job_id="7", state=state, nodes="n[1-2]", started_s=10.0, ended_s=20.0, **values))


def found(state: JobState, left: FolderState = NOTHING, job: Job = JOB) -> Job:
    return decide(job, state, left, NOW)


@pytest.mark.parametrize(
    ("state", "status"),
    [
        ("PENDING", "queued"),
        ("CONFIGURING", "queued"),
        ("REQUEUED", "queued"),
        ("REQUEUE_HOLD", "queued"),
        ("RUNNING", "running"),
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("STOPPED", "running"),
        ("EXPEDITING", "running"),
        ("A_STATE_OF_A_LATER_SLURM", "running"),
        ("?", "running"),
    ],
)
def test_jobs_that_live(state: str, status: str) -> None:
    change = found(seen(state))
    assert (change.state, change.status) == (state, status)
    assert change.ended_s is None


def test_a_state_that_is_not_known_decides_nothing_and_is_asked_again() -> None:
    new = seen("A_STATE_OF_A_LATER_SLURM", exit_code=0, signal=15)
    change = found(new, WHOLE, replace(JOB, status="queued"))
    assert (change.status, change.exit_code, change.signal) == ("queued", None, None)
    assert change.reason == (
        "Slurm reports A_STATE_OF_A_LATER_SLURM, a state that this version of llmb does not know; querying again"
    )
    assert look(JOB, new, NOW) == found(new), "no file decides it either"
    assert look(replace(JOB, status="success"), new, NOW) is None
    (told_again,) = [SlurmJob(job_id="7", state="A_STATE_OF_A_LATER_SLURM", command=None)]
    assert accounted(JOB, {"7": told_again}).end_pending


def test_every_state_that_slurm_documents_is_known() -> None:
    """Those of squeue(1) of Slurm 25.11."""
    flags = ("COMPLETING CONFIGURING EXPEDITING LAUNCH_FAILED POWER_UP_NODE RECONFIG_FAIL REQUEUED REQUEUE_FED "
             "REQUEUE_HOLD RESIZING RESV_DEL_HOLD REVOKED SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED")  # fmt: skip
    states = ("BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PENDING PREEMPTED RUNNING "
              "SUSPENDED TIMEOUT")  # fmt: skip
    assert [state for state in f"{flags} {states}".split() if seen(state).phase == "unrecognized"] == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Resources", "the nodes are busy (Resources)"),
        ("DependencyNeverSatisfied", "will never start; cancel it (DependencyNeverSatisfied)"),
        ("ReqNodeNotAvail, UnavailableNodes:node2", "is not available (ReqNodeNotAvail, UnavailableNodes:node2)"),
        ("QOSMaxJobsPerUserLimit", "QOSMaxJobsPerUserLimit"),
        ("launch_failed_requeued_held", "run 'scontrol release' to release the job (launch_failed_requeued_held)"),
        ("launch failed requeued held", "run 'scontrol release' to release the job (launch failed requeued held)"),
        ("job_requeued_in_held_state", "run 'scontrol release' to release it (job_requeued_in_held_state)"),
        ("JobHoldMaxRequeue", "run 'scontrol release' to release it (JobHoldMaxRequeue)"),
        ("BadConstraints", "it will never start; cancel it (BadConstraints)"),
    ],
)
def test_why_a_job_waits(reason: str, said: str) -> None:
    assert str(found(seen("PENDING", reason=reason)).reason).endswith(said)


def test_a_job_that_was_put_back_waits_with_its_restarts() -> None:
    change = found(seen("PENDING", reason="BeginTime", restarts=1), HALF)
    assert (change.status, change.restarts) == ("queued", 1)
    assert change.reason == "starts again (restart 1): may not start yet (BeginTime)"


def test_restarts_never_fall() -> None:
    assert found(seen("RUNNING", restarts=0), job=replace(JOB, restarts=2)).restarts == 2


@pytest.mark.parametrize("state", OVER)
def test_an_end_from_outside_takes_nothing_from_a_run_that_was_through(state: str) -> None:
    change = found(seen(state, exit_code=0, signal=15), WHOLE)
    assert (change.state, change.status, change.signal) == (state, "success", 15)
    assert str(change.reason).endswith(", after its last step")


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("TIMEOUT", "failed", "ended at its time limit, after 5 of 10 steps"),
        ("DEADLINE", "failed", "ended at its deadline, after 5 of 10 steps"),
        ("NODE_FAIL", "failed", "a node failed (n[1-2]), after 5 of 10 steps"),
        ("BOOT_FAIL", "failed", "a node could not be booted (n[1-2]), after 5 of 10 steps"),
        ("PREEMPTED", "failed", "preempted by another job, after 5 of 10 steps"),
        ("OUT_OF_MEMORY", "failed", "ended by the kernel: out of host memory (n[1-2]), after 5 of 10 steps"),
        ("CANCELLED", "cancelled", "cancelled, after 5 of 10 steps"),
        ("REVOKED", "cancelled", "revoked: another cluster runs it, after 5 of 10 steps"),
    ],
)
def test_an_end_before_the_last_step(state: str, status: str, reason: str) -> None:
    change = found(seen(state), HALF)
    assert (change.state, change.status, change.reason, change.ended_s) == (state, status, reason, 20.0)


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "FAILED"])
def test_an_error_after_the_last_step_is_noted(state: str) -> None:
    change = found(seen(state), WHOLE)
    assert change.status == "success" and str(change.reason).endswith(", after its last step")


def test_who_cancelled_is_said_where_the_accounts_know() -> None:
    assert found(seen("CANCELLED", cancelled_by="0")).reason == "cancelled by user 0"
    assert found(seen("CANCELLED")).reason == "cancelled"


def test_a_completed_job_is_what_its_run_is() -> None:
    done = seen("COMPLETED", exit_code=0)
    assert (found(done, WHOLE).status, found(done, WHOLE).reason) == ("success", None)
    lost = replace(NOTHING, unread="the run folder is gone")
    assert (found(done, lost).status, found(done, lost).reason) == (
        "invalid",
        "the job completed, but the result of the run is unknown: the run folder is gone",
    )
    spoiled = replace(WHOLE, run_status="invalid", run_reason="step 3: loss nan")
    assert (found(done, spoiled).status, found(done, spoiled).reason) == ("invalid", "step 3: loss nan")
    failed = replace(HALF, run_status="failed", run_reason="the workers ended after 5 of 10 steps")
    assert (found(done, failed).status, found(done, failed).reason) == ("failed", failed.run_reason)
    assert found(done, HALF).reason == "the job completed, but the run did not, after 5 of 10 steps"


def test_a_failed_job_says_what_its_run_says_of_itself() -> None:
    said = marked(HALF, 1, run_status="failed", run_reason="rank 1 on n2 failed: ValueError")
    assert found(seen("FAILED", exit_code=1), said).reason == "rank 1 on n2 failed: ValueError"
    assert found(seen("FAILED", exit_code=1, restarts=1), said).reason == (
        "the batch script ended with exit code 1, after 5 of 10 steps"
    ), "that was the attempt before"
    unmarked = replace(HALF, run_status="failed", run_reason="rank 1 on n2 failed: ValueError", run_of=("7", 0))
    assert found(seen("FAILED", exit_code=1), unmarked).reason == "rank 1 on n2 failed: ValueError"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"exit_code": 3, "reason": "NonZeroExitCode"}, "the batch script ended with exit code 3"),
        ({"exit_code": 0, "signal": 9}, "the batch script was killed or could not be started (signal 9)"),
        ({"reason": "JobLaunchFailure"}, "the batch script was killed or could not be started (JobLaunchFailure)"),
        ({"reason": "something else"}, "failed (something else)"),
    ],
)
def test_a_failed_job_whose_run_says_nothing(values: dict[str, object], said: str) -> None:
    assert found(seen("FAILED", **values)).reason == said


UNKNOWN = JobState(job_id="7")


@pytest.mark.parametrize(
    ("left", "state", "status", "said"),
    [
        (marked(WHOLE, 0), "COMPLETED", "success", None),
        (marked(HALF, 0), "COMPLETED", "failed", "the run did not, after 5 of 10 steps"),
        (marked(HALF, 1), "FAILED", "failed", "exit code 1, after 5 of 10 steps"),
        (marked(HALF, 1, run_status="failed", run_reason="rank 1 failed"), "FAILED", "failed", "rank 1 failed"),
        (marked(HALF, 143, "TERM"), "LOST", "failed", "ended by TERM, after 5 of 10 steps"),
        (marked(WHOLE, 143, "TERM"), "LOST", "success", "TERM, after its last step"),
        (marked(WHOLE, 0, run_status="invalid", run_reason="nan"), "COMPLETED", "invalid", "nan"),
        (WHOLE, "LOST", "success", "every step is done"),
        (HALF, "LOST", "failed", "did not record its end: killed, or lost with its node, after 5 of 10 steps"),
        (NOTHING, "LOST", "failed", "never started: most likely cancelled while it was pending"),
    ],
)
def test_a_job_that_slurm_has_forgotten(left: FolderState, state: str, status: str, said: str | None) -> None:
    change = found(UNKNOWN, left)
    assert (change.state, change.status, change.nodes) == (state, status, "n[1-2]")
    assert change.reason is None if said is None else said in str(change.reason)


def test_the_mark_of_an_earlier_start_or_another_job_does_not_count() -> None:
    old = marked(HALF, 0)
    assert found(UNKNOWN, old, replace(JOB, restarts=1)).state == "LOST"
    assert found(UNKNOWN, marked(HALF, 0, job_id="8")).state == "LOST"


@pytest.mark.parametrize("state", sorted(job_states() - {UNKNOWN_WORD}))
def test_every_state_has_an_answer(state: str) -> None:
    for left in (NOTHING, HALF, WHOLE):
        change = found(seen(state), left)
        assert change.state == state
        assert change.checked_s == NOW
        assert change.status in ("queued", "running", "success") or change.reason


@pytest.mark.parametrize(
    ("command", "name", "same"),
    [
        ("/my runs/e/e_1/e/sbatch_e.sh", "e_1", True),
        ("sbatch --parsable --exclude=n1 /my runs/e/e_1/e/sbatch_e.sh", "e_1", True),
        ("/my runs/e/e_1/e/sbatch_e.sh", "e_17", False),
        ("/elsewhere/e/e_1/e/sbatch_e.sh", "e_1", False),
        ("/home/x/job.sh", "e_1", False),
        (None, "e_1", True),
    ],
)
def test_a_job_id_that_slurm_gave_again_is_noticed(command: str | None, name: str, same: bool) -> None:
    job = replace(JOB, run_dir=f"/my runs/e/{name}/e")
    assert is_same(job, SlurmJob(job_id="7", state="RUNNING", command=command)) is same
