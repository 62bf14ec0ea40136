# SPDX-License-Identifier: Apache-2.0
"""Host lists, points in time, faults, retries, nodes: pure parts of the history."""

from pathlib import Path

import pytest
from job_rows import job_row
from recorded_runs import gpu_record, times_around, write_run
from shown_tables import shown_lines

from llmb.base.errors import UsageError
from llmb.catalogue.data_files import CatalogueError
from llmb.jobs.find_jobs import NodeRecord, node_records, parse_since
from llmb.jobs.job import Job
from llmb.jobs.refresh import faults_of, find_fault, matching, read_faults, worth_a_retry
from llmb.jobs.states import read_run
from llmb.jobs.wait import excluded, exit_code, repeated
from llmb.launch.scheduler_lookup import find_scheduler
from llmb.launch.slurm.job_state import FIELD, RECORD, SlurmJob, parse_accounts, parse_queue
from llmb.launch.slurm.offer import expand
from llmb.launch.slurm.scheduler import find_submission
from llmb.reports.jobs_report import job_document, job_table, jobs_table
from llmb.runs.failure import failure_line


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        (None, []),
        ("", []),
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[1,3],login", ["node1", "node3", "login"]),
        ("gpu-a[08-11]", ["gpu-a08", "gpu-a09", "gpu-a10", "gpu-a11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1]-ib,b.cluster", ["a1-ib", "b.cluster"]),
    ],
)
def test_host_lists(hosts: str | None, names: list[str]) -> None:
    assert expand(hosts) == names


def test_nodes_are_known_with_their_domain() -> None:
    assert matching(expand("node[1-4]"), ("node2.cluster.example", "node3", "localhost", "node9")) == ("node2", "node3")


def test_points_in_time() -> None:
    assert parse_since("30m", 10_000.0) == 10_000 - 1800
    assert parse_since("2 d", 1e6) == 1e6 - 2 * 86400
    assert parse_since("2026-11-21T14:00+00:00", 0) == 1795269600
    assert parse_since("2026-11-22", 0) - parse_since("2026-11-21", 0) == 86400
    with pytest.raises(UsageError, match="'yesterday' is not a date, a time or an age"):
        parse_since("yesterday", 0)


NCCL = "torch.distributed.DistBackendError: NCCL error in: x.cpp:42, unhandled system error (run with NCCL_DEBUG=INFO)"
OWN = [
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
    "llmb: the run is invalid: step 3: loss nan",
    "OSError: [Errno 28] No space left on device",
]
INFRASTRUCTURE = {
    NCCL: "nccl_system_error",
    "RuntimeError: CUDA error: uncorrectable ECC error encountered": "gpu_memory_error",
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.": "gpu_off_the_bus",
    "NVRM: Xid (PCI:0000:3b:00): 95, pid=1, Uncontained ECC error": "gpu_memory_error",
    "NVRM: Xid (PCI:0000:3b:00): 119, pid=1, Timeout waiting for RPC from GSP": "gpu_fault",
    "node7:1:2 [0] NCCL WARN NET/IB : Got async event : port error": "link_down",
    "mlx5_0: link is down": "link_down",
    "node7:1:2 [0] NCCL WARN NET/IB: Got completion from peer with status=12": "nccl_system_error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting": "nccl_remote_error",
    "PMIX ERROR: timed out": "launch_failed",
    "slurmstepd: error: mpi/pmix_v4: pmixp_coll_ring_reset: timed out": "launch_failed",
    "OSError: [Errno 116] Stale file handle: '/shared/x'": "file_system",
    "RuntimeError: No CUDA GPUs are available": "no_gpu",
}


@pytest.mark.parametrize("line", OWN)
def test_what_a_run_does_to_itself_is_not_tried_again(line: str) -> None:
    table = faults_of(find_scheduler("slurm"))
    fault = find_fault(table, "failed", f"{line}\n{NCCL}\n")
    assert fault and not fault.nodes
    assert not worth_a_retry(table, fault.name)


