# SPDX-License-Identifier: Apache-2.0
"""What is read of a node, and counters before and after, below a folder with the files of a kernel."""

from pathlib import Path

import pytest

from llmb.base.missing import Missing
from llmb.readers.samples.counters import AREAS, MOST_LINES, KernelLog, read_counters
from llmb.readers.samples.host import PAGE_BYTES, TICKS_PER_S, CpuEnergy, find_cpu_energy, read_host
from llmb.readers.samples.machine import MachineReport, find_events
from llmb.readers.samples.sample_records import CounterReading, HostSample, SamplerStart
from llmb.readers.samples.samples import Sampled

PORT = "sys/class/infiniband/mlx5_0/ports/1"
TREE = {
    f"{PORT}/counters/symbol_error": "3\n",
    f"{PORT}/counters/link_downed": "0\n",
    f"{PORT}/hw_counters/packet_seq_err": "40\n",
    "sys/class/net/eth0/carrier_changes": "2\n",
    "sys/class/net/eth0/statistics/rx_errors": "0\n",
    "sys/class/net/lo/statistics/rx_errors": "9\n",
    "proc/net/snmp": "Tcp: RtoAlgorithm OutSegs RetransSegs InErrs\nTcp: 1 1000 5 0\n",
    "sys/bus/pci/devices/0000:1b:00.0/class": "0x030200\n",
    "sys/bus/pci/devices/0000:1b:00.0/aer_dev_correctable": "RxErr 1\nBadTLP 0\nTOTAL_ERR_COR 1\n",
    "sys/bus/pci/devices/0000:1b:00.0/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
    "sys/bus/pci/devices/0000:00:1f.0/class": "0x060100\n",
    "sys/bus/pci/devices/0000:00:1f.0/aer_dev_correctable": "TOTAL_ERR_COR 99\n",
    "sys/devices/system/edac/mc/mc0/ce_count": "4\n",
    "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
    "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "6\n",
    "sys/devices/system/cpu/cpu1/thermal_throttle/package_throttle_count": "6\n",
    "sys/devices/system/cpu/cpu1/topology/physical_package_id": "1\n",
    "proc/vmstat": "nr_free_pages 5\npgmajfault 70\noom_kill 0\npswpin 0\n",
    "proc/self/cgroup": "0::/slurm/job_7/step_0/task_0\n",
    "sys/fs/cgroup/slurm/job_7/memory.events": "low 0\noom 1\noom_kill 1\n",
    "dev/kmsg": "6,1,100,-;an old NVRM: Xid (PCI:0000:1b:00): 79, before the run\n",
}
COUNTERS = {
    "rdma/mlx5_0/symbol_error": 3,
    "rdma/mlx5_0/packet_seq_err": 40,
    "network/eth0/carrier_changes": 2,
    "tcp/node/OutSegs": 1000,
    "tcp/node/RetransSegs": 5,
    "pci/0000:1b:00.0/aer_correctable": 1,
    "host_memory/mc0/ce_count": 4,
    "cpu/package0/throttle_count": 6,
    "cpu/package1/throttle_count": 6,
    "memory/node/pgmajfault": 70,
    "cgroup/job/oom_kill": 1,
}


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def machine(before: CounterReading, after: CounterReading, nodes: tuple[str, ...] = ("n1",)) -> MachineReport:
    start = SamplerStart(node="n1", cores=8, interval_s=1.0)
    return find_events([Sampled(start, (), (before, after))], nodes)


def test_a_node_and_what_changes_on_it(tmp_path: Path) -> None:
    put(tmp_path, TREE)
    kernel = KernelLog(tmp_path)
    before = read_counters(kernel, root=tmp_path)
    assert before.counters == COUNTERS
    assert set(before.read) == {*AREAS, "kernel_log"}
    assert (before.unread, before.kernel) == ({}, ())
    changes = {
        f"{PORT}/hw_counters/packet_seq_err": "5160\n",
        f"{PORT}/counters/link_downed": "1\n",
        "sys/bus/pci/devices/0000:1b:00.0/aer_dev_fatal": "Undefined 2\nTOTAL_ERR_FATAL 2\n",
        "proc/vmstat": "pgmajfault 90\noom_kill 1\n",
    }
    put(tmp_path, changes)
    with (tmp_path / "dev/kmsg").open("a") as log:
        log.write("4,2,200,-;NVRM: Xid (PCI:0000:1b:00): 94, pid=7, Contained\x1b[31m ECC error\n SUBSYSTEM=pci\n")
        log.write("6,3,201,-;audit: something of another user\n4,4,202,-;mlx5_core 0000:17:00.0: Link down\n")
    after = read_counters(kernel, root=tmp_path)
    assert len(after.kernel) == 2, "only what is known of hardware"
    found = machine(before, after)
    assert found.state == "faulty"
    assert [(event.kind, event.state, event.counter, event.before, event.after) for event in found.events] == [
        ("pcie", "faulty", "pci/0000:1b:00.0/aer_fatal", 0, 2),
        ("gpu_error", "faulty", "kernel_log", 0, 1),
        ("link_flap", "doubtful", "rdma/mlx5_0/link_downed", 0, 1),
        ("retransmissions", "doubtful", "rdma/mlx5_0/packet_seq_err", 40, 5160),
        ("oom", "doubtful", "memory/node/oom_kill", 0, 1),
        ("link_flap", "doubtful", "kernel_log", 0, 1),
    ]
    assert all("\x1b" not in (event.text or "") for event in found.events)
    assert found.faulty_nodes == ("n1",)
    assert found.faults[0] == "PCIe errors on n1: aer_fatal of 0000:1b:00.0 rose by 2"
    assert found.faults[-1] == "2 more kinds of events"


