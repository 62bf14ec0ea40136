# SPDX-License-Identifier: Apache-2.0
"""Nodes beside each other, what is kept of their check, and the lists that jobs avoid; with no Slurm."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from job_rows import job_row
from shown_tables import shown_lines

from llmb.base.errors import InfrastructureError, UsageError
from llmb.cli.main import app, exit_code_of
from llmb.jobs.history import open_history
from llmb.jobs.wait import PATIENCE_S
from llmb.launch.jobspec.job_options import JobOptions
from llmb.launch.local import LocalScheduler
from llmb.launch.scheduler_lookup import SCHEDULERS, cluster_schema, find_scheduler
from llmb.launch.scheduler_port import JobAnswers, JobHandle, JobState, NodeState, Scheduler, Submission
from llmb.launch.site.site import Site
from llmb.nodes.doctor import check_nodes
from llmb.nodes.doctor.check_nodes import CheckTerms, NodesCheck, check_order
from llmb.nodes.doctor.check_records import ANSWER, Check, NodeReport, worst
from llmb.nodes.doctor.checked_nodes import (
    CheckFolder,
    JudgedNodes,
    NodesRequest,
    NodesResult,
    Problem,
    compared,
    excluded_nodes,
    last_check,
    new_check,
    stored,
    write_judged,
    write_result,
)
from llmb.nodes.doctor.checks.host import TICK_S, read_shared_clock, reading
from llmb.nodes.doctor.rules import BETWEEN, rule, rules
from llmb.reports.doctor_report import nodes_document, nodes_tables
from llmb.runs.folder import BrokenRecord
from llmb.runs.record import SubmittedJob

WHEN = "2026-11-22T11:00:00+00:00"
SLURM = find_scheduler("slurm")
Run = Callable[..., tuple[NodesCheck, bool]]


def report(node: str, *checks: Check, ahead_s: float | None = None, unsure_s: float = 0.005) -> NodeReport:
    return NodeReport(
        node=node,
        checked_at=WHEN,
        status=worst(check.status for check in checks),
        checks=checks,
        clock_ahead_s=ahead_s,
        clock_uncertainty_s=None if ahead_s is None else unsure_s,
    )


def added(reports: Sequence[NodeReport]) -> dict[str, list[tuple[str, str, Any]]]:
    """What the comparison adds to each node and does not pass."""
    names = [item.name for item in rules().values() if item.area == BETWEEN]
    return {
        item.node: [
            (check.name, check.status, check.value)
            for check in item.checks
            if check.name.startswith(tuple(names)) and check.status != "pass"
        ]
        for item in compared(reports)
    }


@pytest.mark.parametrize(
    ("name", "values", "odd"),
    [
        ("gpu_driver", ["550.54", "550.54", "535.18", "550.54"], {"node2": "535.18; 550.54 on 3 other nodes"}),
        # Without a majority every node is told of the others.
        ("software_torch", ["2.0", "2.1"], {"node0": "2.0; 2.1 on 1 other node", "node1": "2.1; 2.0 on 1 other node"}),
        ("memory_size_gib", [2015, 2014, 2016], {}),  # firmware takes some
        ("memory_size_gib", [2015, 1511, 2016], {"node1": "1511; 2015 on 2 other nodes"}),
    ],
)
def test_the_node_unlike_most_is_named_with_both_values(name: str, values: list[Any], odd: dict[str, str]) -> None:
    found = added([report(f"node{n}", rule(name).passed(value)) for n, value in enumerate(values)])
    assert {node: items for node, items in found.items() if items} == {
        node: [(f"nodes_same_{name}", "warn", text)] for node, text in odd.items()
    }


def test_what_a_check_found_bad_and_what_may_differ_is_not_compared() -> None:
    few = rule("gpu_count").check("fail", "7 of 8")
    reports = [report("node0", few, rule("gpu_temperature").passed("at most 40 °C (GPU 1)"))]
    reports += [report(f"node{n}", rule("gpu_count").passed("8 of 8")) for n in (1, 2)]
    assert not any(added(reports).values())


def test_a_clock_is_off_by_more_than_its_uncertainty() -> None:
    ahead = {"node0": 0.02, "node1": 0.0, "node2": 3.5}
    reports = [report(node, ahead_s=seconds) for node, seconds in ahead.items()]
    assert added(reports)["node2"] == [("nodes_clock", "warn", "3.480 s ahead of the median of 3 nodes (± 0.005 s)")]
    assert not added(reports)["node0"]
    vague = [*reports[:2], report("node2", ahead_s=3.5, unsure_s=3.0)]
    assert not any(added(vague).values())
    assert not any(added([report("node0", ahead_s=9.0)]).values()), "one clock alone is not off"


def test_a_reading_of_the_clock_has_the_truth_within_its_uncertainty(tmp_path: Path) -> None:
    found = reading(before=100.0, dated=98.0, after=100.2)
    assert found.ahead_s == pytest.approx(2.1, abs=TICK_S)
    assert found.ahead_s - found.uncertainty_s <= 2.0 - TICK_S + 1e-9
    assert found.ahead_s + found.uncertainty_s >= 2.2 - 1e-9
    here = read_shared_clock(tmp_path, ".clock")
    # Where a busy host takes a CPU away, the kernel's clock for files may lag behind by more than a tick.
    assert abs(here.ahead_s) <= here.uncertainty_s + 1
    assert [*tmp_path.iterdir()] == []


TAKEN: Callable[[], Scheduler]


class Scripted(LocalScheduler):
    """Answers what a test has decided, and keeps what it is asked for."""

    name, title = "slurm", "Slurm"

    def __init__(self, **phases: Sequence[JobState]) -> None:
        self.phases = {node: list(states) for node, states in phases.items()}
        self.cancelled: list[str] = []
        self.rejects: Mapping[str, str] = {}
        self.unusable: dict[str, NodeState] = {}
        self.calls = {"states": 0, "nodes": 0, "cancel": 0}

    def submit(self, job: Submission) -> SubmittedJob:
        node = str(job.spec.node)
        if node in self.rejects:
            raise UsageError(self.rejects[node])
        return SubmittedJob(scheduler="slurm", job_id=f"job-{node}", submitted_at=WHEN)

    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        self.calls["states"] += 1
        return JobAnswers({job.key: self._next(node_of(job)) for job in jobs})

    def _next(self, node: str) -> JobState:
        left = self.phases[node]
        return left.pop(0) if len(left) > 1 else left[0]

    def cancel(self, jobs: Sequence[JobHandle]) -> None:
        self.calls["cancel"] += 1
        self.cancelled += map(node_of, jobs)

    def nodes(self, listed: str | None, partition: str | None, time_out_s: float) -> dict[str, NodeState]:
        self.calls["nodes"] += 1
        return {name: self.unusable.get(name, UP) for name in (listed or "").split(",")}


def node_of(job: JobHandle) -> str:
    return job.folder.path.parent.name


UP = NodeState(state="IDLE", usable=True)


def state(phase: str, **values: Any) -> JobState:
    return JobState(job_id="1", phase=phase, **values)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time that passes only while something sleeps."""
    now = [1000.0]

    class Clock:
        monotonic = staticmethod(lambda: now[0])
        time = staticmethod(lambda: now[0])

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr(check_nodes, "time", Clock)
    return now


