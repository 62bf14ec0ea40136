# SPDX-License-Identifier: Apache-2.0
"""The call of a program's own script that queues a job: the id that came of it, or why there is none."""

from pathlib import Path

import pytest

from llmb.errors import EnvironmentProblem, InfrastructureError, LlmbError, UsageError
from llmb.jobspec.spec import JobSpec, Launch, Placement, write_spec
from llmb.runs.folder import RunFolder
from llmb.schedulers.port import Submission
from llmb.schedulers.slurm.launch import call_launch, launch_text, launched_id

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
        (
            "echo no such module >&2; exit 3",
            UsageError,
            "ended with exit code 3, and queued nothing:\n  no such module",
        ),
        ("echo 'sbatch: error: Invalid account' >&2; exit 1", UsageError, "Slurm rejected the job: Invalid account"),
        ("echo all good", InfrastructureError, "ended without the id of a job"),
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
