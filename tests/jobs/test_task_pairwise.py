# SPDX-License-Identifier: Apache-2.0
"""``llmb bench collectives --pairwise`` on a real Slurm of four nodes, one of them slow and one that hangs."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from called_here import call_llmb
from slurm_cluster import HOW_TO_GET, SlurmCluster, missing_programs

from llmb.nodes.bench import pair_rounds

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
NODES = ("node1", "node2", "node3", "node4")
SLOW, HUNG = "node2", "node4"
ALONE_S = 40
"""For so long the node that hangs is waited for."""
SETTINGS = """\
gpu_type: cpu
environment: {{GLOO_SOCKET_IFNAME: lo, OMP_NUM_THREADS: 1, PYTHONPATH: {folder}}}
slurm: {{partition: gpu, gpus_per_node: 1}}
"""
SITE = f"""\
import os, signal, time

node = os.environ.get("SLURMD_NODENAME") if "RANK" in os.environ else None
if node == "{HUNG}":
    os.kill(os.getpid(), signal.SIGSTOP)
if node == "{SLOW}":
    import torch.distributed as dist
    usual = dist.all_reduce
    def all_reduce(*arguments, **options):
        time.sleep(0.1)
        return usual(*arguments, **options)
    dist.all_reduce = all_reduce
"""
"""What the interpreter runs first: on one node all_reduce is slow, and on another every process hangs."""


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


@pytest.mark.usefixtures("forked_programs")
def test_the_slow_node_and_the_one_that_hangs_are_named_and_left_out(
    four_nodes: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = tmp_path / "install"
    install.mkdir()
    (tmp_path / "sitecustomize.py").write_text(SITE)
    (install / "cluster_config.yaml").write_text(SETTINGS.format(folder=tmp_path))
    for name, value in {**four_nodes.environ, "LLMB_INSTALL": str(install)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pair_rounds, "ALONE_S", ALONE_S)

    measured = call_llmb("bench", "collectives", "--pairwise", "--nodes", "4", "--wait", "--json")
    assert measured.returncode == 4, measured.stderr
    document = json.loads(measured.stdout)
    (run_folder,) = install.glob(".llmb/bench_jobs/*/*")
    log = "\n".join(f"{path}:\n{path.read_text()}" for path in run_folder.rglob("log*"))
    found = {node["node"]: (node["fit"], node["evidence"]) for node in document["nodes"]}
    assert {node: fit for node, (fit, _) in found.items()} == {
        "node1": True, SLOW: False, "node3": True, HUNG: False
    }, (document, log)  # fmt: skip
    assert found["node1"][1] == found["node3"][1] == []
    (killed,) = found[HUNG][1]
    assert re.fullmatch(r"alone: it did not end within \d+ s and was killed", killed)
    assert {text.partition(":")[0] for text in found[SLOW][1]} == {"with node1", "with node3"}
    assert document["group"]["gb_per_s"] > 0
    assert (document["fit_nodes"], document["unfit_nodes"]) == ("node[1,3]", "node[2,4]")
    assert document["took_s"] <= document["limit_s"]
    assert re.search(
        r"4 nodes: about 1 min 45 s from the start of the job, at most 9 min 22 s if nodes hang", measured.stderr
    )
    assert "unfit nodes (2 of 4): node[2,4]" in measured.stderr

    shown = call_llmb("bench", "gpus", "--nodes", "2", "--exclude", "unfit", "--dry-run")
    assert "#SBATCH --exclude=node[2,4]" in shown.stdout
    assert "unfit: 2 of 4 nodes in the pairwise measurement of" in shown.stderr
