# SPDX-License-Identifier: Apache-2.0
"""CPUs, memory, kernel, limits and network of a fit node, and of nodes with one thing wrong."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_node import ADDRESSES, RecordedNode

from llmb.catalogue.load import Catalogue
from llmb.health.checks.network import network_checks
from llmb.health.checks.system import cpu_checks, kernel_checks, limit_checks, memory_checks
from llmb.health.facts.network import read_network
from llmb.health.facts.source import FactSource
from llmb.health.facts.system import (
    CpuFacts,
    LimitFacts,
    MemoryFacts,
    allowed_cpus,
    group_memory,
    read_cpu,
    read_kernel,
    read_limits,
    read_memory,
)
from llmb.health.records import Check, NotChecked
from llmb.health.rules import Finding, names_of, rules
from llmb.health.wanted import WantedFacts
from llmb.tools import Said

CATALOGUE = Catalogue().gpus
PUBLIC = """4: eth1    inet 8.8.8.8/24 brd 8.8.8.255 scope global eth1
4: eth1    inet6 2606:4700::1111/64 scope global
"""
H100 = WantedFacts(
    catalogue=CATALOGUE, gpu=CATALOGUE["h100"], gpus=8, gpus_by="--gpus", cluster=True, fabric="infiniband"
)
GIB = 2**30
AREAS = ("cpu", "memory", "kernel", "limits", "network")
NET, IB, CPU = "sys/class/net", "sys/class/infiniband", "sys/devices/system/cpu"
Change = Callable[[RecordedNode], object]


class Host:
    """A recorded node, and what only the kernel itself can say."""

    def __init__(self, root: Path) -> None:
        self.node = RecordedNode(root)
        self.cpu: dict[str, object] = {"allowed": 224}
        self.memory: dict[str, object] = {"shm_size": 1000 * GIB, "shm_free": 999 * GIB}
        self.limits: dict[str, tuple[int | None, int | None]] = {
            "memlock": (None, None),
            "nofile": (65536, 1048576),
            "nproc": (None, None),
            "stack": (8 * 2**20, None),
        }
        self.wanted, self.gpus = H100, 8

    def found(self) -> dict[str, Finding]:
        source = self.node.source
        network = read_network(source, "node1")
        cpu: CpuFacts = replace(read_cpu(source), **self.cpu)
        memory: MemoryFacts = replace(read_memory(source), **self.memory)
        parts: tuple[Iterable[Finding], ...] = (
            cpu_checks(cpu, self.wanted),
            memory_checks(memory),
            kernel_checks(read_kernel(source)),
            limit_checks(LimitFacts(self.limits, group_memory(source), memory.total), has_rdma=bool(network.ports)),
            network_checks(network, self.gpus, self.wanted),
        )
        return {finding.name: finding for part in parts for finding in part}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_fit_host_passes_every_check(host: Host) -> None:
    found = host.found()
    assert [*found] == [name for area in AREAS for name in names_of(area)]
    not_passed = {name: one for name, one in found.items() if getattr(one, "status", "") != "pass"}
    assert not_passed == {
        "network_rdma_mtu": NotChecked(name="network_rdma_mtu", reason="no active port is of RoCE"),
    }
    values = {name: one.value for name, one in found.items() if isinstance(one, Check)}
    assert values["cpu_idle_states"] == "C6, 290 µs to leave"
    assert values["cpu_numa"] == "2 NUMA nodes"
    assert values["cpu_threads"] == "2 per core"
    assert values["memory_available"] == "1,965 GiB of 2,015 GiB available"
    assert values["kernel_iommu"] == "iommu=pt"
    assert values["network_cards"] == "eth0 100 Gb/s, MTU 1500"
    assert values["network_rdma"] == "8 of 8 ports active (8 InfiniBand)"
    assert values["network_rdma_rate"] == "8 x 400 Gb/s InfiniBand"


def write(name: str, text: str) -> Callable[[Host], None]:
    return lambda host: host.node.write(name, text)


def port(name: str, text: str, device: str = "mlx5_3") -> Callable[[Host], None]:
    return lambda host: host.node.write_port(device, name, text)


def several(*changes: Callable[[Host], object]) -> Callable[[Host], object]:
    return lambda host: [change(host) for change in changes]


def unused_port(host: Host) -> None:
    for name, text in (("state", "1: DOWN"), ("phys_state", "3: Disabled"), ("rate", "10 Gb/sec (4X SDR)")):
        host.node.write_port("mlx5_8", name, text)


def roce(host: Host) -> None:
    for index in range(8):
        host.node.write_port(f"mlx5_{index}", "link_layer", "Ethernet")
        host.node.write(f"{IB}/mlx5_{index}/device/net/eth{index}/mtu", "1500")


def group(host: Host, name: str, text: str) -> None:
    """Of the job's control group; those of its step and task, below, say nothing."""
    host.node.write("proc/self/cgroup", "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0")
    host.node.write(f"sys/fs/cgroup/system.slice/slurmstepd.scope/job_12/step_0/user/task_0/{name}", "max")
    host.node.write(f"sys/fs/cgroup/system.slice/slurmstepd.scope/job_12/{name}", text)