@pytest.mark.parametrize(("line", "name"), INFRASTRUCTURE.items())
def test_what_the_infrastructure_does_is(line: str, name: str) -> None:
    table = faults_of(find_scheduler("slurm"))
    fault = find_fault(table, "failed", f"Training epoch 0, iteration 1/9 | lr: 1\n{line}\n")
    assert fault and fault.name == name
    assert worth_a_retry(table, name)


def test_a_bug_is_nobody_elses_fault() -> None:
    log = failure_line(1, "node2", ValueError("shapes do not match")) + "\n"
    assert find_fault(read_faults(), "failed", log) is None
    assert find_fault(read_faults(), "failed", "") is None
    assert find_fault(read_faults(), "timed_out", NCCL) is None
    assert not worth_a_retry(read_faults(), None)


def test_slurms_own_word_goes_first() -> None:
    fault = find_fault(read_faults(), "node_fail", "CUDA out of memory")
    assert fault and fault.name == "node_fail"
    fault = find_fault(read_faults(), "out_of_memory", NCCL)
    assert fault and fault.name == "host_out_of_memory"
    assert worth_a_retry(read_faults(), "preempted")


def test_the_node_of_the_rank_that_failed_first_is_to_blame() -> None:
    log = failure_line(5, "node2", RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    fault = find_fault(read_faults(), "failed", f"{failure_line(1, 'node1', RuntimeError('Broken pipe'))}\n{log}\n")
    assert fault and fault.nodes == ("node2",)
    victims = find_fault(read_faults(), "failed", failure_line(1, "node1", RuntimeError(f"{NCCL} Broken pipe")) + "\n")
    assert victims and victims.nodes == ()
    named = find_fault(
        faults_of(find_scheduler("slurm")),
        "failed",
        "srun: error: Task launch for StepId=7.0 failed on node node3: timeout",
    )
    assert named and named.nodes == ("node3",)


def test_a_table_with_a_bad_pattern_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text("faults:\n- {fault: x, kind: own, pattern: '(', meaning: m}\n- {fault: y, kind: odd}\n")
    with pytest.raises(CatalogueError, match=r"faults.yaml:2: .*not a regular expression") as caught:
        read_faults(path)
    assert len(caught.value.problems) == 4


def test_a_retry_is_a_new_job_with_fewer_retries() -> None:
    same = {"campaign": "c", "label": "l", "run_id": "r", "identity": "i"}
    same |= {"proxy": "PROXY", "data": "SQuAD", "origin": "o"}
    failed = job_row("k", job_id="7", state="FAILED", status="failed", retries=3, restarts=1, fault="f", bad_nodes="n1",
                 checked_s=9.0, ended_s=8.0, nodes="n[1-2]", exit_code=1, verdict="pass", **same)  # fmt: skip
    again = repeated(failed, 50.0)
    assert again == job_row("k#2", retry_of="k", retries=1, submitted_s=50.0, **same)
    assert repeated(again, 60.0).key == "k#3"


@pytest.mark.parametrize(
    ("asked", "bad", "without"),
    [(None, ("n1",), "n1"), ("n[8-9]", ("n1", None, "n2"), "n[8-9],n1,n2"), ("n8,n9", (None,), "n8,n9"),
     (None, (None,), None)],
)  # fmt: skip
def test_nodes_that_the_next_try_leaves_out(
    asked: str | None, bad: tuple[str | None, ...], without: str | None
) -> None:
    assert excluded(asked, *bad) == without


def test_a_submission_is_found_by_its_script_once() -> None:
    theirs = SlurmJob(job_id="5", state="RUNNING", command="/home/x/train.sh")
    ours = SlurmJob(job_id="7", state="PENDING", command="/runs/e/e_1/e/sbatch_e.sh")
    assert find_submission(job_row(), [theirs, ours], set()) == "7"
    assert find_submission(job_row(), [theirs, ours], {"7"}) is None
    assert find_submission(job_row(run_dir="/runs/e/e_2/e"), [theirs, ours], set()) is None


def test_a_launch_without_an_id_takes_no_job_of_another_script(tmp_path: Path) -> None:
    """The output of the suite's script exists, but the script was interrupted before it named its job."""
    job = job_row(run_dir=str(tmp_path))
    job.folder.launch_output.write_text("launching\n")
    other = SlurmJob(job_id="9", state="RUNNING", command="/home/me/other.sh")
    assert find_submission(job, [other], set()) is None


def test_the_worst_end_decides() -> None:
    def code(*statuses: str, fault: str | None = None) -> int:
        return exit_code([job_row(status=status, fault=fault) for status in statuses])

    assert code() == 0
    assert code("success", "success") == 0
    assert code("success", "cancelled") == 130
    assert code("cancelled", "running") == 6
    assert code("invalid", "success") == 6
    assert code("failed", fault="node_fail") == 7
    assert (
        exit_code([job_row(status="failed", fault="node_fail"), job_row(status="failed"), job_row(status="invalid")])
        == 4
    )


def test_slow_nodes_are_found_by_runs_of_the_same_recipe_elsewhere() -> None:
    def run(nodes: str, step_time_s: float | None, **changes: object) -> Job:
        return job_row(nodes=nodes, step_time_s=step_time_s, status="success", **changes)

    jobs = [
        run("n[1-2]", 1.0),
        run("n[2-3]", 1.5),
        run("n[3-4]", 1.5),
        run("n[1,4]", 1.0),
        run("n1", 9.0, experiment="other"),
        job_row(nodes="n3", status="failed", bad_nodes="n3"),
        job_row(nodes=None, status="failed"),
    ]
    slow, *others = node_records(jobs)
    assert slow == NodeRecord("n3", runs=3, failures=1, blamed=1, slowdown=1.5)
    assert [(record.node, record.slowdown) for record in others] == [("n2", 1.0), ("n4", 1.0), ("n1", 1 / 1.5)]


# Of a real slurmdbd 22.05, with SLURM_TIME_FORMAT=%s; for people to read, with | in place of what ends a field.
ACCOUNTS = """\
1|COMPLETED|0:0|node[1-2]|None|1795277429|1795277429|1795277429|sbatch --parsable a.sh 0 0
2|FAILED|3:0|node[1-2]|NonZeroExitCode|1795277429|1795277429|1795277429|sbatch --parsable /runs/a.sh
4|CANCELLED by 0|0:0|node[1-2]|None|1795277429|1795277432|1795277438|sbatch -J 'odd|name' --comment=a=b c=d /x/a.sh
5_1|COMPLETED|0:0|node2|None|1795277429|1795277438|1795277439|sbatch --parsable --array=0-2 -N1 a.sh
8|COMPLETED|0:0|node[1-2]|None|1795277300|1795277301|1795277302|sbatch --parsable of_a_controller_before.sh
8|NODE_FAIL|0:0|node[1-2]|None|1795277468|1795277469|1795277470|sbatch --parsable --requeue a.sh
8|RUNNING|0:0|node[1-2]|BeginTime|1795277470|1795277477|Unknown|sbatch --parsable --requeue a.sh
9|PENDING|0:0|None assigned|None|1795277480|Unknown|Unknown|
10|REQUEUED|0:0|node1|None|1|2|3|
10|CANCELLED by 1000|0:15|node1|None|1|2|3|
"""


def test_accounts_as_a_real_slurmdbd_prints_them() -> None:
    found = parse_accounts("".join(line.replace("|", FIELD, 8) for line in ACCOUNTS.splitlines(keepends=True)))
    assert list(found) == ["1", "2", "4", "5_1", "8", "9", "10"]
    assert (found["1"].state, found["1"].exit_code, found["1"].ended_s) == ("COMPLETED", 0, 1795277429)
    assert (found["2"].exit_code, found["2"].reason, found["2"].command) == (
        3,
        "NonZeroExitCode",
        "sbatch --parsable /runs/a.sh",
    )
    assert (found["4"].state, found["4"].cancelled_by) == ("CANCELLED", "0")
    assert found["4"].command == "sbatch -J 'odd|name' --comment=a=b c=d /x/a.sh"
    assert (found["8"].state, found["8"].restarts, found["8"].ended_s) == ("RUNNING", 1, None)
    assert found["9"] == SlurmJob(job_id="9", state="PENDING", submitted_s=1795277480)
    assert (found["10"].exit_code, found["10"].signal, found["10"].restarts) == (0, 15, 1)
    assert parse_accounts("") == {}


QUEUE = """\
4|PENDING|0|0|Resources||1795277429|1795284600|1795288200|/runs/e/e_1/e/sbatch_e.sh|
2|FAILED|768|0|NonZeroExitCode|node[1-2]|1795277429|1795277429|1795277429|/tmp/w/a|b.sh|
3|CANCELLED|15|0|None|node[1-2]|1795277430|1795277430|1795277432|/tmp/w/a.sh|
5_0|COMPLETED|0|1|None|node1|1795277429|1795277438|1795277439|/tmp/w/a.sh 1 0|
"""


def test_the_queue_as_a_real_controller_prints_it() -> None:
    lines = [line.replace("|", FIELD, 9).removesuffix("|") for line in QUEUE.splitlines()]
    found = parse_queue("".join(f"{line}{RECORD}\n" for line in lines))
    assert (found["4"].state, found["4"].reason, found["4"].nodes) == ("PENDING", "Resources", None)
    assert (found["4"].started_s, found["4"].ended_s, found["4"].exit_code) == (None, None, None)
    assert (found["2"].exit_code, found["2"].signal, found["2"].command) == (3, 0, "/tmp/w/a|b.sh")
    assert (found["3"].exit_code, found["3"].signal) == (0, 15)
    assert (found["5_0"].state, found["5_0"].restarts, found["5_0"].ended_s) == ("COMPLETED", 1, 1795277439)


def test_a_row_of_a_narrow_terminal_has_id_state_and_reason() -> None:
    """Slurm's state is named where it says more than the run's status."""
    values = {"workload": "pretrain_llama3.1", "nodes": "node[1-12]", "step_time_s": 12.3456}
    ended = [
        job_row(job_id="1234567", state="COMPLETED", status="success", **values),
        job_row(job_id="1234568", state="TIMEOUT", status="success", reason="after the last step", **values),
    ]
    lines = shown_lines(jobs_table(ended, 2))
    text = "\n".join(lines)
    rows = [line for line in lines if line.startswith("12345")]
    assert [row.split()[:2] for row in rows] == [["1234567", "success"], ["1234568", "success:"]]
    assert "TIMEOUT" in text
    assert "COMPLETED" not in text
    assert "after the last" in text


def test_a_job_is_shown_with_its_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", gpu_record(), times_around(13.15))
    row = job_row(run_dir=str(folder), status="success")
    record = read_run(row)
    cells = dict(line[:2] for line in job_table(row, record).rows)
    assert cells["verdict"].startswith("REGRESSED (soft): 7.2 % slower than published (")
    assert job_document(row, record)["verdict_sentence"] == cells["verdict"]
    assert "verdict" not in dict(line[:2] for line in job_table(row, None).rows)


def test_verdicts_are_listed_if_there_are_any_and_a_proxy_not_as_its_model() -> None:
    proxy = job_row(workload="pretrain_llama3.1", size="405b", proxy="PROXY (8 of 126 layers)")
    rows = [job_row(job_id="1", verdict="regressed", step_time_s=13.15), proxy]
    table = jobs_table(rows, 2)
    place = [column.header for column in table.columns].index("verdict")
    assert [row[place] for row in table.rows] == ["regressed", ""]
    assert table.rows[1][2].startswith("pretrain_llama3.1 405b PROXY (8 of 126 layers) ")
    assert "verdict" not in [column.header for column in jobs_table([proxy], 1).columns]
