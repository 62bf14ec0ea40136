# SPDX-License-Identifier: Apache-2.0
"""What Slurm's commands and launch scripts answer, by versions and machines that no test cluster has."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from job_rows import job_row

from llmb.base.errors import EnvironmentProblem, InfrastructureError, LlmbError, UsageError
from llmb.jobs.job import Job
from llmb.jobs.store import Store
from llmb.jobs.submit import resolve_submissions
from llmb.launch.jobspec.spec import JobSpec, Launch, Placement, write_spec
from llmb.launch.scheduler_port import Submission
from llmb.launch.slurm.client import controller_states, submit
from llmb.launch.slurm.job_state import FIELD, RECORD, parse_accounts, parse_queue
from llmb.launch.slurm.launch import call_launch, launch_text, launched_id
from llmb.runs.folder import RunFolder

Program = Callable[[str, str], None]


def job(run_dir: str = "/runs/e/e_1/e", **changes: object) -> Job:
    return job_row("k", job_id="7", run_dir=run_dir, **changes)


def line(*fields: str) -> str:
    return FIELD.join(fields)


def test_texts_of_other_jobs_replace_no_field() -> None:
    """Reasons and submit lines are whatever a user, an administrator or a plugin wrote."""
    path = "/runs/e/e_1/e/sbatch_e.sh"
    forged = "sbatch --comment=JobState=FAILED Reason=forged\n7|FAILED|1:0|n1|forged|1|2|3|sbatch x"
    accounts = line("7", "RUNNING", "0:0", "n1", "Prolog", "1", "2", "Unknown", f"{forged} {path}")
    found = parse_accounts(f"{accounts}\n")
    assert list(found) == ["7"]
    assert (found["7"].state, found["7"].reason) == ("RUNNING", "Prolog")
    reason = "burst_buffer/lua: stage in|failed,\ntry again"
    queue = line("7", "PENDING", "0", "0", reason, "", "1", "2", "3", f"/my|runs{path}") + f"{RECORD}\n"
    (seen,) = parse_queue(queue + queue).values()
    assert (seen.reason, seen.nodes, seen.command) == (reason, None, f"/my|runs{path}")


def test_a_submission_by_a_clock_that_was_ahead_is_not_awaited_until_then(program: Program, tmp_path: Path) -> None:
    program("squeue", "")
    program("sacct", f'echo "$@" >>{tmp_path}/asked')
    now_s = time.time()
    with Store(tmp_path / "jobs.sqlite") as store:
        store.add([replace(job(), job_id=None, submitted_s=now_s + 86_400)])
        (said,) = resolve_submissions(store, tmp_path, "slurm", 10.0)
        assert "interrupted before it reached Slurm" in said
        assert [one.state for one in store.jobs()] == ["NOT_SUBMITTED"]
    since = (tmp_path / "asked").read_text().partition("-S ")[2].split()[0]
    assert datetime.fromisoformat(since).timestamp() < now_s


NO_SOURCE = """\
sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""
NO_FILE = "squeue: error: s_p_parse_file: cannot stat file /nope: No such file or directory, retrying in 1sec"


@pytest.mark.parametrize("said", [NO_SOURCE, "sbatch: fatal: Unable to process configuration file\n"])
def test_a_machine_without_slurms_configuration_is_not_at_fault_of_the_job(
    program: Program, tmp_path: Path, said: str
) -> None:
    program("sbatch", f"echo '{said}' >&2; exit 1")
    with pytest.raises(EnvironmentProblem, match="Slurm has no configuration on this machine") as caught:
        submit(tmp_path / "job.sh", os.environ)
    assert caught.value.exit_code == 3
    assert "SLURM_CONF" in str(caught.value.do)


def test_a_controller_that_is_down_and_has_the_configuration_is_asked_again(program: Program, tmp_path: Path) -> None:
    down = "sbatch: error: _fetch_child: failed to fetch remote configs: Unable to contact slurm controller"
    program("sbatch", f"echo '{down}' >&2; echo '{NO_SOURCE}' >&2; exit 1")
    with pytest.raises(InfrastructureError, match="Slurm does not answer"):
        submit(tmp_path / "job.sh", os.environ)


