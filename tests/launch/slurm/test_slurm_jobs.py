# SPDX-License-Identifier: Apache-2.0
"""Batch scripts and runs on a real Slurm."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_values import folder_of, job_state, order_of, script_of

from llmb.catalogue.resolve import Request
from llmb.jobs.order import Order
from llmb.launch.slurm.client import cancel_jobs, not_exported, submit
from llmb.launch.slurm.script import Shell, batch_script, command_lines, worker_step
from llmb.runs.failure import first_failure
from llmb.runs.folder import RunFolder

pytestmark = pytest.mark.slurm
FOLDER = Shell('"$llmb_folder"')
TINY = Request(workload="pretrain_llama3.1", size="tiny", gpu_type="cpu", scale=2)
ENDED_S = 600

Queue = Callable[..., tuple[str, RunFolder]]


@pytest.fixture
def shell(slurm: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> SlurmCluster:
    """Slurm's commands of this process speak to the test cluster."""
    for name, value in slurm.environ.items():
        monkeypatch.setenv(name, value)
    return slurm


@pytest.fixture
def queue(shell: SlurmCluster) -> Iterator[Queue]:
    """Queues ``work`` in the place of an order's workers; without begin and finish, which need a run's record."""
    jobs = []

    def submitter(order: Order, *work: str) -> tuple[str, RunFolder]:
        folder = folder_of(order)
        folder.path.mkdir(parents=True)
        spec = order.spec(folder).model_copy(update={"begin": (), "finish": ()})
        script = batch_script(spec, folder).replace(command_lines(worker_step(spec)), command_lines(work))
        folder.batch_script.write_text(script)
        job_id, _ = submit(folder.batch_script, shell.environ)
        jobs.append(job_id)
        return job_id, folder

    yield submitter
    for job_id in jobs:
        cancel_jobs([job_id])


def ended(job_id: str) -> str:
    end = time.monotonic() + ENDED_S
    while not (state := job_state(job_id)).ended:
        assert time.monotonic() < end, state
        time.sleep(0.1)
    return state.state


def wait_for(path: Path) -> None:
    end = time.monotonic() + ENDED_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < end, path
        time.sleep(0.05)


def end_marker(folder: RunFolder) -> dict[str, object]:
    wait_for(folder.job_end)
    return json.loads(folder.job_end.read_text())


@pytest.mark.parametrize(("how", "signal"), [((), "TERM"), (("--batch", "--signal=USR1"), "USR1")])
def test_a_job_that_is_ended_says_by_which_signal(
    queue: Queue, shell: SlurmCluster, tmp_path: Path, how: tuple[str, ...], signal: str
) -> None:
    job_id, folder = queue(order_of(TINY, install=tmp_path), "srun", "sh", "-c", "echo up; exec sleep 300")
    wait_for(folder.log)
    assert shell.run("scancel", *how, job_id).returncode == 0
    assert ended(job_id) == ("CANCELLED" if signal == "TERM" else "FAILED")
    marker = end_marker(folder)
    assert marker["signal"] == signal
    assert marker["exit_code"] != 0


def test_a_task_that_was_killed_is_named(queue: Queue, tmp_path: Path) -> None:
    work = 'if [ "$SLURM_PROCID" = 1 ]; then kill -KILL $$; fi; sleep 60'
    order = order_of(TINY, install=tmp_path, start="task-per-gpu")
    job_id, folder = queue(order, "srun", "--ntasks=2", "--kill-on-bad-exit=1", "sh", "-c", work)
    assert ended(job_id) == "FAILED"
    failure = first_failure(folder.log.read_text())
    assert failure
    assert re.fullmatch(r"task 1 on node\d ended: Killed", failure)


