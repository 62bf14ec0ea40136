# SPDX-License-Identifier: Apache-2.0
"""``llmb doctor`` over the nodes of a real Slurm, one of them unfit, and the campaign that avoids it."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import gpu_record, times_around, write_run
from slurm_cluster import SlurmCluster

from llmb.nodes.doctor.node import settings_here
from llmb.readers.samples.node_settings import together

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
WITHIN_S = 600
CONFIG = """\
gpu_type: cpu
profiles: [{profile}]
slurm: {{partition: gpu, gpus_per_node: 1}}
"""
MODELS = ("pretrain_llama3.1", "pretrain_nemotron4")
ONLY = ("--only", "disk,kernel", "--no-disk")


class Client:
    """``llmb`` on the test cluster; ``per_node`` is what a shell does on one node alone, before it is checked."""

    def __init__(self, slurm: SlurmCluster, folder: Path, python: str) -> None:
        self.slurm = slurm
        self.python = python
        self.folder = folder
        self.install = folder / "install"
        self.install.mkdir()
        self.profile = folder / "profile.sh"
        self.per_node("node2", ":")
        (self.install / "cluster_config.yaml").write_text(CONFIG.format(profile=self.profile))

    def per_node(self, node: str, commands: str) -> None:
        self.profile.write_text(f'if [ "$SLURMD_NODENAME" = {node} ]; then\n{commands}\nfi\n')

    def resume(self) -> None:
        """Takes node2 back; right after that, Slurm waits for its answer."""
        self.slurm.run("scontrol", "update", "nodename=node2", "state=resume")
        asked = ("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T")
        self.slurm.wait_for("idle nodes", lambda: self.slurm.run(*asked).stdout.split() == ["idle", "idle"])

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.python, "-m", "llmb.cli.main", *arguments],
            env={**self.slurm.environ, "LLMB_INSTALL": str(self.install), "TMPDIR": str(self.folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=WITHIN_S)
        return process.returncode, out, err

    def doctor(self, *options: str) -> tuple[int, dict[str, Any], str]:
        code, out, err = self.call("doctor", "--json", *ONLY, *options)
        return code, json.loads(out) if out else {}, err

    def jobs(self) -> list[str]:
        """States of the jobs of this root that have not ended."""
        lines = self.slurm.run("squeue", "-h", "-o", "%T %o").stdout.splitlines()
        return [line.split()[0] for line in lines if str(self.install) in line]


@pytest.fixture
def client(slurm: SlurmCluster, tmp_path: Path, forked_python: str) -> Iterator[Client]:
    made = Client(slurm, tmp_path, forked_python)
    yield made
    slurm.run("scancel", "--me")
    made.resume()


def answer(document: dict[str, Any], node: str) -> dict[str, Any]:
    (found,) = [item for item in document["nodes"] if item["node"] == node]
    return found


def test_the_unfit_node_is_named_and_the_next_campaign_avoids_it(client: Client) -> None:
    client.per_node("node2", "export CHECKPOINT_DIR=/proc/none")
    code, document, err = client.doctor("--nodes", "node[1-2]")
    assert (code, document["status"]) == (4, "fail"), err
    assert (document["fit_nodes"], document["unfit_nodes"], document["unchecked_nodes"]) == ("node1", "node2", "")
    assert "node2 is not fit: 1 check fails: disk_space_checkpoints" in err
    bad = [check["name"] for check in answer(document, "node2")["checks"] if check["status"] == "fail"]
    assert bad == ["disk_space_checkpoints"]
    for node in document["nodes"]:
        assert abs(node["clock_ahead_s"]) < 1, "both nodes have the clock of this machine"
        assert 0 < node["clock_uncertainty_s"] < 5
        kept = json.loads((Path(document["folder"]) / f"{node['node']}.json").read_text())
        assert kept["node"] == node["node"]
    code, out, _ = client.call("jobs", "list", "--kind", "check", "--json")
    rows = [(row["subject"], row["status"]) for row in json.loads(out)["jobs"]]
    assert rows == [("node1", "success"), ("node2", "success")], "each job has done its check"
    code, again, _ = client.doctor("--last")
    assert (code, again) == (4, document)
    file = client.folder / "weekly.txt"
    file.write_text("".join(f"{name} tiny fp32 1 steps=2 exclude=unfit repeats=2\n" for name in MODELS))
    code, out, err = client.call("bulk", str(file), "--yes", "--json")
    assert code == 0, err
    assert f"unfit: 1 of 2 nodes in the check of {document['started_at']}: node2" in err
    ids = [job["job_id"] for job in json.loads(out)["jobs"]]
    assert len(ids) == 4
    client.slurm.wait_for("the jobs to start", lambda: not set(states(client, ids)) & {"PENDING"})
    assert {places(client, item) for item in ids} == {"node1"}


def states(client: Client, ids: list[str]) -> list[str]:
    return [client.slurm.run("squeue", "-h", "-t", "all", "-j", item, "-o", "%T").stdout.strip() for item in ids]


def places(client: Client, job_id: str) -> str:
    return client.slurm.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%N").stdout.strip()


def test_a_drained_node_and_one_whose_task_dies_do_not_hide_the_other(client: Client) -> None:
    client.slurm.run("scontrol", "update", "nodename=node2", "state=drain", "reason=bad DIMM")
    began = time.monotonic()
    code, document, err = client.doctor("--nodes", "node[1-2]")
    assert code == 4, err
    (check,) = answer(document, "node2")["checks"]
    assert (check["name"], check["status"]) == ("nodes_answer", "fail")
    assert "DRAIN" in check["value"]
    assert check["value"].endswith(": bad DIMM")
    assert answer(document, "node1")["status"] != "fail"
    assert time.monotonic() - began < WITHIN_S
    code, document, err = client.doctor("--partition", "gpu")
    assert (code, [item["node"] for item in document["nodes"]]) == (0, ["node1"]), err
    assert "note: node2 is skipped: IDLE+DRAIN: bad DIMM" in err
    client.resume()
    client.per_node("node2", "srun() { echo 'the interpreter is gone' >&2; return 127; }")
    code, document, err = client.doctor("--nodes", "node[1-2]")
    assert (code, document["unfit_nodes"], document["fit_nodes"]) == (4, "node2", "node1"), err
    (check,) = answer(document, "node2")["checks"]
    assert "its task wrote no report" in check["value"]
    assert check["value"].endswith("exit code 127: the interpreter is gone")


@pytest.mark.measured
def test_ctrl_c_keeps_what_is_reported_and_cancels_the_rest(client: Client, interrupts: None) -> None:
    client.per_node("node2", "sleep 600")
    process = client.start("doctor", "--json", *ONLY, "--nodes", "node[1-2]")
    assert process.stderr
    # Said only once both jobs are queued: the first one may report before the second one has got its id.
    assert any("nodes checked: 1 of 2" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=WITHIN_S)
    document = json.loads(out)
    assert process.returncode == 130, err
    assert (document["fit_nodes"], document["unfit_nodes"], document["unchecked_nodes"]) == ("node1", "", "node2")
    assert answer(document, "node2")["checks"][0]["value"] == "not checked: it was interrupted"
    client.slurm.wait_for("the end of the job", lambda: not client.jobs())


def test_a_busy_node_is_neither_fit_nor_unfit(client: Client) -> None:
    client.slurm.run("sbatch", "--nodelist=node2", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
    code, document, err = client.doctor("--nodes", "node2", "--max-wait", "0")
    assert code == 0, err
    assert (document["fit_nodes"], document["unfit_nodes"], document["unchecked_nodes"]) == ("", "", "node2")
    assert answer(document, "node2")["checks"][0]["value"].startswith("not checked: its job was queued for 0 min")
    client.slurm.wait_for("the end of the job", lambda: not client.jobs())


def test_a_rejected_job_and_an_unknown_node_are_errors(client: Client) -> None:
    code, document, err = client.doctor("--nodes", "node[1-3]")
    assert (code, document) == (2, {})
    assert "this cluster has no node node3" in err
    code, document, err = client.doctor("--nodes", "node1", "--partition", "none")
    assert (code, document) == (2, {})
    assert "Slurm rejected the job" in err
    code, document, err = client.doctor("--partition", "gpus")
    assert "unknown partition 'gpus'; did you mean 'gpu'?" in err


def test_the_node_whose_settings_have_changed_is_named(client: Client) -> None:
    nodes = ("--nodes", "node[1-2]")
    here = settings_here(client.install, {})
    settings = together({"node1": here, "node2": here})
    record = gpu_record(scale=8, nodes=("node1", "node2")).model_copy(update={"settings": settings})
    fast = str(write_run(client.install / "runs", record, times_around(10.0)))
    code, out, err = client.call("doctor", *nodes, "--against", fast, "--fail-on-drift", "--json")
    assert (code, json.loads(out)["drift"]) == (0, []), err
    client.per_node("node2", "export NCCL_ALGO=Ring")
    code, out, err = client.call("doctor", *nodes, "--against", fast, "--fail-on-drift", "--json")
    changed = {"key": "variables.NCCL_ALGO", "before": None, "after": "Ring", "important": True}
    assert (code, json.loads(out)["drift"]) == (4, [{"node": "node2", **changed}]), err
    code, _, err = client.call("doctor", "--last")
    assert (code, "no nodes have been checked yet" in err) == (2, True), "nothing was checked"
