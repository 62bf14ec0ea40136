# SPDX-License-Identifier: Apache-2.0
"""``llmb accept`` on a real Slurm of four nodes: one fails a check, one has a slow device; killed on the way."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing_programs

pytestmark = [pytest.mark.slurm, pytest.mark.measured]
CONFIG = """\
gpu_type: cpu
profiles: [{profile}]
slurm: {{partition: gpu, gpus_per_node: 1}}
"""
SLOWER = Path(__file__).parents[2] / "support" / "stopped_process.py"
WITHIN_S = 300


@pytest.fixture
def four_nodes(tmp_path: Path) -> Iterator[SlurmCluster]:
    assert not missing_programs()
    cluster = SlurmCluster(tmp_path / "slurm", nodes=("node1", "node2", "node3", "node4"))
    cluster.root.mkdir()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_bad_nodes_are_left_out_after_two_kills_and_the_next_acceptance_compares(
    four_nodes: SlurmCluster, tmp_path: Path
) -> None:
    install, profile = tmp_path / "install", tmp_path / "profile.sh"
    install.mkdir()
    profile.write_text('if [ "$SLURMD_NODENAME" = node4 ]; then export CHECKPOINT_DIR=/proc/none; fi\n')
    (install / "cluster_config.yaml").write_text(CONFIG.format(profile=profile))
    words = [sys.executable, "-m", "llmb.cli.main", "accept", "--nodes", "4", "--checks", "disk,kernel"]
    words += ["-w", "pretrain_llama3.1", "-s", "tiny", "--scale", "1", "--json"]
    environ = {**four_nodes.environ, "LLMB_INSTALL": str(install), "TMPDIR": str(tmp_path)}

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def killed_once_there_is(part: str) -> None:
        process, end = start(), time.monotonic() + WITHIN_S
        while not list(install.glob(f"acceptance/*/{part}.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    slower = subprocess.Popen([sys.executable, str(SLOWER), "node3", "0", "every_gpu"])
    try:
        killed_once_there_is("devices-job")
        killed_once_there_is("runs-3-job")
        out, err = start().communicate(timeout=WITHIN_S)
    finally:
        slower.kill()
        slower.wait()
    first = json.loads(out)
    assert (first["verdict"], first["unfit"]) == ("fail", ["node4", "node3"]), err
    rows = {row["name"]: row for row in first["parts"]}
    assert {name: row["status"] for name, row in rows.items()} == {
        "checks": "fail",
        "devices": "fail",
        "pairs": "left out",
        "runs": "measured",
    }
    assert "node4 disk_space_checkpoints" in rows["checks"]["value"]
    assert "node3 rank 0" in rows["devices"]["value"]
    assert all(Path(first[name]).is_file() for name in ("page", "archive"))
    jobs = json.loads(subprocess.run([*words[:3], "jobs", "list", "--json"], env=environ, capture_output=True).stdout)
    kinds = [job["kind"] for job in jobs["jobs"]]
    assert {kind: kinds.count(kind) for kind in {*kinds}} == {"check": 4, "benchmark": 1, "run": 3}, (
        "none is done twice"
    )
    out, err = start().communicate(timeout=WITHIN_S)
    second = json.loads(out)
    assert second["unfit"][0] == "node4", err
    change = {row["name"]: row for row in second["parts"]}["change"]
    assert change["reference"].endswith("before")
