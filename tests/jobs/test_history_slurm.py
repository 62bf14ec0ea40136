# SPDX-License-Identifier: Apache-2.0
"""The history of jobs beside a real Slurm, mostly with a line of shell in place of the workers."""

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from quick_order import QuickOrder
from slowed_runs import Slow, slowed
from slurm_client import LLMB, WITHIN_S, Client, ended, run_out_of_time, up, wait_until
from slurm_cluster import SEARCHED

from llmb.base.errors import InfrastructureError, UsageError
from llmb.jobs.history import database_path, open_history
from llmb.jobs.job import Job
from llmb.jobs.order import prepare, send
from llmb.jobs.refresh import refresh
from llmb.jobs.store import KeyExists, Store
from llmb.jobs.submit import new_job, submit_order
from llmb.jobs.wait import last_try, retry_failed, wait_for
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_job, read_record

pytestmark = pytest.mark.slurm
Submit = Callable[..., Job]
ALL_STEPS = 'cat "$1" >> "$0/metrics.jsonl"'
HALF = 'head -n 5 "$1" >> "$0/metrics.jsonl"'
WAIT = "echo up; exec sleep 300"


def test_a_run_that_gets_through_is_a_success_with_its_numbers(submit: Submit, store: Store, shell: Client) -> None:
    job = submit(ALL_STEPS)
    assert (job.state, job.status) == ("PENDING", "queued")
    assert job.job_id
    found = ended(store, shell, job.key)
    assert (found.state, found.status, found.reason, found.exit_code) == ("COMPLETED", "success", None, 0)
    assert (found.step_time_s, found.nodes, found.restarts) == (0.05, "node1", 0)
    assert found.submitted_s - 1 <= (found.started_s or 0) <= (found.ended_s or 0) <= time.time()
    (shown,) = shell.json("jobs", "list", "--state", "success")["jobs"]
    assert shown == found.document()
    details = shell.json("jobs", "show", job.job_id)
    assert details["attempts"][0]["job"] == {
        "scheduler": "slurm", "job_id": job.job_id, "nodes": "node1", "restarts": 0
    }  # fmt: skip


@pytest.mark.measured
def test_a_run_that_fails_says_why_in_its_last_lines(submit: Submit, store: Store, shell: Client) -> None:
    job = submit(f"{HALF}; echo first; echo 'ValueError: bad shapes'; exit 3")
    found = ended(store, shell, job.key)
    assert (found.state, found.status, found.exit_code) == ("FAILED", "failed", 3)
    assert found.reason == "the workers ended with exit code 3, after 5 of 10 steps"
    assert found.fault is None
    details = shell.json("jobs", "show", job.name[:-2])
    assert {"first", "ValueError: bad shapes"} <= set(details["last_lines"])
    assert shell.run("jobs", "wait", str(job.job_id), code=4)
    whole = RunFolder(Path(job.run_dir)).log.read_text().splitlines()
    assert shell.run("jobs", "log", str(job.job_id)).stdout.splitlines() == whole
    assert shell.run("jobs", "log", str(job.job_id), "--tail", "2").stdout.splitlines() == whole[-2:]


@pytest.mark.slow
def test_jobs_are_cancelled_by_their_ids(submit: Submit, store: Store, shell: Client) -> None:
    running, waiting = submit(f"{HALF}; {WAIT}"), submit(ALL_STEPS, "b", flags={"hold": None})
    up(running)
    refresh(store, shell.install)
    held = store.by_key("b")
    assert held and held.reason and held.reason.startswith("held;")
    shell.run("jobs", "cancel", str(running.job_id), waiting.name)
    for job, steps in ((running, 5), (waiting, 0)):
        found = ended(store, shell, job.key)
        assert (found.state, found.status) == ("CANCELLED", "cancelled")
        assert str(found.reason).startswith(f"cancelled, after {steps} of 10 steps")
        shell.run("result", job.name, code=4)
        assert read_record(RunFolder(Path(job.run_dir))).status == "cancelled"
    shell.run("jobs", "cancel", str(running.job_id))
    shell.run("jobs", "wait", str(running.job_id), code=130)


