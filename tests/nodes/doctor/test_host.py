# SPDX-License-Identifier: Apache-2.0
"""CPUs, memory, kernel, limits and network of a fit node, and of nodes with one thing wrong."""

import re
import resource
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from recorded_node import ADDRESSES, FILES, RecordedNode

from llmb.base.tools import Output
from llmb.catalogue.catalogue import Catalogue
from llmb.nodes.doctor.check_records import Check, NotChecked
from llmb.nodes.doctor.checks.host import LIMITS, allowed_cpus, cpu_checks, kernel_checks, limit_checks, memory_checks
from llmb.nodes.doctor.checks.network import network_checks, read_ports
from llmb.nodes.doctor.facts import FactSource, TargetFacts
from llmb.nodes.doctor.rules import Finding, names_of, rules

CATALOGUE = Catalogue().gpus
PUBLIC = """4: eth1    inet 8.8.8.8/24 brd 8.8.8.255 scope global eth1
4: eth1    inet6 2606:4700::1111/64 scope global
"""
H100 = TargetFacts(
    catalogue=CATALOGUE, gpu=CATALOGUE["h100"], gpus=8, gpus_by="--gpus", cluster=True, fabric="infiniband"
)
GIB = 2**30
AREAS = ("cpu", "memory", "kernel", "limits", "network")
NET, IB, CPU = "sys/class/net", "sys/class/infiniband", "sys/devices/system/cpu"


class Host:
    """A recorded node, and what is expected of it."""

    def __init__(self, root: Path) -> None:
        self.node = RecordedNode(root)
        self.target, self.gpus = H100, 8

    def found(self) -> dict[str, Finding]:
        source = self.node.source
        ports = read_ports(source)
        parts: tuple[Iterable[Finding], ...] = (
            cpu_checks(source, self.target),
            memory_checks(source),
            kernel_checks(source),
            limit_checks(source, has_rdma=bool(ports)),
            network_checks(source, ports, "node1", self.gpus, self.target),
        )
        return {finding.name: finding for part in parts for finding in part}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_fit_host_passes_every_check(host: Host) -> None:
    found = host.found()
    assert [*found] == [name for area in AREAS for name in names_of(area)]
    not_passed = {name: one for name, one in found.items() if getattr(one, "status", "") != "pass"}
    assert not_passed == {"network_rdma_mtu": NotChecked(name="network_rdma_mtu", reason="no active port uses RoCE")}
    values = {name: one.value for name, one in found.items() if isinstance(one, Check)}
    assert values["cpu_idle_states"] == "C6, 290 µs to exit"
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


def memory(name: str, size: int, unit: str = " kB") -> Callable[[Host], object]:
    """Changes a line of /proc/meminfo."""
    line = f"{name}: {size}{unit}"
    return lambda host: host.node.write("proc/meminfo", re.sub(rf"(?m)^{name}:.*$", line, FILES["proc/meminfo"]))


def shm(free: int) -> Callable[[Host], object]:
    return lambda host: setattr(host.node, "shm_bytes", (1000 * GIB, free))


def limit(name: str, soft: int, hard: int = resource.RLIM_INFINITY) -> Callable[[Host], object]:
    return lambda host: host.node.limits.update({LIMITS[name]: (soft, hard)})


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