def test_hostile_values_reach_slurm_as_they_were_written(queue: Queue, shell: SlurmCluster, tmp_path: Path) -> None:
    comment = """it's "$(touch canary)" `x` ; a\\b # %j & {x} \\\\ é"""
    install = tmp_path / """a "b" 'c' $(touch canary) %j #;&"""
    order = order_of(TINY, install=install, slurm_args=(f"comment={comment}",), flags={"job-name": "a 'b' \"c\" $d;#"})
    job_id, folder = queue(order, "sh", "-c", 'echo ran >"$0/ran"; echo said', FOLDER)
    assert ended(job_id) == "COMPLETED", folder.batch_output
    assert shell.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%k").stdout == f"{comment}\n"
    assert shell.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%Z").stdout == f"{folder.path}\n"
    assert (folder.path / "ran").exists()
    assert folder.log.read_text() == "said\n"
    assert folder.batch_output.read_text() == ""
    assert not list(tmp_path.rglob("canary"))


ALL_GPUS = "0,1,2,3,4,5,6,7"


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ({"config": {"slurm": {"gpu_request": "gpus-per-node"}}}, ALL_GPUS),
        ({"config": {"slurm": {"gpu_request": "gres", "gres_type": "h100"}}}, ALL_GPUS),
        ({"config": {"slurm": {"flags": {"mem-per-gpu": "1M"}}}}, ALL_GPUS),
        ({"shell": {"SBATCH_GPUS_PER_NODE": "null"}}, ""),
        ({"shell": {"SLURM_GPUS_PER_NODE": "null", "ADDITIONAL_SLURM_PARAMS": "gres=gpu:8"}}, ALL_GPUS),
    ],
    ids=["gpus-per-node", "gres", "memory of each", "none", "by the shell"],
)
def test_gpus_are_asked_for(queue: Queue, tmp_path: Path, given: dict[str, object], devices: str) -> None:
    request = Request(workload="pretrain_llama3.1", size="8b", gpu_type="h100", scale=16)
    order = order_of(request, install=tmp_path, **given)
    job_id, folder = queue(order, "srun", "sh", "-c", 'echo "$SLURM_NODEID ${CUDA_VISIBLE_DEVICES:-}"')
    assert ended(job_id) == "COMPLETED"
    assert sorted(folder.log.read_text().splitlines()) == [f"0 {devices}", f"1 {devices}"]


def test_a_job_without_gpus_is_taken_where_gpus_have_memory(queue: Queue, tmp_path: Path) -> None:
    order = order_of(TINY, install=tmp_path, config={"slurm": {"flags": {"mem-per-gpu": "180G"}}})
    job_id, folder = queue(order, "echo", "ran")
    assert ended(job_id) == "COMPLETED", folder.batch_output.read_text()


def test_what_the_shell_says_to_sbatch_does_not_replace_the_script(shell: SlurmCluster, tmp_path: Path) -> None:
    order = order_of(TINY, install=tmp_path, flags={"partition": "gpu"}, slurm_args=("hold",))
    environ = {**shell.environ, "SBATCH_PARTITION": "debug", "SBATCH_JOB_NAME": "other", "HF_TOKEN": "secret"}
    environ |= {"OF_SBATCH": "of sbatch alone"}
    folder = folder_of(order)
    folder.path.mkdir(parents=True)
    folder.batch_script.write_text(script_of(order))
    job_id, _ = submit(folder.batch_script, environ, arguments=[not_exported("OF_SBATCH")])
    try:
        told = shell.run("squeue", "-h", "-j", job_id, "-o", "%P %j").stdout.split()
        assert told == ["gpu", folder.name]
        assert job_state(job_id).state == "PENDING"
        kept = list((shell.root / "state").rglob(f"job.{job_id}/environment"))
        assert kept
        assert not [path for path in kept if b"HF_TOKEN" in path.read_bytes()]
        assert not [path for path in kept if b"of sbatch alone" in path.read_bytes()]
        assert [path for path in kept if b"SLURM_CONF=" in path.read_bytes()], "the rest is exported"
    finally:
        cancel_jobs([job_id])


def test_an_unknown_job_has_an_unknown_state(shell: SlurmCluster) -> None:
    assert job_state("999999").state == "UNKNOWN"
    cancel_jobs(["999999"])


