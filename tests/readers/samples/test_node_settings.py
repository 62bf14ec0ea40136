# SPDX-License-Identifier: Apache-2.0
"""Settings of nodes: what is read, how those of many are kept, and what has drifted."""

from pathlib import Path

import pytest
from recorded_node import RecordedNode
from recorded_runs import gpu_record

from llmb.base.input_files import SystemFiles
from llmb.readers.samples.node_settings import NodeSettings, NodesSettings, read_settings, together
from llmb.runs.conditions import Drift, find_drift, rule_of, settings_of_run, unlike_nodes
from llmb.runs.environment import GpuState
from llmb.runs.record import RunRecord

DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\nGCC version:  gcc 12\n"
BDF = "0000:00:00.0"
EXPRESS = bytearray(256)
EXPRESS[0x34], EXPRESS[0x40], EXPRESS[0x41] = 0x40, 0x01, 0x60  # power management, then PCI Express
EXPRESS[0x60], EXPRESS[0x69] = 0x10, 0x50


@pytest.fixture
def node(tmp_path: Path) -> RecordedNode:
    """With what settings are read of, and checks are not."""
    found = RecordedNode(tmp_path)
    for name, text in {
        "proc/driver/nvidia/version": DRIVER,
        "proc/driver/nvidia/params": 'EnableGpuFirmware: 18\nRegistryDwords: ""\nResmanDebugLevel: 4294967295',
        f"proc/driver/nvidia/gpus/{BDF}/information": "Model: \t\t NVIDIA H100\nVideo BIOS: \t 96.00.9f.00.01",
        "proc/sys/vm/zone_reclaim_mode": "0",
        "proc/sys/net/ipv4/tcp_rmem": "4096\t131072\t6291456",
        "sys/class/dmi/id/bios_version": "1.04.21",
        "proc/self/smaps": "55d0-55d1 r--p\nSize: 4 kB\nKernelPageSize:        4 kB\nMMUPageSize:           4 kB",
        "sys/class/powercap/intel-rapl:0/constraint_0_power_limit_uw": "350000000",
        "sys/class/powercap/intel-rapl:1/constraint_0_power_limit_uw": "350000000",
        "sys/class/infiniband/mlx5_0/fw_ver": "28.39.1002",
        "sys/class/infiniband/mlx5_0/device/net/ib0/mtu": "4092",
        f"sys/bus/pci/devices/{BDF}/current_link_width": "16",
    }.items():
        found.write(name, text)
    for index in range(1, 8):
        found.write(f"sys/bus/pci/devices/0000:0{index}:00.0/current_link_width", "16")
    (tmp_path / f"sys/bus/pci/devices/{BDF}/config").write_bytes(EXPRESS)
    return found


def values(node: RecordedNode, **environ: str) -> dict[str, str]:
    return read_settings(node.source, environ).values


def test_a_node_is_read(node: RecordedNode) -> None:
    found = values(node)
    assert {
        "kernel.release": "5.15.0-1053-nvidia",
        "kernel.command_line": "iommu=pt",
        "kernel.transparent_hugepage.enabled": "madvise",
        "sysctl.vm.zone_reclaim_mode": "0",
        "sysctl.net.ipv4.tcp_rmem": "4096 131072 6291456",
        "hardware.cpu": "Intel(R) Xeon(R) Platinum 8480C",
        "kernel.page_size": "4 kB",
        "cpu.governor": "performance",
        "cpu.power_limit": "350 W",
        "cpu.idle_states": "POLL, C6",
        "bios.version": "1.04.21",
        "software.driver": "570.124.06",
        "gpu.driver_modules": "open",
        "gpu.driver_option.EnableGpuFirmware": "18",
        "gpu.vbios": "96.00.9f.00.01",
        "modules.peermem": "loaded",
        "modules.gdrcopy": "not loaded",
        "nic.devices": ", ".join(f"mlx5_{index}" for index in range(8)),
        "nic.mlx5_0.firmware": "28.39.1002",
        "nic.mlx5_0.mtu": "4092",
        "nic.mlx5_7.state": "ACTIVE",
        "nic.mlx5_7.rate": "400 Gb/sec (4X NDR)",
        "interface.eth0.mtu": "1500",
        "pcie.gpus": "8",
        "pcie.gpus.width": "16",
        "pcie.gpus.max_read_request": "4096",
    }.items() <= found.items()
    node.write("sys/bus/pci/devices/0000:03:00.0/current_link_width", "8")
    assert values(node)["pcie.gpus.width"] == "16 on 7, 8 on 1"