def test_what_cannot_be_read_is_never_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, TREE)

    def forbidden(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("llmb.readers.samples.counters.AREAS", {**AREAS, "rdma": forbidden})
    (tmp_path / "dev/kmsg").unlink()
    reading = read_counters(KernelLog(tmp_path), no_gpus="NVML is not here", root=tmp_path)
    assert reading.unread == {
        "gpu": "NVML is not here",
        "rdma": f"{tmp_path}: Permission denied",
        "kernel_log": "/dev/kmsg: No such file or directory",
    }
    found = machine(reading, reading)
    assert found.state == "unknown"
    assert [(one.what, one.nodes) for one in found.unread] == [
        ("counters of the GPUs", ("n1",)),
        ("counters of ports with RDMA", ("n1",)),
        ("the kernel's log", ("n1",)),
    ]


def test_a_node_without_any_of_it_has_nothing_to_read(tmp_path: Path) -> None:
    put(tmp_path, {"dev/kmsg": ""})
    reading = read_counters(KernelLog(tmp_path), root=tmp_path)
    assert (reading.counters, reading.read, reading.unread) == ({}, ("kernel_log",), {})


def test_areas_that_take_too_long_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, TREE)
    monkeypatch.setattr("llmb.readers.samples.counters.MOST_S", -1.0)
    reading = read_counters(KernelLog(tmp_path), root=tmp_path)
    assert reading.unread == dict.fromkeys(AREAS, "not read within -1 s")


def test_a_busy_kernel_fills_no_file(tmp_path: Path) -> None:
    put(tmp_path, {"dev/kmsg": ""})
    kernel = KernelLog(tmp_path)
    lines = (f"4,{number},1,-;mce: [Hardware Error]: {number} {'x' * 999}\n" for number in range(1000))
    (tmp_path / "dev/kmsg").write_text("".join(lines))
    said = kernel.lines()
    assert len(said) == MOST_LINES and said[-1].startswith("mce: [Hardware Error]: 999 ")
    assert max(map(len, said)) == 300


def test_this_machine_is_read_within_a_second() -> None:
    kernel = KernelLog()
    before, after = read_counters(kernel), read_counters(kernel)
    assert not any("not read within" in reason for reason in (*before.unread.values(), *after.unread.values()))
    assert {"tcp", "memory"} <= set(before.read)


def test_a_node(tmp_path: Path) -> None:
    ticks = [number * TICKS_PER_S for number in (10, 1, 5, 100, 7, 2, 3, 20)]
    put(
        tmp_path,
        {
            "proc/stat": f"cpu  {' '.join(map(str, ticks))} 50 0\ncpu0 1 2 3\n",
            "proc/loadavg": "3.50 2.00 1.00 2/300 4000\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 600 kB\n",
            "proc/77/statm": "900 300 100 1 0 20 0\n",
        },
    )
    assert read_host(77, None, root=tmp_path) == HostSample(
        cpu_busy_s=21.0,
        cpu_iowait_s=7.0,
        cpu_steal_s=20.0,
        cpu_used_s=16.0,
        cpu_total_s=148.0,
        load=3.5,
        memory_used_bytes=400 * 1024,
        worker_memory_bytes=300 * PAGE_BYTES,
    )


@pytest.mark.parametrize("text", ["", "cpu  1 2\n", "cpu  a b c d e f g h\n"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    put(tmp_path, {"proc/stat": text, "proc/loadavg": "", "proc/meminfo": "MemTotal:\n"})
    assert read_host(77, None, root=tmp_path) == HostSample()
    assert read_host(0, None).worker_memory_bytes is None, "no process has this number"


def test_the_energy_of_all_packages_beyond_the_end_of_their_counters(tmp_path: Path) -> None:
    def write(first: int, second: int) -> None:
        for zone, name, energy in (("0", "package-0", first), ("1", "package-1", second), ("0:0", "core", 5)):
            folder = f"sys/class/powercap/intel-rapl:{zone}"
            values = {"name": f"{name}\n", "energy_uj": f"{energy}\n", "max_energy_range_uj": "10000000\n"}
            put(tmp_path, {f"{folder}/{file}": text for file, text in values.items()})

    write(9_000_000, 1_000_000)
    energy = find_cpu_energy(tmp_path)
    assert isinstance(energy, CpuEnergy)
    assert energy.read_j() == 0
    write(1_000_000, 2_500_000)
    assert energy.read_j() == pytest.approx(2 + 1.5)
    assert read_host(1, energy, root=tmp_path).cpu_energy_j == pytest.approx(3.5)
    (tmp_path / "sys/class/powercap/intel-rapl:1/energy_uj").unlink()
    assert energy.read_j() is None


def test_why_there_is_no_energy(tmp_path: Path) -> None:
    assert find_cpu_energy(tmp_path) == Missing("the kernel has no counters of CPU energy in /sys/class/powercap")
    put(tmp_path, {"sys/class/powercap/intel-rapl:0/name": "package-0\n"})
    found = find_cpu_energy(tmp_path)
    assert isinstance(found, Missing)
    assert found.reason.endswith("max_energy_range_uj: No such file or directory")


def test_this_node() -> None:
    first = read_host(1, None)
    assert first.cpu_total_s and first.cpu_busy_s and 0 < first.cpu_busy_s < first.cpu_total_s
    assert first.memory_used_bytes and first.memory_used_bytes > 1 << 20