@pytest.mark.slow
def test_a_command_that_waits_for_its_configuration_says_so(program: Program) -> None:
    """Slurm 22.05 looks for a slurm.conf that is not there for a minute."""
    program("squeue", f"echo '{NO_FILE}' >&2; exec sleep 600")
    with pytest.raises(EnvironmentProblem, match="cannot stat file /nope"):
        controller_states(["1"], time_out_s=5.0)  # on a busy machine a second passes before it says anything


def test_a_command_that_cannot_be_started_is_named(
    program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program("squeue", "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin" / "squeue").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(EnvironmentProblem, match="squeue cannot be started: Exec format error"):
        controller_states(["1"])


@pytest.mark.parametrize("printed", ["", "garbage", "12 13", "9" * 100, "-1"])
def test_what_is_no_id_of_a_job_is_no_success(program: Program, tmp_path: Path, printed: str) -> None:
    program("sbatch", f"echo '{printed}'")
    with pytest.raises(InfrastructureError, match="printed no job id"):
        submit(tmp_path / "script", os.environ)
    program("sbatch", "echo note; echo '4711;cluster'")
    assert submit(tmp_path / "script", os.environ) == ("4711", "cluster")


TOKEN = "hf_" + "a" * 30


def submission(tmp_path: Path, text: str, queued_by: str = "script") -> Submission:
    """Of a launch script with this text; ``sbatch`` is the script itself where the scheduler takes it."""
    folder, place = RunFolder(tmp_path / "run"), tmp_path / "suite"
    folder.path.mkdir()
    place.mkdir()
    (place / "launch.sh").write_text(f"#!/bin/bash\n{text}\n")
    (place / "launch.sh").chmod(0o755)
    launch = Launch(queued_by=queued_by, folder=str(place), script="./launch.sh", logs=(), outputs=())
    spec = JobSpec(
        scheduler="slurm", program="reference_suite", title="", name="run", placement=Placement(1, 8, whole_nodes=True),
        gpus=True, time_limit_min=None, start="torchrun", python="python3", launch=launch, secrets=("HF_TOKEN",),
        log="log.out",
    )  # fmt: skip
    write_spec(folder, spec)
    folder.batch_script.write_text(launch_text(spec, launch, folder))
    return Submission(
        spec=spec, folder=folder, environ={"PATH": "/usr/bin:/bin", "HF_TOKEN": TOKEN, "API_KEY": "x" * 20}
    )


def test_the_id_is_read_and_no_secret_is_kept(tmp_path: Path) -> None:
    job = submission(tmp_path, 'echo "token $HF_TOKEN, key $API_KEY"; echo "- Job id: 4711"')
    assert call_launch(job) == "4711"
    assert job.folder.launch_output.read_text() == "token [secret], key \n- Job id: 4711\n"
    assert launched_id(job.folder) == "4711"
    assert TOKEN not in job.folder.batch_script.read_text()


def test_a_job_that_was_queued_before_the_script_failed_is_not_lost(tmp_path: Path) -> None:
    assert call_launch(submission(tmp_path, 'echo "- Job id: 12"; exit 1')) == "12"


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("echo no such module >&2; exit 3", UsageError, "code 3 without printing a job id:\n  no such module"),
        ("echo 'sbatch: error: Invalid account' >&2; exit 1", UsageError, "Slurm rejected the job: Invalid account"),
        ("echo all good", InfrastructureError, "ended without printing a job id"),
        ("echo 'sbatch: error: Unable to contact slurm controller'; exit 1", InfrastructureError, "does not answer"),
    ],
)
def test_why_there_is_no_id(tmp_path: Path, text: str, error: type[LlmbError], said: str) -> None:
    with pytest.raises(error) as raised:
        call_launch(submission(tmp_path, text))
    assert said in raised.value.what


def test_a_folder_that_cannot_be_written_is_named_and_the_script_is_not_called(tmp_path: Path) -> None:
    job = submission(tmp_path, f"touch {tmp_path}/called; echo '- Job id: 5'")
    job.folder.batch_script.rename(tmp_path / "moved")
    job.folder.job_spec.unlink()
    job.folder.path.rmdir()
    with pytest.raises(EnvironmentProblem, match="cannot write: No such file or directory"):
        call_launch(job)
    assert not (tmp_path / "called").exists()