@pytest.mark.slow
def test_log_follows_a_job_to_its_end(submit: Submit, shell: Client) -> None:
    job = submit('for n in 1 2 3; do echo "line $n"; sleep 0.5; done; ' + ALL_STEPS)
    followed = shell.run("jobs", "log", "--follow", str(job.job_id))
    lines = followed.stdout.splitlines()
    assert [line for line in lines if not line.startswith("srun: ")] == ["line 1", "line 2", "line 3"]
    assert "llmb: step 10/10 " in followed.stderr


@pytest.mark.slow
def test_a_time_limit_after_the_last_step_is_a_success(submit: Submit, store: Store, shell: Client) -> None:
    through = submit(f"{ALL_STEPS}; {WAIT}")
    half = submit(f"{HALF}; {WAIT}", "b")
    for job in (through, half):
        up(job)
    run_out_of_time(shell.cluster, str(through.job_id), str(half.job_id))
    found = ended(store, shell, through.key)
    assert (found.state, found.status) == ("TIMEOUT", "success")
    assert found.reason == "ended at its time limit, after its last step"
    assert found.step_time_s == 0.05
    assert read_record(RunFolder(Path(through.run_dir))).status == "success"
    found = ended(store, shell, half.key)
    assert (found.state, found.status) == ("TIMEOUT", "failed")
    assert found.reason == "ended at its time limit, after 5 of 10 steps"
    assert shell.run("jobs", "wait", str(through.job_id), code=0)


@pytest.mark.slow
def test_workers_that_end_before_their_script_is_told_why_have_ended_at_its_signal(
    store: Store, shell: Client, order: Callable[..., QuickOrder], tmp_path: Path
) -> None:
    """As at a time limit, when Slurm sends TERM to the workers first."""
    # The script waits for its signal by the command sleep; on a busy machine this one arrives later than it waits.
    sleep = tmp_path / "bin" / "sleep"
    sleep.parent.mkdir()
    sleep.write_text(f'#!/bin/sh\n[ "$1" != 3 ] || set 60\nPATH={SEARCHED} exec sleep "$@"\n')
    sleep.chmod(0o755)
    environ = {**shell.cluster.environ, "PATH": f"{sleep.parent}:{SEARCHED}"}
    later = "sleep 0.2; scancel --batch --signal=TERM $SLURM_JOB_ID"
    line = f"{ALL_STEPS}; setsid sh -c '{later}' </dev/null >/dev/null 2>&1 & kill -TERM $$"
    submit_order(store, order(line), environ, key="a")
    job = store.by_key("a")
    assert job
    ended(store, shell, job.key)
    record = read_record(RunFolder(Path(job.run_dir)))
    assert (record.status, record.reason) == ("success", None)


@pytest.mark.slow
def test_a_controller_that_is_down_leaves_what_is_known(
    submit: Submit, store: Store, shell: Client, tmp_path: Path
) -> None:
    rest = 'tail -n 5 "$1" >> "$0/metrics.jsonl"'
    job = submit(f'{HALF}; echo up; while ! test -e "$0/go"; do sleep 0.2; done; {rest}')
    up(job)
    refresh(store, shell.install)
    shell.cluster.end("slurmctld")
    settings = shell.cluster.root / "slurm.conf"
    usual = settings.read_text()
    settings.write_text(f"{usual}MessageTimeout=1\n")  # for so long each client looks for a controller
    try:
        with pytest.raises(InfrastructureError):
            refresh(store, shell.install)
        done = shell.run("jobs", "list", "--json")
        assert json.loads(done.stdout)["jobs"][0]["state"] == "RUNNING"
        (Path(job.run_dir) / "go").touch()
        shell.run("jobs", "refresh", code=7)
        complaints = tmp_path / "complaints"
        with complaints.open("w") as stream:
            waiting = subprocess.Popen(
                [shell.python, *LLMB, "jobs", "wait", str(job.job_id)],
                env={**shell.cluster.environ, "LLMB_INSTALL": str(shell.install)},
                stdout=subprocess.DEVNULL,
                stderr=stream,
            )
        wait_until(lambda: "Slurm does not answer" in complaints.read_text(), "a complaint")
        assert waiting.poll() is None
    finally:
        settings.write_text(usual)
        shell.cluster.start_controller()
    assert waiting.wait(WITHIN_S) == 0, complaints.read_text()
    found = ended(store, shell, job.key)
    assert (found.state, found.status) == ("COMPLETED", "success")