def test_a_machine_without_slurm_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Exception, match="squeue was not found") as caught:
        job_state("1")
    assert caught.value.exit_code == 3


Submit = Callable[..., "subprocess.CompletedProcess[str]"]
TWO_NODES = ("--scale", "4", "--steps", "5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "forked"),
    [
        *(("torchrun", True), ("task-per-gpu", True)),
        *(pytest.param(start, False, marks=pytest.mark.measured) for start in ("torchrun", "task-per-gpu")),
    ],
)
def test_a_run_on_two_nodes_comes_back_with_its_result(
    submit: Submit, slurm: SlurmCluster, forked_python: str, start: str, forked: bool
) -> None:
    python = forked_python if forked else sys.executable
    done = submit(*TWO_NODES, "--start", start, "--wait", "--json", python=python)
    assert done.returncode == 0, done.stderr + slurm.talk()
    result = json.loads(done.stdout)
    assert result["status"] == "success"
    assert result["steps"] == 5
    folder = Path(result["run_dir"])
    record = json.loads((folder / "run.json").read_text())
    assert record["exit_code"] == 0
    assert record["job"]["nodes"] == "node[1-2]"
    variables = record["environment"]["variables"]
    assert record["environment"]["ranks_per_node"] and variables["SLURM_JOB_ID"] == record["job"]["job_id"]
    handle = json.loads((folder / "job.json").read_text())
    end = json.loads((folder / "job_end.json").read_text())
    assert handle["job_id"] == record["job"]["job_id"] == end["job_id"]
    assert (end["exit_code"], end["signal"], end["restarts"]) == (0, "", 0)
    sampled = {path.stem for path in (folder / "resources").iterdir()}
    assert sampled == set(record["environment"]["nodes"]) == {"node1", "node2"}
    log = (folder / f"log-{folder.name}.out").read_text()
    assert [line.split()[4] for line in log.splitlines() if line.startswith("Training epoch")] == [
        f"{step}/4" for step in range(5)
    ]
    assert re.search(
        rf"JobState=COMPLETED .*WorkDir={folder}", slurm.run("scontrol", "-o", "show", "job", handle["job_id"]).stdout
    )


@pytest.mark.slow
def test_a_worker_that_fails_gives_its_last_lines(submit: Submit, forked_python: str) -> None:
    done = submit(*TWO_NODES, "--env", "GLOO_SOCKET_IFNAME=nosuch0", "--wait", "--json", python=forked_python)
    assert done.returncode == 4, done.stderr
    assert "the run failed: rank" in done.stderr
    assert "nosuch0" in done.stderr
    result = json.loads(done.stdout)
    assert result["status"] == "failed"
    assert "rank" in result["reason"]
    record = json.loads((Path(result["run_dir"]) / "run.json").read_text())
    assert record["exit_code"] != 0


def test_what_is_shown_is_what_is_queued(submit: Submit, slurm: SlurmCluster, tmp_path: Path) -> None:
    options = (*TWO_NODES, "--slurm-arg", "hold", "--slurm-arg", "comment=it's $(x)", "--nice", "3", "--env", "A=b c")
    shown = submit(*options, "--dry-run")
    assert shown.returncode == 0
    assert not (tmp_path / "install" / "workloads").exists()
    queued = submit(*options, "--json", ADDITIONAL_SLURM_PARAMS="")
    assert queued.returncode == 0, queued.stderr
    (job,) = json.loads(queued.stdout)["jobs"]
    try:
        folder = Path(job["run_dir"])
        stamp = folder.parent.name.rpartition("_")[2]
        assert Path(job["script"]).read_text() == shown.stdout.replace("_SECONDS/", f"_{stamp}/")
        assert (
            slurm.run("scontrol", "write", "batch_script", job["job_id"], "-").stdout == Path(job["script"]).read_text()
        )
        assert json.loads((folder / "run.json").read_text())["status"] == "queued"
    finally:
        slurm.run("scancel", job["job_id"])