@pytest.fixture
def run(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Checks nodes with a scheduler of the test's own in place of Slurm's."""
    site = Site(install=tmp_path, config=cluster_schema()())

    def check_nodes(
        scheduler: Scripted, nodes: Mapping[str, NodeState], max_wait_s: float = 900.0
    ) -> tuple[NodesCheck, bool]:
        monkeypatch.setitem(SCHEDULERS, "slurm", (__name__, "TAKEN"))
        monkeypatch.setattr(sys.modules[__name__], "TAKEN", lambda: scheduler, raising=False)
        find_scheduler.cache_clear()
        with open_history(tmp_path, print) as store:
            check = NodesCheck(
                store=store,
                terms=CheckTerms(site, JobOptions(), time_limit_min=10),
                folder=new_check(tmp_path, NodesRequest(started_at=WHEN, nodes=tuple(nodes), disk_bytes=0)),
                states=nodes,
                max_wait_s=max_wait_s,
                environ=os.environ,
                on_progress=lambda *_: None,
                say=lambda _: None,
            )
            return check, check.run()

    yield check_nodes
    monkeypatch.undo()
    find_scheduler.cache_clear()


def answers(check: NodesCheck) -> dict[str, tuple[str, Any]]:
    return {node: (item.status, item.checks[0].value) for node, item in check.reports.items()}


def test_every_end_of_a_node_is_a_result(run: Run, clock: list[float]) -> None:
    ended = {
        "died": state("failed", meaning="the batch script ended with exit code 127"),
        "silent": state("completed"),
        "slow": state("timed_out"),
        "hung": state("running", started_s=clock[0]),
        "lost": state("node_fail", meaning="a node failed (lost)"),
        "mine": state("cancelled", meaning="cancelled by user 7"),
        "busy": state("queued", meaning="the nodes are busy (Resources)"),
        "forgotten": state("unknown"),
    }
    scheduler = Scripted(**{node: [item] for node, item in ended.items()})
    nodes = dict.fromkeys(ended, UP) | {"down": NodeState(state="DOWN*", usable=False, reason="Not responding")}
    check, complete = run(scheduler, nodes)
    assert complete
    assert answers(check) == {
        "down": ("fail", "Slurm does not schedule jobs on it: DOWN*: Not responding"),
        "died": ("fail", "its task wrote no report: the batch script ended with exit code 127"),
        "silent": ("fail", "its task wrote no report: it ended"),
        "slow": ("fail", "it did not answer within 10 min"),
        "hung": ("fail", "it did not answer within 10 min"),
        "lost": ("fail", "its task wrote no report: a node failed (lost)"),
        "mine": ("warn", "not checked: its job was cancelled by user 7"),
        "busy": ("warn", "not checked: its job was queued for 15 min: the nodes are busy (Resources)"),
        "forgotten": ("fail", "its task wrote no report: it ended"),
    }
    assert set(scheduler.cancelled) == {"hung", "busy", "forgotten"}
    result = check.result(WHEN)
    assert [item.node for item in result.reports] == [*nodes]
    assert (result.fit, set(result.unchecked)) == ([], {"mine", "busy"})


def test_a_node_that_is_drained_while_its_job_waits_fails_before_the_wait_is_over(run: Run, clock: list[float]) -> None:
    scheduler = Scripted(node1=[state("queued")])
    scheduler.unusable["node1"] = NodeState(state="IDLE+DRAIN", usable=False, reason="Prolog error")
    began = clock[0]
    check, _ = run(scheduler, {"node1": UP})
    assert answers(check) == {"node1": ("fail", "Slurm does not schedule jobs on it: IDLE+DRAIN: Prolog error")}
    assert scheduler.cancelled == ["node1"]
    assert clock[0] - began < 60


def test_256_nodes_are_asked_for_with_few_calls(run: Run) -> None:
    names = [f"node{number}" for number in range(256)]
    scheduler = Scripted(**{name: [state("queued")] * 3 + [state("failed", meaning="failed")] for name in names})
    check, _ = run(scheduler, dict.fromkeys(names, UP))
    assert len(check.reports) == 256
    assert scheduler.calls == {"states": 4, "nodes": 0, "cancel": 0}


def test_one_rejected_job_is_no_result_of_its_node(run: Run) -> None:
    scheduler = Scripted(node1=[state("timed_out")], node2=[state("timed_out")])
    scheduler.rejects = {"node1": "Slurm rejected the job: Requested node configuration is not available"}
    check, _ = run(scheduler, dict.fromkeys(["node1", "node2"], UP))
    assert answers(check)["node1"] == ("warn", f"not checked: {scheduler.rejects['node1']}")


def test_a_rejection_of_all_is_an_error_and_does_not_hide_the_check_before(tmp_path: Path, run: Run) -> None:
    before = kept(tmp_path, "2026-01-01T00:00:00+00:00", node1="fail")
    scheduler = Scripted()
    scheduler.rejects = dict.fromkeys(["a", "b", "c", "d"], "Slurm rejected the job: Invalid account")
    with pytest.raises(UsageError, match="Invalid account"):
        run(scheduler, dict.fromkeys(scheduler.rejects, UP))
    assert last_check(tmp_path).path == before.path


class Failing(Scripted):
    """Raises an error whenever it is asked for states."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def states(self, jobs: Sequence[JobHandle], time_out_s: float) -> JobAnswers:
        raise self.error


def test_a_scheduler_that_never_answers_again_leaves_nodes_unchecked(run: Run, clock: list[float]) -> None:
    began = clock[0]
    check, complete = run(Failing(InfrastructureError("Slurm does not answer")), {"node1": UP})
    assert complete
    assert answers(check) == {"node1": ("warn", "not checked: Slurm does not answer")}
    assert clock[0] - began > PATIENCE_S


def test_an_interruption_cancels_all_that_is_left_in_one_call(run: Run) -> None:
    scheduler = Failing(KeyboardInterrupt())
    check, complete = run(scheduler, dict.fromkeys(["node1", "node2"], UP))
    assert not complete
    assert set(answers(check).values()) == {("warn", "not checked: it was interrupted")}
    assert (scheduler.cancelled, scheduler.calls["cancel"]) == (["node1", "node2"], 1)


def test_a_damaged_report_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckFolder, "report", lambda folder, node: folder.path / ".request.json")
    check, _ = run(Scripted(node1=[state("queued")]), {"node1": UP})
    status, value = answers(check)["node1"]
    assert (status, "its report: it is damaged" in value) == ("fail", True)


