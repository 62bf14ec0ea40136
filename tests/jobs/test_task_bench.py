# SPDX-License-Identifier: Apache-2.0
"""``llmb bench`` between the nodes of a real Slurm."""

from pathlib import Path

import pytest

from llmb.nodes.bench.measurements import read_measurements
from llmb.readers.nccl.nccl_tests import read_test_tables

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
NODES = ("--nodes", "2", "--ranks", "1")
SIZES = ("--max-size", "1KiB", "--factor", "128", "--iterations", "2", "--warmup", "1")


def test_collectives_between_two_nodes(client, tmp_path) -> None:
    done = client.run("bench", "collectives", "all_reduce", "alltoall", *NODES, *SIZES, "--wait")
    path = tmp_path / "table.txt"
    path.write_text(done.stdout)
    tables = read_test_tables(path)
    assert [(table.name, table.ranks) for table in tables] == [("all_reduce", 2), ("alltoall", 2)]
    assert " on      node1 device" in done.stdout and " on      node2 device" in done.stdout
    assert "requests nodes 2" in done.stderr
    (kept,) = read_measurements(client.install)
    # torchrun numbers nodes by name, then by the ids of its processes: these nodes are one machine.
    assert kept.node in ("node1", "node2")
    assert {row.shape for row in kept.measurements} == {"in place, 2 nodes", "out of place, 2 nodes"}
    assert {row.wrong for row in kept.measurements} == {0, None}


@pytest.mark.measured
def test_a_job_that_nobody_waits_for_keeps_its_result(client) -> None:
    queued = client.json("bench", "collectives", "sendrecv", *NODES, *SIZES)
    run_dir, job_id = Path(queued["run_dir"]), queued["job_id"]
    (row,) = client.json("jobs", "wait", job_id)["jobs"]
    assert (row["kind"], row["subject"], row["scale"]) == ("benchmark", "collectives", 2)
    assert (row["state"], row["status"], row["nodes"]) == ("COMPLETED", "success", "node[1-2]")
    assert "sendrecv" in client.run("jobs", "log", job_id).stdout
    assert client.json("jobs", "list", "--kind", "run")["jobs"] == client.json("runs")["runs"] == []
    assert "is a benchmark (collectives), not a run" in client.run("result", job_id, code=2).stderr
    held = client.json("bench", "gpus", "--nodes", "2", "--ranks", "1", "--slurm-arg", "hold")["job_id"]
    client.run("jobs", "cancel", held)
    (row,) = client.json("jobs", "wait", held, code=130)["jobs"]
    assert (row["kind"], row["subject"], row["status"]) == ("benchmark", "gpus", "cancelled")
    (kept,) = read_measurements(client.install)
    assert {row.case for row in kept.measurements} == {"sendrecv"}
    (table,) = read_test_tables(run_dir / "collectives.txt")
    assert table.name == "sendrecv"


def test_every_node_reports_by_itself(client) -> None:
    document = client.json("bench", "gpus", "--nodes", "2", "--ranks", "2", "--seconds", "0.2", "--wait", code=None)
    found = [(one["node"], one["local_rank"]) for one in document["devices"]]
    assert sorted(found) == [("node1", 0), ("node1", 1), ("node2", 0), ("node2", 1)]
    assert document["missing_nodes"] == [] and document["failed"] == []
    assert {kept.node for kept in read_measurements(client.install)} == {"node1", "node2"}


@pytest.mark.measured
def test_workers_that_cannot_start_are_an_error(client) -> None:
    (client.install / "cluster_config.yaml").write_text(
        "gpu_type: cpu\npython: /bin/false\nslurm: {partition: gpu, gpus_per_node: 2}\n"
    )
    done = client.run("bench", "gpus", "--nodes", "2", "--wait", code=4)
    assert "without a result" in done.stderr