@pytest.mark.slow
def test_jobs_that_slurm_has_forgotten_are_read_from_their_marks(
    submit: Submit, store: Store, shell: Client, order: Callable[..., QuickOrder]
) -> None:
    through, failed = submit(ALL_STEPS), submit("exit 3", "b")
    killed = submit(f"{HALF}; {WAIT}", "c")
    for job in (through, failed):
        ended(store, shell, job.key)
    up(killed)
    refresh(store, shell.install)
    assert {job.status for job in store.jobs()} == {"success", "failed", "running"}
    shell.cluster.run("scancel", "--signal=KILL", "--full", str(killed.job_id))
    wait_until(lambda: not shell.cluster.run("squeue", "-h").stdout.strip(), "the end of all jobs")
    RunFolder(Path(killed.run_dir)).job_end.unlink(missing_ok=True)  # as where its node was lost with it
    forget(shell)
    # The history is lost with it: it is rebuilt from the run folders.
    for part in database_path(shell.install).parent.glob("jobs.sqlite*"):
        part.unlink()
    with open_history(shell.install, lambda _: None) as again:
        assert {job.key: job.job_id for job in again.jobs()} == {job.key: job.job_id for job in store.jobs()}
        new = submit_order(again, order(WAIT), shell.cluster.environ, key="new")
        refresh(again, shell.install)
        found = {job.key: job for job in again.jobs()}
    assert (found["a"].state, found["a"].status, found["a"].step_time_s) == ("COMPLETED", "success", 0.05)
    assert (found["b"].state, found["b"].status) == ("FAILED", "failed")
    assert (found["c"].state, found["c"].status) == ("LOST", "failed")
    assert "did not record its end" in str(found["c"].reason)
    assert new.job_id == "1", "ids start again at 1, and the first job's row is not this one's"
    assert found["new"].state != "LOST"


def forget(client: Client) -> None:
    """Slurm loses its state: it knows of no job any more, and gives ids from 1 on."""
    client.cluster.end("slurmctld")
    shutil.rmtree(client.cluster.root / "state")
    (client.cluster.root / "state").mkdir()
    client.cluster.start_controller()
    client.cluster.wait_for("nodes", client.cluster._nodes_ready)


def test_a_submission_that_was_interrupted_is_found_and_not_made_twice(
    store: Store, shell: Client, order: Callable[..., QuickOrder]
) -> None:
    """As a client leaves it that dies after sbatch, and one that dies before."""
    prepared = [prepare(order(WAIT)) for _ in range(2)]
    for number, one in enumerate(prepared):
        store.add([new_job(one, f"k{number}", "c")])
    queued = send(prepared[0], shell.cluster.environ)
    store.db.execute("UPDATE jobs SET submitted_s = submitted_s - 60")
    warnings = refresh(store, shell.install)
    first, second = store.jobs()
    assert (first.job_id, first.live) == (queued.job_id, True)
    assert (second.job_id, second.state, second.status) == (None, "NOT_SUBMITTED", "failed")
    assert len(warnings) == 1
    handle = read_job(prepared[0].folder)
    assert handle and (handle.job_id, handle.key, handle.campaign) == (queued.job_id, "k0", "c")
    with pytest.raises(KeyExists):
        store.add([first])
    store.add([new_job(prepared[1], "k1", "c")])
    assert len(shell.cluster.run("squeue", "-h", "-o", "%i").stdout.split()) == 1


@pytest.mark.slow
def test_the_jobs_of_a_campaign_are_in_the_history(client: Client) -> None:
    lists = ("-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1,2", "--slurm-arg", "hold")
    client.run("submit", *lists, "--yes")
    queued = client.json("jobs", "list")["jobs"]
    assert sorted(job["scale"] for job in queued) == [1, 2]
    (campaign,) = {job["campaign"] for job in queued}
    assert client.json("jobs", "list", "--campaign", campaign)["total"] == 2
    handles = [json.loads((Path(job["run_dir"]) / "job.json").read_text()) for job in queued]
    assert [(handle["key"], handle["campaign"]) for handle in handles] == [(job["key"], campaign) for job in queued]
    client.run("jobs", "rebuild")
    assert client.json("jobs", "list")["total"] == 2
    client.run("jobs", "cancel", *(job["job_id"] for job in queued))


