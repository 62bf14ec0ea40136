"""Which network NCCL used, by lines in the forms of its versions and plugins."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmb.base.missing import Missing
from llmb.readers.nccl.nccl_network import Network, read_network


def lines(*texts: str, node: str = "node1", pid: int = 100, device: int = 0) -> bytes:
    return "".join(f"{node}:{pid}:{pid + 7} [{device}] NCCL INFO {text}\n" for text in texts).encode()


def network(*texts: bytes, ranks: int | None = None) -> Network:
    found = read_network(texts, "a.log", ranks)
    assert found
    return found


def told(found: Network) -> dict[str, Any]:
    """What is known of the network and its first nodes."""
    nodes = {f"of_nodes.{name}": value for name, value in found.nodes[0].model_dump().items() if name != "nodes"}
    own = found.model_dump(exclude={"nodes", "reasons", "used", "devices", "idle_devices", "source"})
    return {name: value for name, value in (own | nodes).items() if value is not None}


IB = ("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>", "Using network IB")
SEND = "Channel 00/0 : 0[0] -> 8[0] [send] via NET"
RECEIVE = "Channel 00/0 : 8[0] -> 0[0] [receive] via NET"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param(
            (
                "NET/Plugin : dlerror=libnccl-net.so: No plugin found (libnccl-net.so), using internal implementation",
                "NCCL version 2.19.3+cuda12.3",
                *IB,
                f"{SEND}/IB/0/GDRDMA",
                f"{RECEIVE}/IB/1/GDRDMA",
                "16 coll channels, 16 nvls channels, 16 p2p channels, 2 p2p channels per peer",
            ),
            {
                "nccl_version": "2.19.3",
                "plugin": "internal",
                "fabric": "InfiniBand",
                "transport": "IB",
                "link_layer": "InfiniBand",
                "gpudirect": True,
                "nvls": True,
                "collnet": False,
                "channels": {"collective": 16, "nvls": 16, "point_to_point": 16},
                "of_nodes.devices_used": ("mlx5_0", "mlx5_1"),
            },
            id="InfiniBand, 2.19",
        ),
        pytest.param(
            (
                "NCCL version 2.21.5+cuda12.4",
                "NET/IB : Using [0]={[0] mlx5_0:1/RoCE, [1] mlx5_1:1/RoCE} [1]mlx5_2:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
                "Using network IB",
                f"{SEND}/IB/0(3)/GDRDMA/Shared",
            ),
            {
                "fabric": "RoCE",
                "link_layer": "RoCE",
                "gpudirect": True,
                "of_nodes.devices": ("mlx5_0", "mlx5_1", "mlx5_2"),
                "of_nodes.devices_used": ("mlx5_0", "mlx5_1"),
            },
            id="RoCE with joined devices, 2.21",
        ),
        pytest.param(
            (
                "NCCL version 2.26.2+cuda12.8",
                "NET/IB : Made virtual device [0] name=mlx5_0 speed=400000 ndevs=1",
                "NET/IB : Made virtual device [1] name=mlx5_1 speed=400000 ndevs=1",
                *IB,
                "NET/IB : Made virtual device [2] name=mlx5_0+mlx5_1 speed=800000 ndevs=2",
                f"{SEND}/IB/2",
                f"{RECEIVE}/IB/2",
            ),
            {"gpudirect": False, "of_nodes.devices_used": ("mlx5_0", "mlx5_1")},
            id="no GPUDirect, devices joined later, 2.26",
        ),
        pytest.param(
            (
                "NCCL version 2.28.9+cuda13.0",
                "NET/IB: [0] mlx5_0:uverbs0:1/IB provider=Mlx5 speed=400000 context=0x1 pciPath=/sys/devices/x ar=1",
                *IB,
                "Initialized NET plugin IB",
                "Assigned NET plugin IB to comm",
                "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5_0'",
                "GPU Direct RDMA Enabled for GPU 0 / HCA 0 (distance 4 <= 5), read 1 mode PCI",
                f"{SEND}/IB/0/GDRDMA(PCI)",
                "Connected all rings, use ring PXN 0 GDR 1",
                "CollNet 00/0 : 0 [send] via COLLNET/SHARP/0/GDRDMA(PCI)",
                "16 coll channels, 16 collnet channels, 0 nvls channels, 32 p2p channels, 2 p2p channels per peer",
            ),
            {"nccl_version": "2.28.9", "gpudirect": True, "collnet": True, "nvls": False},
            id="InfiniBand with SHARP, 2.28",
        ),
        pytest.param(
            (
                "NET/Plugin: Loaded net plugin NCCL RDMA Plugin v8 (v8)",
                "P2P plugin IBext_v8",
                "NET/IB : Using [0]mlx5_0:1/IB/SHARP [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.1<0>",
                "Using network IBext_v8",
                f"{SEND}/IBext_v8/1/GDRDMA",
            ),
            {
                "fabric": "InfiniBand",
                "transport": "IBext_v8",
                "plugin": "IBext_v8",
                "of_nodes.devices": ("mlx5_0", "mlx5_1"),
                "of_nodes.devices_used": ("mlx5_1",),
            },
            id="plugin of HPC-X",
        ),
        pytest.param(
            (
                "NET/OFI Initializing aws-ofi-nccl 1.13.2-aws",
                "NET/OFI Selected Provider is efa (found 4 nics)",
                "Using network AWS Libfabric",
                "NET/AWS Libfabric : GPU Direct RDMA Enabled for HCA 3 'rdmap160s27'",
                f"{SEND}/AWS Libfabric/3/GDRDMA",
            ),
            {
                "fabric": "EFA",
                "plugin": "AWS Libfabric",
                "plugin_version": "1.13.2-aws",
                "of_nodes.devices_used": ("rdmap160s27",),
            },
            id="EFA, plugin of 2024",
        ),
        pytest.param(
            (
                "NET/OFI Initializing aws-ofi-nccl 1.17.0",
                "NET/OFI Selected provider is tcp;ofi_rxm, fabric is 10.0.0.0/16 (found 1 nics)",
                "Using network Libfabric",
            ),
            {"fabric": "TCP sockets", "transport": "Libfabric", "plugin_version": "1.17.0"},
            id="libfabric over TCP",
        ),
        pytest.param(
            (
                "NCCL version 2.27.5+cuda12.9",
                "NET/Plugin: Could not find: libnccl-net.so. ",
                "NET/IB : No device found.",
                "NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
                "NET/Socket : Using [0]eth0:10.0.0.1<0> [1]veth1:fe80::2034:8eff%veth1<0>",
                "Using network Socket",
                "NET/Socket : GPU Direct RDMA Disabled for HCA 0 'eth0'",
                f"{SEND}/Socket/0",
                "comm 0x5 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0",
            ),
            {
                "fabric": "TCP sockets",
                "transport": "Socket",
                "plugin": "internal",
                "gpudirect": False,
                "mnnvl": False,
                "of_nodes.devices": ("eth0", "veth1"),
                "of_nodes.devices_used": ("eth0",),
            },
            id="sockets, 2.27",
        ),
        pytest.param(
            ("NET/gIB : Initializing gIB v1.0.5", "Using network gIB", f"{SEND}/gIB/0/GDRDMA"),
            {"fabric": "RoCE", "plugin": "gIB", "plugin_version": "1.0.5"},
            id="gIB",
        ),
        pytest.param(
            ("NET/GPUDirectTCPX ver. 3.1.8.", "Using network GPUDirectTCPX_v7", f"{SEND}/GPUDirectTCPX_v7/0/GDRDMA"),
            {"fabric": "GPUDirect-TCPX", "plugin_version": "3.1.8", "gpudirect": True},
            id="TCPX",
        ),
        pytest.param(("Using network FasTrak", f"{SEND}/FasTrak/0/GDRDMA"), {"fabric": "GPUDirect-TCPXO"}, id="TCPXO"),
        pytest.param(("Using network New Thing",), {"fabric": "New Thing", "plugin": "New Thing"}, id="unknown plugin"),
        pytest.param(
            (
                "MNNVL 1 cliqueId 7ffe cliqueSize 8 cliqueRank 0",
                "NET/IB : No device found.",
                "Using network Socket",
                "Channel 00/0 : 4[0] -> 3[3] via P2P/MNNVL",
            ),
            {"fabric": "NVLink", "transport": "MNNVL", "mnnvl": True},
            id="NVLink between nodes, sockets unused",
        ),
    ],
)
def test_each_network_is_told_by_its_lines(texts: tuple[str, ...], expected: dict[str, Any]) -> None:
    found = told(network(lines(*texts)))
    assert {name: found.get(name) for name in expected} == expected


def test_sockets_of_nodes_that_nvlink_connects_are_used_only_if_a_channel_is() -> None:
    selected = ("MNNVL 1 cliqueId 7ffe cliqueSize 8 cliqueRank 0", "Using network Socket")
    assert network(lines(*selected)).fabric == "NVLink"
    assert network(lines(*selected, f"{SEND}/Socket/0")).fabric == "TCP sockets"


def test_what_no_line_tells_has_a_reason() -> None:
    found = network(lines("Using network IB"))
    unknown = [name for name, value in found.model_dump(exclude={"reasons"}).items() if value is None]
    assert {"fabric", "link_layer", "gpudirect", "nvls", "channels"} <= set(unknown) <= set(found.reasons)
    assert {"devices", "devices_used", "idle_devices"} <= set(found.reasons)
    assert not read_network([lines("Bootstrap : Using eth0:10.0.0.1<0>"), b"a log of something else\n"], "a.log")


def test_gpudirect_of_some_channels_is_neither_yes_nor_no() -> None:
    found = network(lines(*IB, f"{SEND}/IB/0", f"{RECEIVE}/IB/0/GDRDMA"))
    assert found.gpudirect is None
    assert found.reasons["gpudirect"] == "1 of 2 channels use it"


def test_nodes_that_differ_are_told_apart_and_alike_ones_are_together() -> None:
    ib, sockets = (*IB, f"{SEND}/IB/0/GDRDMA"), ("NET/Socket : Using [0]eth0:10.0.0.3<0>", "Using network Socket")
    found = network(lines(*ib, node="n2"), lines(*sockets, node="n3"), lines(*ib, node="n1"))
    assert [(group.nodes, group.fabric) for group in found.nodes] == [
        (("n1", "n2"), "InfiniBand"),
        (("n3",), "TCP sockets"),
    ]
    assert found.fabric is None
    assert found.reasons["fabric"] == "it differs between nodes"
    assert found.used == ("InfiniBand", "TCP sockets")
    assert found.devices == ("mlx5_0", "mlx5_1", "eth0")


def test_devices_are_idle_only_by_the_words_of_all_ranks() -> None:
    def of_rank(rank: int) -> bytes:
        init = (
            f"ncclCommInitRank comm 0x{rank} rank {rank} nranks 4 cudaDev 0 nvmlDev 0 busId 1 commId 0x7 - Init START"
        )
        node = f"node{rank // 2}"
        return lines(*IB, init, f"Channel 00/0 : {rank}[0] -> 0[0] [send] via NET/IB/0", node=node, pid=rank + 50)

    def idle(*ranks: int, known: int | None = None) -> tuple[str, ...] | None:
        return network(*map(of_rank, ranks), ranks=known).nodes[0].idle_devices

    assert idle(0, 1, 2, 3) == idle(0, 1, 2, 3, known=4) == ("mlx5_1",)
    assert idle(0, 2) is idle(0, 1, 2, 3, known=8) is None


def test_other_words_around_the_lines_do_not_matter() -> None:
    plain = lines(*IB, f"{SEND}/IB/0/GDRDMA")
    for label in (b"[1,0]<stdout>:", b"0: ", b"(Worker pid=3, ip=10.0.0.7) ", b"2026-11-26 10:00:00,123 "):
        labelled = b"".join(label + line for line in plain.splitlines(keepends=True))
        assert network(labelled) == network(plain)
    assert network(plain.replace(b"\n", b"\r\n")).nodes == network(plain).nodes


@given(st.lists(st.one_of(st.binary(max_size=100), st.text(max_size=40).map(str.encode)), max_size=5))
def test_no_line_is_too_odd(texts: list[bytes]) -> None:
    heads = (b"", b"n:1:2 [0] NCCL INFO NET/", b"n:1:2 [0] NCCL INFO Channel ", b"n:1:2 [0] NCCL INFO comm ")
    for head in heads:
        read_network([b"".join(head + text + b"\n" for text in texts), lines(*IB)], "a.log")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("[0] NCCL INFO ", id="cut at its beginning"),
        pytest.param("4123 [0] NCCL INFO ", id="cut in its beginning"),
        pytest.param("node1:100 [0] NCCL INFO ", id="no thread"),
        pytest.param(":: [0] NCCL INFO ", id="nothing named"),
        pytest.param("node1:100:107[0] NCCL INFO ", id="no space"),
    ],
)
def test_lines_without_a_writer_are_left_out_and_counted(head: str) -> None:
    whole, torn = lines(*IB, f"{SEND}/IB/0/GDRDMA"), f"{head}Using network Socket\n".encode()
    found = network(torn + whole + torn)
    assert found == network(whole).model_copy(update={"unread_lines": 2})
    alone = read_network([torn], "a.log")
    assert isinstance(alone, Missing)
    assert alone.reason == "a.log does not report NCCL's network: 1 line of it cannot be read"


def test_hostile_lines_tell_nothing_that_a_terminal_would_obey() -> None:
    hostile = lines(
        "NET/IB : Using [0]\x1b[2Jmlx5_0:1/IB [1]<script>:1/IB ; OOB eth0:10.0.0.1<0>",
        "NET/IB : GPU Direct RDMA Enabled for HCA 0 'mlx5\x1b]0;owned\x07'",
        "Using network \x1b[31mIB",
        "Using network IB",
        "NET/IB : Using " + " [7]mlx5_7:1/IB" * 200_000,
        f"{SEND}/IB/99999999999999999999",
    )
    unnamed = lines(*IB, node="no\x1bde")
    found = network(hostile, unnamed, bytes(range(256)) * 4000, b"x:1:1 [0] NCCL INFO NET/" + b"A" * 1_000_000)
    assert found.transport == "IB"
    assert found.nodes[0].nodes == ("node1",)
    assert found.unread_lines == len(IB)
    assert "\x1b" not in found.model_dump_json() + str(found)
    assert "script" not in str(found)


def test_a_record_is_read_again_as_it_was_written() -> None:
    found = network(lines(*IB))
    assert Network.model_validate_json(found.model_dump_json()) == found