def script_of(node: str, state: NodeState, flags: Mapping[str, str | None], **config: Any) -> str:
    site = Site(install=Path("/lustre/bench"), config=cluster_schema().model_validate(config))
    folder = CheckFolder(Path("/lustre/bench/.llmb/nodes/doctor/T"))
    order = check_order(CheckTerms(site, JobOptions(flags=flags, python="py"), 7), folder, node, state)
    return SLURM.script(order.spec(folder.job(node)), folder.job(node))


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]


def test_a_job_asks_for_the_whole_node_that_it_is_for() -> None:
    node = NodeState(state="IDLE", usable=True, gpus=8, partitions=("gpu", "debug"))
    training = {"exclude": "node7", "nodelist": "node1", "time": "00:07:00", "qos": "high"}
    settings = {"slurm": {"partition": "debug", "gres_type": "h100"}, "profiles": ["/etc/site.sh"]}
    script = script_of("node7", node, training, **settings)
    found = directives(script)
    target = {"nodes=1", "nodelist=node7", "exclusive", "mem=0", "gpus-per-node=h100:8", "time=00:07:00", "qos=high"}
    assert target <= {*found}
    assert "partition=debug" in found
    assert not [line for line in found if line.startswith(("exclude", "cpus-per-task"))]
    assert "output=/lustre/bench/.llmb/nodes/doctor/T/.jobs/node7/doctor/sbatch_doctor.out" in found
    assert "-m llmb.nodes.doctor.node /lustre/bench/.llmb/nodes/doctor/T node7" in script.replace(" \\\n    ", " ")