def test_a_refused_job_leaves_nothing_in_the_history(store: Store, submit: Submit, shell: Client) -> None:
    with pytest.raises(UsageError, match="invalid partition"):
        submit(WAIT, flags={"partition": "nowhere"})
    assert store.jobs() == []
    assert not list(shell.install.rglob("run.json"))


NCCL = "llmb: rank 0 on $SLURMD_NODENAME failed: DistBackendError: NCCL error in: x.cpp:4, unhandled system error"


@pytest.mark.measured
def test_a_fault_of_the_infrastructure_is_tried_again_elsewhere(submit: Submit, store: Store, shell: Client) -> None:
    once = f'if [ ! -e "$0/tried" ]; then touch "$0/tried"; {HALF}; echo "{NCCL}"; exit 1; fi; {ALL_STEPS}'
    job = submit(once, retries=2)
    (found,) = wait_for(store, shell.install, ["a"], shell.cluster.environ, lambda _: None)
    assert (found.status, found.nodes, found.retries, found.retry_of) == ("success", "node2", 1, "a")
    first = store.by_key("a")
    assert first and (first.status, first.fault, first.bad_nodes) == ("failed", "nccl_system_error", "node1")
    assert found.run_dir == job.run_dir
    record = read_record(RunFolder(Path(job.run_dir)))
    assert [attempt.job.nodes for attempt in record.attempts] == ["node1", "node2"]
    assert [attempt.exit_code for attempt in record.attempts] == [1, None]
    handle = read_job(RunFolder(Path(job.run_dir)))
    assert handle and [one.job_id for one in (*handle.earlier, handle)] == [first.job_id, found.job_id]
    blamed = {node["node"]: node["blamed"] for node in shell.json("jobs", "nodes")["nodes"]}
    assert blamed == {"node1": 1, "node2": 0}


@pytest.mark.slow
def test_retries_have_an_end_and_happen_once(submit: Submit, store: Store, shell: Client) -> None:
    submit(f'echo "{NCCL}"; exit 1', retries=1)
    found = ended(store, shell, last_try(store, "a").key)
    assert found.fault == "nccl_system_error"
    # Two clients that see the failure at the same time.
    with open_history(shell.install, lambda _: None) as other:
        both = [[*retry_failed(one, shell.install, shell.cluster.environ, time.time())] for one in (store, other)]
    assert sorted(map(len, both)) == [0, 1]
    (last,) = wait_for(store, shell.install, ["a"], shell.cluster.environ, lambda _: None)
    assert (last.key, last.retries, last.status, last.nodes) == ("a#2", 0, "failed", "node2")
    assert list(retry_failed(store, shell.install, shell.cluster.environ, time.time())) == []
    shell.run("jobs", "wait", str(last.job_id), code=7)


TINY = ("-w", "pretrain_llama3.1", "-s", "tiny")
OPTIONS = ("--steps", "10", "--checkpoint-interval", "4", "--gpus-per-node", "1")


def losses(path: Path) -> dict[int, float]:
    return {step["step"]: step["loss"] for step in map(json.loads, path.read_text().splitlines())}


@pytest.mark.slow
def test_a_run_whose_node_is_lost_goes_on_from_its_checkpoint(client: Client) -> None:
    # So that the node is lost some steps behind a checkpoint, and before the next one.
    pace = slowed(Slow("pace", ms=1000))
    (job,) = client.json("submit", *TINY, "--scale", "2", *OPTIONS, "--retries", "2", **pace)["jobs"]
    client.wait_for_steps(job["run_dir"], 6)
    client.cluster.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    (ended,) = client.json("jobs", "wait", job["job_id"])["jobs"]
    assert (ended["state"], ended["status"], ended["restarts"]) == ("COMPLETED", "success", 1)
    run = Path(job["run_dir"])
    record = json.loads((run / "run.json").read_text())
    first, second = record["attempts"]
    assert (first["number"], second["number"], second["job"]["restarts"]) == (1, 2, 1)
    assert second["first_step"] in (4, 8)
    assert sorted(record["environment"]["nodes"]) == ["node1", "node2"]
    after, before = losses(run / "metrics.jsonl"), losses(run / "metrics-attempt1.jsonl")
    assert list(after) == list(range(10))
    assert max(before) >= second["first_step"], "something was done twice"
    assert {number: after[number] for number in before} == before
    log = (run / f"log-{run.name}.out").read_text()
    assert log.count("iteration 0/9") == 1
    assert f"llmb: attempt 2 begins at step {second['first_step']} on node[1-2]" in log


