# SPDX-License-Identifier: Apache-2.0
"""The network of runs that ended: from their files to the record, the verdict and the causes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from recorded_runs import gpu_record, times_around, write_run

from llmb.base.missing import Missing
from llmb.jobs.read_run import read_folder, recorded_run
from llmb.reports.run_report import run_table
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.environment import RdmaPort
from llmb.runs.folder import RunFolder
from llmb.runs.record import RunRecord, read_record
from llmb.runs.trace_reports import NetworkUse, report_network
from llmb.verdict.explain_run import explain
from llmb.verdict.judge_run import judge_against

NODES = ("node1", "node2")
CARDS = tuple(f"mlx5_{card}" for card in range(8))


def record(
    nodes: Sequence[str] = NODES, cards: Sequence[str] = CARDS, rate: float = 400, **variables: str
) -> RunRecord:
    """A run whose nodes have these InfiniBand cards, and an Ethernet one."""
    base = gpu_record(scale=16 if len(nodes) == 2 else 8, nodes=nodes)
    assert base.environment
    ports = [
        RdmaPort(node=node, device=card, port=1, driver="mlx5_core", link_layer="InfiniBand", gbit_s=rate)
        for node in nodes
        for card in cards
    ] + [
        RdmaPort(node=node, device="mlx5_9", port=1, driver="mlx5_core", link_layer="Ethernet", gbit_s=100)
        for node in nodes
    ]
    environment = base.environment.model_copy(update={"rdma_ports": tuple(ports), "variables": variables})
    return base.model_copy(update={"environment": environment})


def words(network: str, node: str, *, cards: Sequence[str] = CARDS, direct: str = "/GDRDMA") -> str:
    listed = " ".join(f"[{number}]{card}:1/IB" for number, card in enumerate(cards))
    found = f"NET/IB : Using {listed} [RO]; OOB eth0:10.0.0.1<0>" if network == "IB" else "NET/IB : No device found."
    texts = (
        "NCCL version 2.28.9+cuda13.0",
        found,
        f"Using network {network}",
        f"Channel 00/0 : 0[0] -> 8[0] [send] via NET/{network}/0{direct if network == 'IB' else ''}",
        "16 coll channels, 16 collnet channels, 16 nvls channels, 32 p2p channels, 2 p2p channels per peer",
    )
    return "".join(f"{node}:41:42 [0] NCCL INFO {text}\n" for text in texts)


def files(texts: Sequence[str]) -> dict[str, str]:
    """As the first rank of each node leaves them."""
    return {f"nccl_network/rank-{8 * number}.log": text for number, text in enumerate(texts)}


def used(folder: Path, run: RunRecord, *texts: str) -> NetworkUse:
    for name, text in files(texts).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    found = report_network(RunFolder(folder), run.plan, run.environment)
    assert isinstance(found, NetworkUse)
    return found


def test_a_run_over_all_cards_has_no_fault(tmp_path: Path) -> None:
    found = used(tmp_path, record(), *(words("IB", node) for node in NODES))
    assert (found.fabric, found.gpudirect, found.nvls, found.nccl_version) == ("InfiniBand", True, True, "2.28.9")
    assert [group.nodes for group in found.nodes] == [NODES]
    assert found.nodes[0].devices == CARDS
    assert found.nodes[0].idle_devices is None, "only one rank of each node tells"
    assert (found.used, found.devices, found.idle_devices) == (("InfiniBand",), CARDS, None)
    assert found.source == "nccl_network/rank-0.log and 1 more"
    assert found.faults == ()


def test_sockets_beside_active_cards_are_a_fault_with_the_variables_that_may_be_the_reason(tmp_path: Path) -> None:
    found = used(tmp_path, record(NCCL_IB_DISABLE="1", NCCL_ALGO="Ring"), *(words("Socket", node) for node in NODES))
    assert found.faults == (
        "NCCL used TCP sockets on node1 and node2, though mlx5_0, mlx5_1 and 7 more can be used there",
        "the run has NCCL_IB_DISABLE=1",
    )


def test_nodes_may_have_names_with_a_domain(tmp_path: Path) -> None:
    run = record(nodes=("node1.example.org", "node2.example.org"))
    (fault,) = used(tmp_path, run, words("Socket", "node1")).faults
    assert "though mlx5_0, mlx5_1 and 7 more can be used there" in fault
    assert "4 devices" in used(tmp_path, run, words("IB", "node1", cards=CARDS[:4])).faults[0]


def test_sockets_where_no_card_is_seen_are_a_fault_where_the_gpu_type_has_a_network(tmp_path: Path) -> None:
    run = record()
    assert run.environment
    unseen = run.model_copy(update={"environment": run.environment.model_copy(update={"rdma_ports": ()})})
    (fault,) = used(tmp_path, unseen, words("Socket", "node1")).faults
    assert fault.startswith("NCCL used TCP sockets on node1; the network of NVIDIA H100")
    assert fault.endswith("has 50 GB/s per GPU")


@pytest.mark.parametrize(
    ("rate", "cards", "fault"),
    [
        (400, 4, "4 devices on node1 and node2 with 25 of 50 GB/s per GPU, without mlx5_4, mlx5_5 and 2 more"),
        (200, 8, "8 devices on node1 and node2 with 25 of 50 GB/s per GPU"),
        (400, 8, None),
    ],
)
def test_fewer_or_slower_cards_than_the_gpu_type_has_are_a_fault(
    tmp_path: Path, rate: float, cards: int, fault: str | None
) -> None:
    texts = (words("IB", node, cards=CARDS[:cards]) for node in NODES)
    assert used(tmp_path, record(rate=rate), *texts).faults == ((f"NCCL used {fault}",) if fault else ())


def test_cards_of_storage_beside_one_card_a_gpu_are_no_fault(tmp_path: Path) -> None:
    more = record(cards=(*CARDS, "mlx5_10", "mlx5_11"))
    assert used(tmp_path, more, *(words("IB", node) for node in NODES)).faults == ()


def test_channels_without_gpudirect_are_a_fault(tmp_path: Path) -> None:
    (fault,) = used(tmp_path, record(), *(words("IB", node, direct="") for node in NODES)).faults
    assert fault.startswith("NCCL used no GPUDirect RDMA on node1 and node2")


def test_nodes_with_different_networks_are_a_fault(tmp_path: Path) -> None:
    found = used(tmp_path, record(), words("IB", "node1"), words("Socket", "node2"))
    assert found.fabric is None
    assert found.faults[0].startswith("NCCL used TCP sockets on node2, though mlx5_0")
    assert found.faults[-1] == (
        "nodes used different networks: InfiniBand, 8 devices, GPUDirect on node1; TCP sockets, no GPUDirect on node2"
    )


def test_where_nothing_tells_the_network_the_reason_is_given(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()

    def reason(run: RunRecord) -> str:
        found = report_network(folder, run.plan, run.environment)
        assert isinstance(found, Missing)
        return found.reason

    assert reason(record()) == "NCCL reported nothing about its network in the run's files"
    assert reason(record(nodes=("node1",))) == "the run used one node"
    on_cpu = record().model_copy(update={"plan": record().plan.model_copy(update={"device": "cpu"})})
    foreign = gpu_record(scale=8, device=None)
    folder.log.write_text(words("Socket", "node1"))
    assert reason(foreign) == "the run used one node", "by the GPUs of a node"
    folder.log.unlink()
    assert reason(on_cpu) == "the ranks communicate with gloo, not NCCL"
    folder.log.write_text("iteration\n" + words("IB", "node1"))
    found = report_network(folder, record().plan, record().environment)
    assert found
    assert found.fabric == "InfiniBand", "the user's own NCCL_DEBUG has the lines in the log"


def ended(root: Path, mean_s: float, *texts: str, **variables: str) -> AnalyzedRun:
    """A run that ended, whose NCCL said these words."""
    path = write_run(root, record(**variables), times_around(mean_s), files=files(texts))
    return recorded_run(read_folder(RunFolder(path)))


def test_a_verdict_says_first_that_the_network_was_not_the_clusters(tmp_path: Path) -> None:
    slow = ended(tmp_path, 12.0, *(words("Socket", node) for node in NODES))
    good = [ended(tmp_path, mean, *(words("IB", node) for node in NODES)) for mean in (10.0, 10.01, 9.99)]
    (judged,) = judge_against([slow], good, "before")
    assert judged.verdict.soft
    assert judged.verdict.sentence.startswith("NCCL used TCP sockets on node1 and node2, though mlx5_0")
    assert f"'llmb judge {slow.id} --explain'); 20.0 % slower than the baseline" in judged.verdict.sentence
    keys = [condition.key for condition in judged.verdict.conditions if condition.effect == "weakens"]
    assert keys == ["network_fault", "fabric"]
    assert "network between nodes differs" in judged.verdict.sentence


def test_the_stored_verdict_and_the_table_say_it_too(tmp_path: Path) -> None:
    run = ended(tmp_path, 12.0, *(words("Socket", node) for node in NODES))
    assert run.record
    assert run.record.result
    result = run.record.result
    assert result.verdict
    assert result.verdict.sentence.startswith("NCCL used TCP sockets")
    shown = "\n".join(" ".join(map(str, row)) for row in run_table(run.record.plan, result).rows)
    assert "NETWORK   NCCL used TCP sockets" in shown
    assert "network   TCP sockets, no GPUDirect RDMA, NVLS, 16 channels; NCCL 2.28.9" in shown
    stored = json.loads((run.path / "run.json").read_text())["result"]["network"]
    assert (stored["fabric"], stored["transport"]) == ("TCP sockets", "Socket")
    assert read_record(RunFolder(run.path)).result == result


def test_the_network_is_the_first_cause(tmp_path: Path) -> None:
    slow = ended(tmp_path, 12.0, *(words("Socket", node) for node in NODES))
    good = ended(tmp_path, 10.0, *(words("IB", node) for node in NODES))
    for explained in (explain(slow), explain(slow, good)):
        assert explained
        first = explained.causes[0]
        assert (first.name, first.share_s) == ("network", None)
        assert "TCP sockets" in first.evidence[0]
        assert first.confirm.startswith(f"llmb nccl {slow.path}")
    fine = explain(good)
    assert fine
    assert "network" not in [cause.name for cause in fine.causes]