def test_a_node_is_asked_for_in_a_partition_that_has_it() -> None:
    node, other = NodeState(state="IDLE", usable=True, partitions=("gpu",)), {"slurm": {"partition": "other"}}
    for flags, config, partition in (({}, other, "gpu"), ({}, {}, "gpu"), ({"partition": "mine"}, {}, "mine")):
        found = directives(script_of("node1", node, flags, **config))
        assert f"partition={partition}" in found
        assert not [line for line in found if "gpu" in line and line != "partition=gpu"]


def kept(install: Path, started_at: str = WHEN, **statuses: str) -> CheckFolder:
    folder = new_check(install, NodesRequest(started_at=started_at, nodes=tuple(statuses), disk_bytes=0))
    reports = [
        Problem("warn", "not checked: x").report(node)
        if status == "unchecked"
        else report(node, rule("gpu_ecc_errors").check(status, "x"))  # type: ignore[arg-type]
        for node, status in statuses.items()
    ]
    write_result(folder, NodesResult(started_at=started_at, reports=tuple(reports)))
    return folder


def test_unfit_stands_for_the_bad_nodes_of_the_last_check(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(UsageError, match="no nodes have been checked yet"):
        excluded_nodes("unfit", tmp_path, SLURM, said.append)
    with pytest.raises(UsageError, match="no list of nodes"):
        find_scheduler("local").nodes("a,b", None, 1)  # a check of them never ended
    kept(tmp_path, "2026-11-20T00:00:00+00:00", node9="fail")
    kept(tmp_path, WHEN, node8="fail")
    kept(tmp_path, WHEN, node1="pass", node2="fail", node3="fail", node4="warn", node5="unchecked")
    listed = tmp_path / "bad"
    listed.write_text("# since Monday\nnode7 # DIMM\nnode[10-11],login1\n\n")
    assert excluded_nodes(f"node12,unfit,@{listed}", tmp_path, SLURM, said.append) == "login1,node[2-3,7,10-12]"
    assert said[0] == f"unfit: 2 of 5 nodes in the check of {WHEN}: node[2-3]"
    assert said[1] == "warning: node5 had no result in that check and may be unfit"
    assert excluded_nodes("node[1-2],Node3", tmp_path, SLURM, said.append) == "node[1-2],Node3"


def test_nodes_at_fault_in_runs_since_the_check_are_unfit_too(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    said: list[str] = []
    with open_history(tmp_path, said.append) as history:
        jobs = [
            job_row(key, bad_nodes=nodes, ended_s=now.timestamp() - ago_s, submitted_s=now.timestamp() - 9000)
            for key, nodes, ago_s in [("a", "node7", 5000), ("b", "node8,node9", 60), ("c", None, 60)]
        ]
        history.add(jobs)
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == "node[7-9]", "of the last day, without a check"
    kept(tmp_path, (now - timedelta(hours=1)).isoformat(timespec="seconds"), node1="fail", node2="pass")
    said.clear()
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == "node[1,8-9]"
    assert said[1].startswith("unfit: at fault in runs since ") and said[1].endswith(": node[8-9]")


def test_the_newest_check_and_the_one_before_are_kept(tmp_path: Path) -> None:
    folders = [kept(tmp_path, f"2026-11-20T00:00:0{second}+00:00", node1="pass") for second in range(5)]
    running = new_check(tmp_path, NodesRequest(started_at=WHEN, nodes=("node1",), disk_bytes=0))
    left = {path.name for path in (tmp_path / ".llmb" / "health").iterdir()}
    assert left == {folders[-1].path.name, running.path.name}
    new_check(tmp_path, NodesRequest(started_at=WHEN, nodes=("node1",), disk_bytes=0))
    assert running.path.exists(), "it has not ended"


def test_a_pairwise_measurement_counts_beside_the_check(tmp_path: Path) -> None:
    said: list[str] = []
    older = JudgedNodes(started_at="2026-11-20T00:00:00+00:00", fit=(), unfit=("node9",), undecided=())
    judged = JudgedNodes(started_at=WHEN, fit=("node3",), unfit=("node1", "node4"), undecided=("node5",))
    for each in (older, judged):
        write_judged(tmp_path, each)
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == "node[1,4]"
    assert said[:2] == [
        f"unfit: 2 of 4 nodes in the pairwise measurement of {WHEN}: node[1,4]",
        "warning: node5 had no result in that pairwise measurement and may be unfit",
    ]
    kept(tmp_path, WHEN, node1="pass", node2="fail", node4="fail")
    said.clear()
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == "node[1-2,4]"
    told = [text.partition(" in the ")[2].partition(" of ")[0] for text in said if text.startswith("unfit:")]
    assert told == ["check", "pairwise measurement"]
    (tmp_path / ".llmb" / "pairwise.json").write_text("{}")
    with pytest.raises(BrokenRecord, match="damaged"):
        excluded_nodes("unfit", tmp_path, SLURM, said.append)


def test_an_old_check_is_used_with_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    now = datetime.now(UTC)
    kept(tmp_path, (now - timedelta(hours=30)).isoformat(timespec="seconds"), node1="fail")
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == "node1"
    assert said[1].startswith("warning: that check is 30 hours old")
    kept(tmp_path, now.isoformat(timespec="seconds"), node1="pass")
    said.clear()
    assert excluded_nodes("unfit", tmp_path, SLURM, said.append) == ""
    assert len(said) == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("@/none", "cannot be read"),
        ("unfit,node[1-x]", "is not a list of nodes"),
        ("unfit,node[1-", "is not a list of nodes"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error(tmp_path: Path, text: str, what: str) -> None:
    kept(tmp_path, node1="fail")
    with pytest.raises(UsageError, match=what):
        excluded_nodes(text, tmp_path, SLURM, lambda _: None)


@pytest.mark.parametrize("command", ["submit", "bulk", "launch", "bench"])
def test_the_script_of_a_job_excludes_the_unfit_nodes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(tmp_path, node1="pass", node2="fail", node3="fail")
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    (tmp_path / "cluster_config.yaml").write_text("gpu_type: h100\n")
    file = tmp_path / "weekly.txt"
    file.write_text("pretrain_llama3.1 405b bf16,fp8 512 exclude=unfit\n")
    asked = {
        "submit": ["pretrain_llama3.1", "405b", "--scale", "512", "--exclude", "unfit"],
        "bench": ["gpus", "--nodes", "2", "--exclude", "unfit"],
        "bulk": [str(file), "--json"],
        "launch": ["pretrain_llama3.1", "--size", "405b", "--exclude", "unfit", "--dtype", "bf16"],
    }[command]
    monkeypatch.setenv("JOB_TOTAL_GPUS", "512") if command == "launch" else None
    code = exit_code_of(app, [command, *asked, "--dry-run"])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert err.count(f"unfit: 2 of 3 nodes in the check of {WHEN}: node[2-3]") == 1
    if command != "bulk":
        assert "#SBATCH --exclude=node[2-3]" in out


def test_the_last_check_is_shown_again_and_one_node_of_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    assert exit_code_of(app, ["doctor", "--last"]) == 2
    folder = kept(tmp_path, node1="pass", node2="fail", node3="unchecked")
    capsys.readouterr()
    assert exit_code_of(app, ["doctor", "--last", "--json"]) == 4
    document = json.loads(capsys.readouterr().out)
    assert (document["fit_nodes"], document["unfit_nodes"], document["unchecked_nodes"]) == ("node1", "node2", "node3")
    assert document == nodes_document(stored(folder), str(folder.path), SLURM.host_list)
    assert exit_code_of(app, ["doctor", "--last", "--nodes", "node1"]) == 0
    assert "node1: PASS" in capsys.readouterr().out
    assert exit_code_of(app, ["doctor", "--last", "--nodes", "node4"]) == 2
    for damaged in ("node[1-x]", "node[1-"):
        assert exit_code_of(app, ["doctor", "--last", "--nodes", damaged]) == 2


def test_a_check_whose_client_was_killed_shows_what_has_been_reported(tmp_path: Path) -> None:
    folder = new_check(tmp_path, NodesRequest(started_at=WHEN, nodes=("node1", "node2", "node3"), disk_bytes=0))
    folder.report("node1").write_text(report("node1", rule("gpu_driver").passed("550")).model_dump_json())
    folder.report("node3").write_text('{"node"')
    result = stored(last_check(tmp_path))
    assert (result.fit, result.unchecked, result.unfit) == (["node1"], ["node2"], ["node3"])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--nodes", "node1", "--all"), "cannot be combined"),
        (("--nodelist-file", "/none"), "the list of nodes cannot be read"),
        (("--last", "--partition", "gpu"), "--last cannot be combined with --partition or --all"),
        (("--nodes", "node1", "--gpu-type", "h1000"), "unknown GPU type 'h1000'"),
    ],
)
def test_mistakes_are_explained_before_anything_is_queued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    what: str,
) -> None:
    monkeypatch.setenv("LLMB_INSTALL", str(tmp_path))
    assert exit_code_of(app, ["doctor", *options]) == 2
    assert what in capsys.readouterr().err
    assert not (tmp_path / ".llmb").exists()


