# SPDX-License-Identifier: Apache-2.0
"""What is read of a node, below a folder with the files of a kernel."""

from pathlib import Path

import pytest

from llmb.missing import Missing
from llmb.resources.host import PAGE_BYTES, TICKS_PER_S, CpuEnergy, find_cpu_energy, read_host
from llmb.resources.records import HostSample


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


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