def test_the_nearest_cards_of_gpus_are_named_as_nvidia_smi_names_paths(tmp_path: Path) -> None:
    host, other = "pci0000:15/0000:15:01.0/0000:16:00.0", "pci0000:26/0000:26:01.0/0000:27:00.0"
    devices = {
        "0000:19:00.0": (f"{host}/0000:17:02.0", "0x030200", "0"),
        "0000:29:00.0": (f"{other}/0000:28:02.0", "0x030200", "1"),
        "0000:18:00.0": (f"{host}/0000:17:00.0", "0x020700", "0"),
        "0000:1b:00.0": ("pci0000:15/0000:15:03.0", "0x020700", "0"),
        "0000:5e:00.0": ("pci0000:5d/0000:5d:01.0", "0x020000", "1"),
        "0000:5e:00.1": ("pci0000:5d/0000:5d:01.0", "0x020000", "1"),
    }
    bus = tmp_path / "sys/bus/pci/devices"
    bus.mkdir(parents=True)
    for name, (above, kind, numa) in devices.items():
        folder = tmp_path / "sys/devices" / above / name
        folder.mkdir(parents=True)
        for file, text in {"class": kind, "vendor": "0x10de", "numa_node": numa}.items():
            (folder / file).write_text(text)
        (bus / name).symlink_to(folder)
    for number, name in enumerate(("0000:18:00.0", "0000:1b:00.0", "0000:5e:00.0")):
        (bus / name / f"infiniband/mlx5_{number}").mkdir(parents=True)

    def nearest() -> str:
        return read_settings(SystemFiles(root=tmp_path), {}).values["pcie.nearest_nics"]

    assert nearest() == "0000:19:00.0 PIX mlx5_0; 0000:29:00.0 NODE mlx5_2"
    (bus / "0000:18:00.0").unlink()  # a card that failed: another host bridge's port is next
    assert nearest() == "0000:19:00.0 PHB mlx5_1; 0000:29:00.0 NODE mlx5_2"
    (bus / "0000:1b:00.0").unlink()
    assert nearest() == "0000:19:00.0 SYS mlx5_2; 0000:29:00.0 NODE mlx5_2"


def test_every_key_has_a_rule_of_its_own(node: RecordedNode) -> None:
    general = {"*", "hardware.*", "software.*"}
    assert all(general.isdisjoint(rule_of(key).keys) for key in values(node, NCCL_ALGO="Ring", FI_PROVIDER="efa"))


def test_variables_are_those_of_the_network_without_secrets_and_names_of_files() -> None:
    own = {
        "NCCL_ALGO": "Ring",
        "NCCL_DEBUG_FILE": "/x",
        "UCX_TLS": "rc",
        "FI_TOKEN": "x",
        "HOME": "/",
        "NCCL_HOSTID": "1",
    }
    found = read_settings(SystemFiles(root=Path("/nonexistent")), own)
    assert found.values == {"variables.NCCL_ALGO": "Ring", "variables.UCX_TLS": "rc"}
    assert found.missing["bios"] == "/sys/class/dmi/id does not exist, as in many virtual machines"
    assert "variables" not in found.missing
    assert "variables" in read_settings(SystemFiles(), {}).missing


def test_what_takes_too_long_is_left_out_with_the_reason(node: RecordedNode) -> None:
    found = read_settings(node.source, {}, limit_s=-1.0)
    assert found.values == {}
    assert found.missing["nic"] == "reading the settings before it took longer than -1 s"


def test_registers_that_make_no_sense_are_no_value(node: RecordedNode) -> None:
    path = node.root / f"sys/bus/pci/devices/{BDF}/config"
    for broken in (bytes(64), bytes([0x40]) * 256, b"\xff" * 256):
        path.write_bytes(broken)
        assert "pcie.gpus.max_read_request" not in values(node)