# The check, its status, parts of its value and of its advice, and what is wrong with the host.
UNFIT: dict[str, tuple[str, str, str, str, Callable[[Host], object]]] = {
    "governor": ("cpu_governor", "warn", "powersave on 1 CPU", "cpupower",
        write(f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave")),
    "idle state": ("cpu_idle_states", "warn", "C6, 800", "idle-set",
        write(f"{CPU}/cpu0/cpuidle/state1/latency", "800")),
    "no NUMA node": ("cpu_numa", "warn", "1 NVIDIA device", "BIOS",
        lambda host: host.node.add_gpu_on_bus("0000:00:00.0", -1)),
    "few CPUs": ("cpu_allowed", "warn", "31 of 224 CPUs, for 8 GPUs", "exclusive",
        lambda host: setattr(host.node, "cores", 31)),
    "one CPU": ("cpu_allowed", "fail", "1 of 224 CPUs, for 8 GPUs", "exclusive",
        lambda host: setattr(host.node, "cores", 1)),
    "busy": ("cpu_load", "warn", "113 processes on 224 CPUs", "top", write("proc/loadavg", "113.0 90.0 80.0 1/1 1")),
    "little memory": ("memory_available", "warn", "900 GiB of", "top",
        memory("MemAvailable", 900 * 2**20)),
    "no memory": ("memory_available", "fail", "100 GiB of", "top",
        memory("MemAvailable", 100 * 2**20)),
    "swap": ("memory_swap", "warn", "2.0 GiB in use", "swapoff", memory("SwapTotal", 2 * 2**20)),
    "huge pages": ("memory_huge_pages", "warn", "400 GiB", "sysctl",
        memory("HugePages_Free", 400 * 512, "")),
    "little shm": ("memory_shm", "warn", "512 MiB of", "--shm-size",
        shm(512 * 2**20)),
    "no shm left": ("memory_shm", "fail", "64 MiB of", "--shm-size",
        shm(64 * 2**20)),
    "no shm": ("memory_shm", "fail", "there is no /dev/shm", "--ipc=host",
        lambda host: setattr(host.node, "shm_bytes", None)),
    "bad memory": ("memory_errors", "fail", "1 uncorrected", "drain",
        write("sys/devices/system/edac/mc/mc0/ue_count", "1")),
    "weak memory": ("memory_errors", "warn", "101 corrected", "grow",
        write("sys/devices/system/edac/mc/mc0/ce_count", "101")),
    "small pages": ("kernel_transparent_hugepage", "warn", "never", "madvise",
        write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]")),
    "NUMA balancing": ("kernel_numa_balancing", "warn", "on, 2 NUMA", "sysctl",
        write("proc/sys/kernel/numa_balancing", "1")),
    "IOMMU": ("kernel_iommu", "warn", "1 device group", "iommu=pt",
        several(write("proc/cmdline", "ro intel_iommu=on"), write("sys/kernel/iommu_groups/0/type", "DMA-FQ"))),
    "memlock": ("limits_memlock", "fail", "0 MiB (hard limit unl", "RDMA",
        limit("memlock", 65536)),
    "hard memlock": ("limits_memlock", "fail", "8 MiB (hard limit 8 MiB)", "limits.conf",
        limit("memlock", 8 * 2**20, 8 * 2**20)),
    "some files": ("limits_nofile", "warn", "4,096", "limits.conf",
        limit("nofile", 1024, 4096)),
    "few files": ("limits_nofile", "fail", "256", "limits.conf",
        limit("nofile", 256, 256)),
    "some processes": ("limits_nproc", "warn", "4,096", "ulimit -u",
        limit("nproc", 4096)),
    "few processes": ("limits_nproc", "fail", "512", "ulimit -u", limit("nproc", 512)),
    "stack": ("limits_stack", "warn", "1 MiB", "ulimit -s", limit("stack", 2**20)),
    "memory of a job": ("limits_memory", "warn", "64 GiB of 2,015 GiB", "--mem=0",
        lambda host: group(host, "memory.max", str(64 * GIB))),
    "no card up": ("network_cards", "fail", "none of eth0 is up", "ip link", write(f"{NET}/eth0/operstate", "down")),
    "bad packets": ("network_errors", "warn", "101 of 1,000,000", "ethtool",
        write(f"{NET}/eth0/statistics/rx_errors", "101")),
    "loopback": ("network_host_name", "warn", "127.0.1.1", "/etc/hosts",
        lambda host: host.node.said.update({"getent": "127.0.1.1       STREAM node1\n"})),
    "no name": ("network_host_name", "warn", "does not resolve", "DNS",
        lambda host: host.node.said.update({"getent": Output("", "exit code 2")})),
    "public address": ("network_public_address", "warn", "eth1 8.8.8.8, eth1 2606:4700::1111", "firewall",
        lambda host: host.node.said.update({"ip -o address show up": ADDRESSES + PUBLIC})),
    "port down": ("network_rdma", "fail", "7 of 8 ports active; mlx5_3 INIT, LinkUp", "subnet manager",
        several(port("state", "2: INIT"), port("phys_state", "5: LinkUp"))),
    "unused port": ("network_rdma", "warn", "8 of 9 ports active; mlx5_8 DOWN, Disabled", "no cable", unused_port),
    "slow port": ("network_rdma_rate", "warn", "1 x 200 Gb/s InfiniBand", "storage",
        port("rate", "200 Gb/sec (4X HDR)")),
    "narrow port": ("network_rdma_rate", "warn", "fewer lanes: mlx5_3 2X", "lane", port("rate", "200 Gb/sec (2X NDR)")),
    "half the rate": ("network_rdma_rate", "warn", "25 of 50 GB/s per GPU", "switch",
        several(*(port("rate", "200 Gb/sec (4X HDR)", f"mlx5_{index}") for index in range(8)))),
    "bad cable": ("network_rdma_errors", "warn", "mlx5_3 symbol_error 11", "cable",
        port("counters/symbol_error", "11")),
    "small MTU": ("network_rdma_mtu", "warn", "1500 (mlx5_0, mlx5_1, mlx5_2, mlx5_3 and 4 more)", "9000", roce),
    "no GPUDirect": ("network_gpu_direct", "warn", "peermem", "modprobe",
        write("proc/modules", "nvidia 1 0 - Live 0x0")),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_an_unfit_host_is_found_with_advice(host: Host, case: str) -> None:
    name, status, text, advice, change = UNFIT[case]
    change(host)
    found = host.found()
    finding = found.pop(name)
    assert isinstance(finding, Check)
    assert (finding.status, finding.name) == (status, name)
    assert text in str(finding.value)
    assert advice in str(finding.advice)
    assert {one.name for one in found.values() if getattr(one, "status", "pass") != "pass"} == set()


def test_every_check_that_can_fail_or_warn_has_a_case() -> None:
    target = {(rule.name, "fail") for rule in rules().values() if rule.area in AREAS and rule.fails_if}
    target |= {(rule.name, "warn") for rule in rules().values() if rule.area in AREAS and rule.warns_if}
    assert target == {(name, status) for name, status, *_ in UNFIT.values()}


def test_missing_cards_fail_where_the_network_is_infiniband(tmp_path: Path) -> None:
    host = Host(tmp_path)
    (tmp_path / IB).rename(tmp_path / "gone")
    finding = host.found()["network_rdma"]
    assert isinstance(finding, Check)
    assert (finding.status, finding.value) == ("fail", "none; cluster_config.yaml has fabric: infiniband")
    host.target = replace(H100, fabric=None)
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
    host.node.said["ip -o address show up"] = Output("", "ip was not found")
    finding = host.found()["network_public_address"]
    assert finding == NotChecked(name="network_public_address", reason="ip was not found")


GOVERNOR, OPEN_MODULES = f"{CPU}/cpu0/cpufreq", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06"
IOMMU, DMA = "proc/cmdline", {"sys/kernel/iommu_groups/0/type": "DMA"}
LOOKS_ALIKE: tuple[tuple[str, str, dict[str, str]], ...] = (
    # The hardware may choose clocks by a preference; the open kernel modules need no peermem.
    ("cpu_governor", "pass", {f"{GOVERNOR}/scaling_governor": "powersave",
                              f"{GOVERNOR}/energy_performance_preference": "performance"}),
    ("network_gpu_direct", "pass", {"proc/modules": "nvidia 1 0 -", "proc/driver/nvidia/version": OPEN_MODULES}),
    ("kernel_iommu", "pass", {IOMMU: "ro iommu=pt", **DMA}),
    ("kernel_iommu", "pass", {IOMMU: "ro iommu.passthrough=1 quiet", **DMA}),
    ("kernel_iommu", "pass", {IOMMU: "intel_iommu=off", **DMA}),
    ("kernel_iommu", "pass", {IOMMU: "amd_iommu=off ro", **DMA}),
    ("kernel_iommu", "warn", {IOMMU: "ro xiommu=pt iommu=ptx", **DMA}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "status", "files"), LOOKS_ALIKE)
def test_what_only_looks_alike_is_told_apart(host: Host, name: str, status: str, files: dict[str, str]) -> None:
    for file, text in files.items():
        host.node.write(file, text)
    assert getattr(host.found()[name], "status", None) == status


def test_what_no_file_shows_is_not_checked(tmp_path: Path) -> None:
    """As in a container without /sys, or on another system."""
    host = Host(tmp_path)
    for folder in ("proc", "sys"):
        (tmp_path / folder).rename(tmp_path / f"no-{folder}")
    host.node.said.clear()
    host.target, host.gpus = TargetFacts(), 0
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
    found = limit_checks(FactSource(), has_rdma=True)
    assert [finding.name for finding in found] == names_of("limits")
