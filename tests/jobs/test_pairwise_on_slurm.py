# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives --pairwise`` on a real Slurm of four nodes, one of them slow and one that hangs.

It is called in an allocation, whose core on the first node its step holds: of the parts of a queued job it lacks the
queue, which ``tests/bench`` tests with other measurements.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from slurm_client import LLMB, wait_until
from slurm_cluster import HOW_TO_GET, SlurmCluster, missing_programs

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
NODES = ("node1", "node2", "node3", "node4")
STEP = ("salloc", "--nodes=4", "--ntasks-per-node=1", "srun", "--nodes=1", "--ntasks=1")
SLOW, HUNG = "node2", "node4"
SETTINGS = """\
gpu_type: cpu
environment: {{GLOO_SOCKET_IFNAME: lo, OMP_NUM_THREADS: 1, PYTHONPATH: {folder}}}
slurm: {{partition: gpu, gpus_per_node: 1}}
"""
SLOW_CARD = f"""\
import os
if os.environ.get("SLURMD_NODENAME") == "{SLOW}" and "RANK" in os.environ:
    import time
    import torch.distributed as dist
    usual = dist.all_reduce
    def all_reduce(*arguments, **options):
        time.sleep(0.1)
        return usual(*arguments, **options)
    dist.all_reduce = all_reduce
"""


@pytest.fixture(scope="module")
def four_nodes(
    needs: Callable[[str, bool, str], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    needs("slurm", not missing_programs(), HOW_TO_GET)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"), nodes=NODES)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def stop_processes(node: str, folder: Path) -> int:
    """Stops what a job runs on a node, but not Slurm's own; how many there are."""
    stopped = 0
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environ, command = ((path / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in environ and os.fsencode(folder) in b" ".join(command):
            os.kill(int(path.name), signal.SIGSTOP)
            stopped += 1
    return stopped


def test_the_slow_node_and_the_one_that_hangs_are_named_and_left_out(four_nodes: SlurmCluster, tmp_path: Path) -> None:
    install = tmp_path / "install"
    install.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SLOW_CARD)
    (install / "cluster_config.yaml").write_text(SETTINGS.format(folder=tmp_path))
    environ = {**four_nodes.environ, "LLMB_INSTALL": str(install)}

    def llmb(*command: str, within: Sequence[str] = ()) -> "subprocess.Popen[str]":
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([*within, sys.executable, *LLMB, *command], env=environ, text=True, **pipes)

    measuring = llmb("bench", "collectives", "--pairwise", "--json", within=STEP)
    wait_until(lambda: bool([*install.glob(".llmb/bench_jobs/*/*/pairs/here-3.json")]), "the agent of the last node")
    (run_folder,) = install.glob(".llmb/bench_jobs/*/*")
    assert stop_processes(HUNG, run_folder)
    out, err = measuring.communicate(timeout=900)
    assert measuring.returncode == 4, err
    document = json.loads(out)
    log = "\n".join(path.read_text() for path in run_folder.glob("log*"))
    found = {node["node"]: (node["fit"], node["evidence"]) for node in document["nodes"]}
    assert {node: fit for node, (fit, _) in found.items()} == {
        "node1": True, SLOW: False, "node3": True, HUNG: False
    }, (document, log)  # fmt: skip
    assert found["node1"][1] == found["node3"][1] == []
    assert found[HUNG][1] == ["it hung: nothing came of it alone"]
    assert {text.partition(":")[0] for text in found[SLOW][1]} == {"with node1", "with node3"}
    assert document["group"]["gb_per_s"] > 0
    assert (document["fit_nodes"], document["unfit_nodes"]) == ("node[1,3]", "node[2,4]")
    assert document["took_s"] <= document["limit_s"]
    assert re.search(r"4 nodes: about 1 min 45 s from now, at most 11 min 2 s if nodes hang", err)
    assert "2 of 4 nodes are not fit: node[2,4]" in err

    script, said = llmb("bench", "gpus", "--nodes", "2", "--exclude", "unfit", "--dry-run").communicate()
    assert "#SBATCH --exclude=node[2,4]" in script
    assert "unfit: 2 of 4 nodes in the pairwise measurement of" in said