def settings(nodes: int, values: dict[str, str], **others: dict[str, str]) -> NodesSettings:
    """``others`` are of nodes by name, and replace the values of all."""
    names = [f"node{number}" for number in range(1, nodes + 1)]
    return together({name: NodeSettings(values=values | others.get(name, {}), missing={}) for name in names})


def test_those_of_many_nodes_are_kept_once(node: RecordedNode) -> None:
    one = values(node)
    every = settings(288, one, node7={"software.driver": "575.57.08"})
    assert every.unlike == {"node7": {"software.driver": "575.57.08"}}
    assert every.of_node("node8") == every.of_node("unknown") == one
    assert every.of_node("node7")["software.driver"] == "575.57.08"
    assert every.of_all()["software.driver"] == "570.124.06, 575.57.08"
    sizes = [len(found.model_dump_json(exclude={"nodes"})) for found in (settings(1, one), every)]
    assert sizes[1] - sizes[0] < 60


def test_a_value_that_most_nodes_lack_is_of_those_that_have_it() -> None:
    every = settings(3, {"a": "1"}, node2={"variables.NCCL_ALGO": "Ring"})
    assert every.usual == {"a": "1"}
    assert every.of_all() == {"a": "1", "variables.NCCL_ALGO": "Ring"}
    few = together({"x": NodeSettings(values={"a": "1"}, missing={}), "y": NodeSettings(values={}, missing={})})
    assert few.of_node("y") == {}
    assert few.of_all() == {"a": "1"}


def test_drift_is_by_node_and_the_important_comes_first() -> None:
    before = settings(2, {"sysctl.vm.dirty_ratio": "20", "sysctl.vm.swappiness": "1", "cpu.governor": "performance"})
    now = settings(
        2, {"sysctl.vm.dirty_ratio": "40", "sysctl.vm.swappiness": "1"}, node2={"sysctl.vm.swappiness": "60"}
    )
    assert find_drift(before, now) == (
        Drift(node="node2", key="sysctl.vm.swappiness", before="1", after="60", important=True),
        Drift(node="node1", key="sysctl.vm.dirty_ratio", before="20", after="40", important=False),
        Drift(node="node2", key="sysctl.vm.dirty_ratio", before="20", after="40", important=False),
    ), "what one side does not tell is no drift"
    assert find_drift(before, before) == ()


def test_a_variable_that_is_not_set_any_more_is_drift() -> None:
    before, now = settings(1, {"variables.NCCL_IB_HCA": "mlx5"}), settings(1, {"variables.NCCL_ALGO": "Ring"})
    assert [(one.key, one.before, one.after) for one in find_drift(before, now)] == [
        ("variables.NCCL_ALGO", None, "Ring"),
        ("variables.NCCL_IB_HCA", "mlx5", None),
    ]


def of_run(every: NodesSettings, **power_w: float) -> RunRecord:
    gpus = tuple(GpuState(node=node, index=0, power_limit_w=limit) for node, limit in power_w.items())
    record = gpu_record(scale=8, nodes=every.nodes)
    assert record.environment
    seen = record.environment.model_copy(update={"gpus": gpus or None})
    return record.model_copy(update={"environment": seen, "settings": every})


def test_nodes_of_a_run_unlike_the_others_are_named() -> None:
    alike = settings(4, {"software.driver": "570.1", "sysctl.vm.dirty_ratio": "20"})
    assert unlike_nodes(of_run(alike)) == ()
    assert unlike_nodes(gpu_record(scale=8)) == ()
    other = {"software.driver": "575.1", "sysctl.vm.dirty_ratio": "40"}
    assert unlike_nodes(of_run(settings(5, alike.usual, node3=other))) == (
        "GPU driver is 575.1 on node3 and 570.1 on 4 nodes",
    )
    limits = dict.fromkeys(alike.nodes, 700.0) | {"node2": 500.0}
    assert unlike_nodes(of_run(alike, **limits)) == (
        "hardware.power_limit_w is 500 on node2 and 700 on node1, node3, node4",
    )
    found = settings_of_run(of_run(alike, **limits))
    assert found
    assert found.unlike == {"node2": {"hardware.power_limit_w": "500"}}
