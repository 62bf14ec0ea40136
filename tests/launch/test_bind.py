# SPDX-License-Identifier: Apache-2.0
"""Which cores and which memory each worker of a node gets, on trees of /sys and /proc as the kernel documents them."""

import ast
from pathlib import Path

import pytest

from llmb.launch import bind
from llmb.launch.bind import cpu_text, parse_cpus, share

GPUS = ("0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0", "0000:df:00.0")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Two sockets of four cores with two hardware threads each: core c has CPUs c and c + 8. Two GPUs on each."""
    for number, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    for cpu in range(16):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def with_gpus(root: Path, numa: tuple[int, ...]) -> Path:
    for number, (bus, place) in enumerate(zip(GPUS, numa, strict=True)):
        driver = root / "proc/driver/nvidia/gpus" / bus.upper()
        driver.mkdir(parents=True)
        (driver / "information").write_text(f"Model: \t\t NVIDIA H100 80GB HBM3\nGPU UUID: \t GPU-{number}abc\n")
        device = root / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{place}\n")
    return root


def shares(root: Path, cpu: str, numa: str, workers: int = 4, allowed: str = "0-15", **environ: str) -> list[str]:
    found = []
    for rank in range(workers):
        given = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers), **environ}
        cpus, place = share(root, given, parse_cpus(allowed), cpu, numa)
        found.append(cpu_text(cpus) + ("" if place is None else f" @{place}"))
    return found


def test_an_equal_share_holds_whole_cores_of_one_socket(node: Path) -> None:
    assert shares(node, "cores", "none") == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert shares(node, "cores", "none", workers=3) == ["0-1,8-9", "2-3,10-11", "4-5,12-13"]


def test_a_number_of_cores_leaves_the_others(node: Path) -> None:
    assert shares(node, "1", "none") == ["0,8", "1,9", "2,10", "3,11"]


def test_local_is_the_socket_of_the_gpu(node: Path) -> None:
    with_gpus(node, (1, 1, 0, 0))
    first, second = "0-3,8-11 @0", "4-7,12-15 @1"
    assert shares(node, "none", "local") == [second, second, first, first]
    assert shares(node, "cores", "local") == ["4-5,12-13 @1", "6-7,14-15 @1", "0-1,8-9 @0", "2-3,10-11 @0"]
    assert shares(node, "none", "local", workers=2, CUDA_VISIBLE_DEVICES="2,1") == [first, second]
    assert shares(node, "none", "local", workers=1, CUDA_VISIBLE_DEVICES="GPU-3abc") == [first]


@pytest.mark.parametrize("numa", [(-1, -1, -1, -1), (0, 0, 8, 8)])
def test_workers_spread_over_the_sockets_where_the_gpus_do_not_tell(node: Path, numa: tuple[int, ...]) -> None:
    """As in a virtual machine, or where the GPUs' own memory is the nearest NUMA node."""
    spread = ["0-3,8-11 @0", "0-3,8-11 @0", "4-7,12-15 @1", "4-7,12-15 @1"]
    assert shares(node, "none", "local") == spread
    assert shares(with_gpus(node, numa), "none", "local") == spread


def test_only_what_the_job_may_use_is_shared(node: Path) -> None:
    assert shares(node, "cores", "local", workers=2, allowed="2-5") == ["2-3 @0", "4-5 @1"]
    assert shares(node, "cores", "local", workers=2, allowed="2,3,10,11") == ["2,10 @0", "3,11 @0"]


def test_too_few_cores_are_reported(node: Path) -> None:
    with pytest.raises(ValueError, match="so 4 x 3 cores are required, but the node has 8"):
        shares(node, "3", "none")
    with pytest.raises(ValueError, match="so 2 x 1 cores are required, but NUMA node 0 has 1"):
        shares(node, "cores", "local", allowed="0,4,5,6")


def test_it_imports_nothing_that_a_container_may_lack() -> None:
    tree = ast.parse(Path(bind.__file__).read_text())
    names = {alias.name for item in ast.walk(tree) if isinstance(item, ast.Import) for alias in item.names}
    names |= {str(item.module) for item in ast.walk(tree) if isinstance(item, ast.ImportFrom)}
    assert names == {"collections.abc", "ctypes", "os", "pathlib", "platform", "sys"}
