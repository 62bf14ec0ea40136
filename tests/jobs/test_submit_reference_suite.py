# SPDX-License-Identifier: Apache-2.0
"""Runs of the reference suite's own launch scripts, on a real Slurm and with the real NeMo-Run.

With a clone of the suite the scripts are those of each tag; without one, scripts of the same form.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from slurm_client import Client, ended, wait_until
from small_suite import AS_RELEASED, SmallSuite, nemo1_lines, nemo_lines, small_suite

from llmb.base.secrets import without_secrets
from llmb.jobs.history import open_history
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
SETTINGS = "gpu_type: h100\nslurm: {account: research, partition: gpu, gpu_request: none}\n"
# Workload, size, release, scale, the lines of a run as published, and what the document's launch line sets.
LAUNCHES = {
    "24.11": (
        "pretrain_llama3.1", "405b", 32, nemo1_lines([9.0] * 50),
        {"STAGE_PATH": "", "MODEL_SIZE": "405b", "DTYPE": "bf16"},
    ),
    "25.04": (
        "pretrain_llama3.1", "8b", 8, nemo_lines([12.27] * 50),
        {"STAGE_PATH": "", "MODEL_SIZE": "8b", "DTYPE": "bf16", "JOB_TOTAL_GPUS": "8", "GPUS_PER_NODE": "8"},
    ),
    "25.04 nemotron": (
        "pretrain_nemotron4", "15b", 16, nemo_lines([2.66] * 50, gbs=64),
        {"STAGE_PATH": "", "MODEL_SIZE": "15b", "DTYPE": "bf16", "JOB_TOTAL_GPUS": "16", "GPUS_PER_NODE": "8"},
    ),
    "25.07": (
        "finetune_llama4-maverick", "400b", 256, nemo_lines([0.297] * 50, gbs=32),
        {"LLMB_INSTALL": "", "MODEL_SIZE": "400b", "DTYPE": "bf16", "JOB_TOTAL_GPUS": "256", "GPU_TYPE": "h100"},
    ),
    "25.12": (
        "finetune_llama3", "70b", 8, nemo_lines([7.0] * 50, gbs=32),
        {"LLMB_INSTALL": "", "MODEL_SIZE": "70b", "DTYPE": "bf16", "JOB_TOTAL_GPUS": "8", "GPU_TYPE": "h100"},
    ),
}  # fmt: skip
AS_PUBLISHED = ("24.11", "25.04", "25.04 nemotron", "25.07")
CASES = [
    ("24.11", "of the same form"),
    ("25.04", "of the same form"),
    *(pytest.param(launch, "as released", marks=AS_RELEASED) for launch in LAUNCHES),
]


@pytest.fixture
def suite(shell: Client, tmp_path: Path) -> Callable[..., SmallSuite]:
    (shell.install / "cluster_config.yaml").write_text(SETTINGS)

    def made(launch: str, source: str = "of the same form") -> SmallSuite:
        workload, size, *_ = LAUNCHES[launch]
        path = shell.cluster.environ["PATH"]
        real, release = source == "as released", launch.split()[0]
        return small_suite(tmp_path, shell.install, (workload, size, release), path, real=real)

    return made


def options_of(suite: SmallSuite, launch: str) -> list[str]:
    workload, size, scale, *_ = LAUNCHES[launch]
    recipe = ["-w", workload, "-s", size, "--scale", str(scale), "--dtype", "bf16", "--release", suite.script.release]
    return [*recipe, "--framework", "reference_suite", "--suite", str(suite.checkout), "--modified-suite"]


def noted(suite: SmallSuite, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((suite.notes / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(("launch", "source"), CASES)
def test_a_launch_ends_in_a_result_and_is_as_by_hand(
    shell: Client, suite: Callable[..., SmallSuite], launch: str, source: str
) -> None:
    made = suite(launch, source)
    *_, scale, lines, line = LAUNCHES[launch]
    environ = {**made.environ, "STAND_IN_LINES": lines}
    result = shell.json("submit", *options_of(made, launch), "--wait", **environ)
    assert (result["status"], result["steps"]) == ("success", 50)
    if launch in AS_PUBLISHED:
        assert result["verdict"]["verdict"] == "pass"
        assert "another program trains" not in json.dumps(result["verdict"])
    folder = RunFolder(Path(result["run_dir"]))
    record = read_record(folder)
    assert (record.program, record.job and record.job.job_id) == ("reference_suite", noted_job(folder))
    assert folder.log.read_text().count("\n") == 50
    if source != "as released":
        return
    program = "sbatch" if made.script.queued_by == "scheduler" else "program"
    ours = noted(made, program)
    by_hand(shell, made, line, scale, environ)
    one, other = in_common(ours), in_common(noted(made, program))
    assert one["argv"] == other["argv"]
    assert one["environ"].items() ^ other["environ"].items() == set()


def by_hand(shell: Client, made: SmallSuite, line: dict[str, str], scale: int, environ: dict[str, str]) -> None:
    """The document's own launch line, in the folder of the script, and the end of its job."""
    line = {name: value or str(shell.install) for name, value in line.items()}
    slurm = {"SBATCH_ACCOUNT": "research", "SBATCH_PARTITION": "gpu"}
    command, path = ["./launch.sh"], f"{environ['VIRTUAL_ENV']}/bin:{environ['PATH']}"
    if made.script.queued_by == "scheduler":
        command, slurm = ["sbatch", "-A", "research", "-p", "gpu", "-N", str(scale // 8), *command], {}
        path = environ["PATH"]
    done = subprocess.run(
        command,
        cwd=made.checkout / made.script.folder,
        env={**without_secrets(shell.cluster.environ), **environ, **slurm, **line, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    wait_until(lambda: not shell.cluster.run("squeue", "-h").stdout.strip(), "the end of the job by hand")


def in_common(noted: dict[str, Any]) -> dict[str, Any]:
    """Words and variables, without those by which shells and llmb's own start differ."""
    passing = ("_", "SHLVL", "PWD", "OLDPWD", "LLMB_INSTALL", "STAGE_PATH", "HF_TOKEN")
    environ = {name: value for name, value in noted["environ"].items() if name not in passing}
    return {"argv": noted["argv"], "environ": environ}


def noted_job(folder: RunFolder) -> str:
    return str(json.loads(folder.job.read_text())["job_id"])


@pytest.mark.parametrize("source", ["of the same form", pytest.param("as released", marks=AS_RELEASED)])
def test_a_folder_that_the_script_mounts_has_to_be_there_before_a_job_is_queued(
    shell: Client, suite: Callable[..., SmallSuite], source: str
) -> None:
    """By hand the job is queued, and ends where its container is started."""
    made, (*_, scale, _, line) = suite("24.11", source), LAUNCHES["24.11"]
    dataset = shell.install / "llama3.1-dataset"
    shutil.rmtree(dataset)
    environ = {**made.environ, "STAND_IN_LINES": ""}
    done = shell.run("submit", *options_of(made, "24.11"), code=None, **environ)
    assert done.returncode != 0
    assert f"{dataset}/merges.txt does not exist: call 'hf download openai-community/gpt2" in done.stderr
    assert not (made.notes / "sbatch.json").exists()
    by_hand(shell, made, line, scale, environ)
    (output,) = (made.checkout / "llama3.1").glob("slurm-*.out")
    errors = [*shell.install.glob("results/24.11/bf16/405b/32/*.err"), output]
    assert f"{dataset}: No such file or directory" in "".join(file.read_text() for file in errors)


@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_a_job_that_is_ended_says_how_far_it_came(shell: Client, suite: Callable[..., SmallSuite], end: str) -> None:
    made = suite("24.11")
    how = {"STAND_IN_SLEEP": "300"} if end == "cancelled" else {"STAND_IN_EXIT": "9"}
    environ = {**made.environ, "STAND_IN_LINES": nemo1_lines([9.0] * 7), **how}
    (queued,) = shell.json("submit", *options_of(made, "24.11"), **environ)["jobs"]
    logs = "results/24.11/bf16/405b/32/log-*.out"
    wait_until(
        lambda: any("global_step=6.0" in log.read_text() for log in shell.install.glob(logs)), "seven steps in its log"
    )
    if end == "cancelled":
        shell.run("jobs", "cancel", queued["job_id"])
    with open_history(shell.install, print) as store:
        job = ended(store, shell, store.jobs()[0].key)
    assert job.status == end
    assert f"after 7 of 50 steps; not concluded; run 'llmb result {job.id}'" in str(job.reason)
    assert job.id in shell.run("jobs", "show", queued["job_id"]).stderr
    assert read_record(RunFolder(Path(job.run_dir))).status == end


def test_a_job_that_slurm_refuses_leaves_nothing(shell: Client, suite: Callable[..., SmallSuite]) -> None:
    made = suite("25.04")
    done = shell.run("submit", *options_of(made, "25.04"), "-p", "nowhere", code=None, **made.environ)
    assert done.returncode != 0
    assert "invalid partition specified: nowhere" in done.stderr
    assert shell.json("jobs", "list")["jobs"] == []
    assert not list((shell.install / "workloads").glob("*/experiments/*/*"))


def test_a_client_that_dies_while_the_script_queues_loses_no_job(
    shell: Client, suite: Callable[..., SmallSuite]
) -> None:
    """Its job hangs after the last step, and fails: the document of 25.07 calls that the normal end."""
    made = suite("25.04")
    lines = {"STAND_IN_LINES": nemo_lines([12.27] * 50), "STAND_IN_EXIT": "9"}
    environ = {**made.environ, **lines, "LLMB_INSTALL": str(shell.install)}
    script = made.checkout / "llama3.1" / "launch.sh"
    client = made.notes / "client"
    script.write_text(script.read_text().replace("popd", f'kill -KILL "$(cat {client})"\npopd'))
    wrapped = f'echo $$ >{client}; exec "$@"'
    command = [shell.python, "-m", "llmb.cli.main", "submit", *options_of(made, "25.04")]
    done = subprocess.run(
        ["bash", "-c", wrapped, "bash", *command], env={**shell.cluster.environ, **environ}, check=False
    )
    assert done.returncode == -9
    with open_history(shell.install, print) as store:
        (before,) = store.jobs()
        assert before.job_id is None
        job = ended(store, shell, before.key)
    assert (job.status, job.job_id is not None) == ("success", True)
    assert "after its last step" in str(job.reason)