UNFIT: dict[str, tuple[str, Callable[[Host], object], str, str, str]] = {
    "governor": (
        "cpu_governor",
        write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave"),
        "warn",
        "powersave on 1 CPU",
        "cpupower",
    ),
    "idle state": (
        "cpu_idle_states",
        write(f"{CPU}/cpu0/cpuidle/state1/latency", "800"),
        "warn",
        "C6, 800",
        "idle-set",
    ),
    "no NUMA node": (
        "cpu_numa",
        lambda host: host.node.add_gpu_on_bus("0000:00:00.0", -1),
        "warn",
        "1 device of",
        "BIOS",
    ),
    "few CPUs": (
        "cpu_allowed",
        lambda host: host.cpu.update(allowed=31),
        "warn",
        "31 of 224 CPUs, for 8 GPUs",
        "exclusive",
    ),
    "one CPU": (
        "cpu_allowed",
        lambda host: host.cpu.update(allowed=1),
        "fail",
        "1 of 224 CPUs, for 8 GPUs",
        "exclusive",
    ),
    "busy": ("cpu_load", write("proc/loadavg", "113.0 90.0 80.0 1/1 1"), "warn", "113 processes on 224 CPUs", "top"),
    "little memory": (
        "memory_available",
        lambda host: host.memory.update(available=900 * GIB),
        "warn",
        "900 GiB of",
        "top",
    ),
    "no memory": (
        "memory_available",
        lambda host: host.memory.update(available=100 * GIB),
        "fail",
        "100 GiB of",
        "top",
    ),
    "swap": ("memory_swap", lambda host: host.memory.update(swap_used=2 * GIB), "warn", "2.0 GiB in use", "swapoff"),
    "huge pages": (
        "memory_huge_pages",
        lambda host: host.memory.update(huge_pages=400 * GIB),
        "warn",
        "400 GiB",
        "sysctl",
    ),
    "little shm": (
        "memory_shm",
        lambda host: host.memory.update(shm_free=512 * 2**20),
        "warn",
        "512 MiB of",
        "--shm-size",
    ),
    "no shm left": (
        "memory_shm",
        lambda host: host.memory.update(shm_free=64 * 2**20),
        "fail",
        "64 MiB of",
        "--shm-size",
    ),
    "no shm": (
        "memory_shm",
        lambda host: host.memory.update(shm_size=None),
        "fail",
        "there is no /dev/shm",
        "--ipc=host",
    ),
    "bad memory": (
        "memory_errors",
        write("sys/devices/system/edac/mc/mc0/ue_count", "1"),
        "fail",
        "1 uncorrected",
        "drain",
    ),
    "weak memory": (
        "memory_errors",
        write("sys/devices/system/edac/mc/mc0/ce_count", "101"),
        "warn",
        "101 corrected",
        "grow",
    ),
    "small pages": (
        "kernel_transparent_hugepage",
        write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
        "warn",
        "never",
        "madvise",
    ),
    "NUMA balancing": (
        "kernel_numa_balancing",
        write("proc/sys/kernel/numa_balancing", "1"),
        "warn",
        "on, 2 NUMA",
        "sysctl",
    ),
    "IOMMU": (
        "kernel_iommu",
        several(write("proc/cmdline", "ro intel_iommu=on"), write("sys/kernel/iommu_groups/0/type", "DMA-FQ")),
        "warn",
        "1 group of devices",
        "iommu=pt",
    ),
    "memlock": (
        "limits_memlock",
        lambda host: host.limits.update(memlock=(65536, None)),
        "fail",
        "0 MiB (hard limit unl",
        "RDMA",
    ),
    "hard memlock": (
        "limits_memlock",
        lambda host: host.limits.update(memlock=(8 * 2**20, 8 * 2**20)),
        "fail",
        "8 MiB (hard limit 8 MiB)",
        "limits.conf",
    ),
    "some files": (
        "limits_nofile",
        lambda host: host.limits.update(nofile=(1024, 524288)),
        "warn",
        "1,024 (hard",
        "ulimit -n",
    ),
    "few files": (
        "limits_nofile",
        lambda host: host.limits.update(nofile=(256, 256)),
        "fail",
        "256 (hard",
        "limits.conf",
    ),
    "some processes": (
        "limits_nproc",
        lambda host: host.limits.update(nproc=(4096, None)),
        "warn",
        "4,096",
        "ulimit -u",
    ),
    "few processes": ("limits_nproc", lambda host: host.limits.update(nproc=(512, None)), "fail", "512", "ulimit -u"),
    "stack": ("limits_stack", lambda host: host.limits.update(stack=(2**20, None)), "warn", "1 MiB", "ulimit -s"),
    "memory of a job": (
        "limits_memory",
        lambda host: group(host, "memory.max", str(64 * GIB)),
        "warn",
        "64 GiB of 2,015 GiB",
        "--mem=0",
    ),
    "no card up": ("network_cards", write(f"{NET}/eth0/operstate", "down"), "fail", "none of eth0 is up", "ip link"),
    "bad packets": (
        "network_errors",
        write(f"{NET}/eth0/statistics/rx_errors", "101"),
        "warn",
        "101 of 1,000,000",
        "ethtool",
    ),
    "loopback": (
        "network_host_name",
        lambda host: host.node.said.update({"getent": "127.0.1.1       STREAM node1\n"}),
        "warn",
        "127.0.1.1",
        "/etc/hosts",
    ),
    "no name": (
        "network_host_name",
        lambda host: host.node.said.update({"getent": Said("", "exit code 2")}),
        "warn",
        "no addr",
        "DNS",
    ),
    "public address": (
        "network_public_address",
        lambda host: host.node.said.update({"ip -o address show up": ADDRESSES + PUBLIC}),
        "warn",
        "eth1 8.8.8.8, eth1 2606:4700::1111",
        "firewall",
    ),
    "port down": (
        "network_rdma",
        several(port("state", "2: INIT"), port("phys_state", "5: LinkUp")),
        "fail",
        "7 of 8 ports active; mlx5_3 INIT, LinkUp",
        "subnet manager",
    ),
    "unused port": ("network_rdma", unused_port, "warn", "8 of 9 ports active; mlx5_8 DOWN, Disabled", "no cable"),
    "slow port": (
        "network_rdma_rate",
        port("rate", "200 Gb/sec (4X HDR)"),
        "warn",
        "1 x 200 Gb/s InfiniBand",
        "slow one",
    ),
    "narrow port": ("network_rdma_rate", port("rate", "200 Gb/sec (2X NDR)"), "warn", "fewer lanes: mlx5_3 2X", "lane"),
    "half the rate": (
        "network_rdma_rate",
        several(*(port("rate", "200 Gb/sec (4X HDR)", f"mlx5_{index}") for index in range(8))),
        "warn",
        "25 of 50 GB/s a GPU",
        "switch",
    ),
    "bad cable": (
        "network_rdma_errors",
        port("counters/symbol_error", "11"),
        "warn",
        "mlx5_3 symbol_error 11",
        "cable",
    ),
    "small MTU": ("network_rdma_mtu", roce, "warn", "1500 (mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 4 more)", "9000"),
    "no GPUDirect": (
        "network_gpu_direct",
        write("proc/modules", "nvidia 1 0 - Live 0x0"),
        "warn",
        "peermem",
        "modprobe",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_host_is_found_with_advice(host: Host, case: str) -> None:
    name, change, status, text, advice = UNFIT[case]
    change(host)
    found = host.found()
    finding = found.pop(name)
    assert isinstance(finding, Check)
    assert (finding.status, finding.name) == (status, name)
    assert text in str(finding.value)
    assert advice in str(finding.advice)
    assert {one.name for one in found.values() if getattr(one, "status", "pass") != "pass"} == set()


def test_every_check_that_can_fail_or_warn_has_a_case() -> None:
    wanted = {(rule.name, "fail") for rule in rules().values() if rule.area in AREAS and rule.fails_if}
    wanted |= {(rule.name, "warn") for rule in rules().values() if rule.area in AREAS and rule.warns_if}
    assert wanted == {(name, status) for name, _, status, _, _ in UNFIT.values()}


def test_missing_cards_fail_where_the_network_is_infiniband(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (tmp_path / IB).rename(tmp_path / "gone")
    finding = host.found()["network_rdma"]
    assert isinstance(finding, Check)
    assert (finding.status, finding.value) == ("fail", "none; cluster_config.yaml has fabric: infiniband")
    host.wanted = replace(H100, fabric=None)
    found = host.found()
    assert {type(found[name]) for name in names_of("network") if "rdma" in name} == {NotChecked}
    assert isinstance(found["limits_memlock"], NotChecked), "only RDMA needs locked memory"


def test_slower_ports_beside_one_full_port_a_gpu_are_of_storage(host: Host) -> None:
    for name, text in (("link_layer", "InfiniBand"), ("state", "4: ACTIVE"), ("rate", "200 Gb/sec (4X HDR)")):
        host.node.write_port("mlx5_8", name, text)
    finding = host.found()["network_rdma_rate"]
    assert isinstance(finding, Check)
    assert (finding.status, finding.value) == ("pass", "8 x 400 Gb/s InfiniBand, 1 x 200 Gb/s InfiniBand")


def test_addresses_that_are_not_known_are_not_judged(host: Host) -> None:
    host.node.said["ip -o address show up"] = Said("", "ip is not on this machine")
    finding = host.found()["network_public_address"]
    assert isinstance(finding, NotChecked)
    assert finding.reason == "ip is not on this machine"


def test_the_hardware_may_choose_clocks_by_a_preference(host: Host) -> None:
    host.node.write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave")
    host.node.write(f"{CPU}/cpu0/cpufreq/energy_performance_preference", "performance")
    assert getattr(host.found()["cpu_governor"], "status", None) == "pass"


def test_the_open_kernel_modules_need_no_peermem(host: Host) -> None:
    host.node.write("proc/modules", "nvidia 1 0 - Live 0x0")
    host.node.write(
        "proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build",
    )
    assert getattr(host.found()["network_gpu_direct"], "status", None) == "pass"


@pytest.mark.parametrize("line", ["ro iommu=pt", "ro iommu.passthrough=1 quiet", "intel_iommu=off", "amd_iommu=off ro"])
def test_pass_through_is_seen_on_the_command_line(host: Host, line: str) -> None:
    host.node.write("proc/cmdline", line)
    host.node.write("sys/kernel/iommu_groups/0/type", "DMA")
    assert getattr(host.found()["kernel_iommu"], "status", None) == "pass"


def test_a_setting_that_only_looks_alike_is_no_pass_through(host: Host) -> None:
    host.node.write("proc/cmdline", "ro xiommu=pt iommu=ptx")
    host.node.write("sys/kernel/iommu_groups/0/type", "DMA")
    assert getattr(host.found()["kernel_iommu"], "status", None) == "warn"


def test_what_no_file_shows_is_not_checked(tmp_path: Path) -> None:
    """As in a container without /sys, or on another system."""
    host = Host(tmp_path)
    for folder in ("proc", "sys"):
        (tmp_path / folder).rename(tmp_path / f"no-{folder}")
    host.node.said.clear()
    host.memory.clear()
    host.wanted, host.gpus = WantedFacts(), 0
    passed = {name for name, one in host.found().items() if getattr(one, "status", "") == "pass"}
    assert passed <= {"cpu_allowed", "memory_shm", "limits_nofile", "limits_nproc", "limits_stack"}


def test_truncated_and_odd_files_are_no_crash(tmp_path: Path) -> None:
    host = Host(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    for path in files:
        whole = path.read_bytes()
        for damaged in (whole[: len(whole) // 2], b"\xff-1: \n"):
            path.write_bytes(damaged)
            host.found()
        path.write_bytes(whole)


def test_a_quota_of_the_control_group_limits_cpus(host: Host) -> None:
    before = allowed_cpus(host.node.source)
    group(host, "cpu.max", "50000 100000")
    assert allowed_cpus(host.node.source) == 0.5 < before


@pytest.mark.parametrize(("limit", "known"), [(str(64 * GIB), 64 * GIB), ("9223372036854771712", None), ("max", None)])
def test_control_groups_of_version_1_limit_memory(host: Host, limit: str, known: int | None) -> None:
    host.node.write("proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/slurm/uid_1/job_12/step_0\n1:name=systemd:/")
    host.node.write("sys/fs/cgroup/memory/slurm/uid_1/job_12/memory.limit_in_bytes", limit)
    finding = host.found()["limits_memory"]
    assert isinstance(finding, Check)
    assert finding.value == (f"{known // GIB} GiB of 2,015 GiB" if known else "all of the node")


def test_limits_are_those_of_this_process() -> None:
    assert {*read_limits(FactSource()).limits} == {"memlock", "nofile", "nproc", "stack"}