def test_the_table_has_a_row_per_node_and_fits_80_columns() -> None:
    everywhere = rule("kernel_transparent_hugepage").check("warn", "never")
    reports = [report(f"node{n:03d}", everywhere, rule("gpu_driver").passed("550")) for n in range(5)]
    reports[3] = report("node003", everywhere, rule("gpu_ecc_errors").check("fail", "uncorrected: 2 on GPU 5"))
    reports[4] = Problem("fail", "Slurm does not schedule jobs on it: DOWN*: Not responding", "state").report("node004")
    reports.append(Problem("warn", "not checked: its job was queued for 15 min").report("node005"))
    result = NodesResult(started_at=WHEN, reports=tuple(compared(reports)))
    rows, lists = nodes_tables(result, "/lustre/x", SLURM.host_list)
    assert [(row[0], row[1]) for row in rows.rows] == [
        ("(all)", ""),
        ("node004", "FAIL"),
        ("node003", "FAIL"),
        ("node005", "-"),
        ("node000", "WARN"),
        ("node001", "WARN"),
        ("node002", "WARN"),
    ]
    text = "\n".join(shown_lines((rows, lists)))
    assert text.count("never") == 1, "what all nodes have in common is told once"
    assert text.count("transparent_hugepage/enabled") == 1
    assert max(map(len, text.splitlines())) <= 80
    assert [row[1:] for row in lists.rows] == [("3", "node[000-002]"), ("2", "node[003-004]"), ("1", "node005")]
    assert reports[4].checks[0].name == ANSWER