STEPS = '"$1" >> "$0/metrics.jsonl"'
IN_TWO_PARTS = f'head -n 5 {STEPS}; while ! test -e "$0/go"; do sleep 0.2; done; tail -n 5 {STEPS}'


def watching(client: Client, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [client.python, *LLMB, "watch", *options],
        env={**client.cluster.environ, "LLMB_INSTALL": str(client.install)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_until(watcher: "subprocess.Popen[str]", beginning: str) -> list[str]:
    assert watcher.stderr
    seen = []
    while not (seen and seen[-1].startswith(f"llmb: {beginning}")):
        line = watcher.stderr.readline()
        assert line, (seen, watcher.stdout and watcher.stdout.read())
        seen.append(line)
    return seen


@pytest.mark.measured
def test_a_job_is_watched_from_the_queue_to_its_end(submit: Submit, shell: Client) -> None:
    job = submit(IN_TWO_PARTS)
    watcher = watching(shell, str(job.job_id), "--expect", "0.1")
    read_until(watcher, "step 5/10 ")
    (Path(job.run_dir) / "go").touch()
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 0, (out, err)
    assert "step 10/10 " in err and "step time s, mean" in out
    document = shell.json("watch", str(job.job_id))
    assert (document["nodes"], document["result"]["status"]) == ("node1", "success")


@pytest.mark.measured
def test_a_job_that_is_held_and_then_cancelled(submit: Submit, shell: Client) -> None:
    job = submit(IN_TWO_PARTS, flags={"hold": None})
    before = shell.json("watch", str(job.job_id), "--once")
    assert (before["state"], before["steps_done"]) == ("queued", 0)
    assert "held" in before["reason"]
    watcher = watching(shell)
    read_until(watcher, "queued")
    shell.cluster.run("scancel", str(job.job_id))
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 130, (out, err)
    assert "cancelled" in err


@pytest.mark.slow
def test_the_time_limit_of_a_job(submit: Submit, shell: Client) -> None:
    job = submit(f"head -n 5 {STEPS}; exec sleep 300", flags={"time": "5"})
    steps = RunFolder(Path(job.run_dir)).steps
    wait_until(lambda: steps.exists() and steps.read_text().count("\n") == 5, job.run_dir)
    seen = shell.json("watch", str(job.job_id), "--once")
    assert 0 < seen["time_limit_left_s"] <= 300
    assert (seen["state"], seen["steps_done"], seen["steps_total"]) == ("running", 5, 10)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed: llmb[torchtitan]")
def test_a_job_of_torchtitan_is_followed_to_its_verdict(client: Client) -> None:
    words = ("-w", "pretrain_gpt_oss", "-s", "tiny", "--scale", "2", "--framework", "torchtitan", "--steps", "10")
    run = client.json("submit", *words, "--window", "3-9", "--wait")
    assert (run["status"], run["steps"], run["step_time_s"]["count"]) == ("success", 10, 7)
    assert run["loss"]["last"] < run["loss"]["first"] - 0.3
    assert run["verdict_reason"] == "no published figure: a recipe of llmb itself, without published figures"
    expected = str(3 * run["step_time_s"]["mean"])
    judged = client.json("judge", run["id"], "--expect", expected, "--explain", code=None)
    assert judged["verdict"] in ("improved", "inconclusive"), "steps vary on a busy machine"
    commands = [cause["confirm"] for cause in judged["judged"][0]["explanation"]["not_known"]]
    assert all("-s tiny --framework torchtitan --dtype bf16" in command for command in commands if "-w" in command)
