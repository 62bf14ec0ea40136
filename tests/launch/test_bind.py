# SPDX-License-Identifier: Apache-2.0
"""Which cores and which memory each worker of a node gets, on trees of /sys and /proc as the kernel documents them."""

import ast
import os
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmb.engine.parallel.rendezvous import announce_folder, announced_folder, host_store
from llmb.launch import bind, started_ranks
from llmb.launch.bind import cpu_text, parse_cpus, reason_not_to_bind, share
from llmb.launch.jobspec.job_options import Binding
from llmb.launch.jobspec.spec import JobSpec, Placement
from llmb.launch.local import local_command
from llmb.launch.ranks import bind_words, words
from llmb.launch.started_ranks import StartedRank, join_run
from llmb.nodes.bench import measure
from llmb.readers.samples.host import Device
from llmb.runs.folder import RunFolder

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


def reason(root: Path, workers: int = 4, allowed: str = "0-15", **environ: str) -> str | None:
    given = {"LOCAL_WORLD_SIZE": str(workers), **environ}
    return reason_not_to_bind(root, given, parse_cpus(allowed))


def test_auto_binds_only_where_every_gpu_s_socket_is_told(node: Path, tmp_path: Path) -> None:
    assert reason(node) == "the system does not report the NUMA nodes of all GPUs"
    with_gpus(node, (1, 1, 0, 0))
    assert reason(node) is None
    assert reason(node, workers=2, CUDA_VISIBLE_DEVICES="0,3") is None
    assert reason(node, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="0,1,2,3") is None
    assert reason(node, workers=8) == "the system does not report the NUMA nodes of all GPUs"
    (node / "sys/bus/pci/devices" / GPUS[0] / "numa_node").write_text("-1\n")
    assert reason(node) == "the system does not report the NUMA nodes of all GPUs"


def test_auto_does_not_bind_to_a_socket_that_may_be_another_s(node: Path) -> None:
    with_gpus(node, (0, 0, 1, 1))
    assert reason(node, allowed="0-3") == "the workers are not allowed to use the cores of every GPU's NUMA node"
    assert reason(node, workers=1) == "LOCAL_WORLD_SIZE is unset or 1"
    told = "the job has only some of the node's GPUs, which Slurm numbers from 0"
    assert reason(node, workers=2, SLURM_JOB_ID="7", CUDA_VISIBLE_DEVICES="0,1") == told
    assert reason(node, LLMB_NUMA_BINDING="none") == "LLMB_NUMA_BINDING is none"


ASKS = "import os; print(os.environ['LLMB_BINDING'], len(os.sched_getaffinity(0)))"


def test_a_worker_that_auto_does_not_bind_runs_as_before_and_knows_why(capfd: pytest.CaptureFixture[str]) -> None:
    bound = [sys.executable, "-m", bind.__name__, "none", "auto", sys.executable, "-c", ASKS]
    environ = {**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "LLMB_NUMA_BINDING": "none"}
    subprocess.run(bound, env=environ, check=True)
    printed, log = capfd.readouterr()
    assert printed == f"none: LLMB_NUMA_BINDING is none {len(os.sched_getaffinity(0))}\n"
    assert log.endswith(" is not bound: LLMB_NUMA_BINDING is none\n")


def test_a_worker_knows_its_binding(capfd: pytest.CaptureFixture[str]) -> None:
    bound = [sys.executable, "-m", bind.__name__, "1", "none", sys.executable, "-c", ASKS]
    subprocess.run(bound, env={**os.environ, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, check=True)
    assert re.fullmatch(r"CPUs [\d,-]+ \d+\n", capfd.readouterr().out)


@pytest.mark.parametrize(
    ("binding", "fields", "arguments"),
    [
        (Binding(), {}, ("none", "auto")),
        (Binding(), {"gpus": False}, None),
        (Binding(), {"placement": Placement(2, 1, whole_nodes=False)}, None),
        (Binding(cpu="cores"), {}, ("cores", "none")),
        (Binding(cpu=4, numa="local"), {"gpus": False}, ("4", "local")),
        (Binding(numa="none"), {}, None),
    ],
)
def test_auto_is_for_several_gpus_whose_cores_nobody_chose(
    binding: Binding, fields: dict[str, object], arguments: tuple[str, str] | None
) -> None:
    given = {"placement": Placement(1, 8, whole_nodes=True), "gpus": True, "binding": binding, **fields}
    names = dict.fromkeys(("scheduler", "program", "title", "name", "python", "log"), "any")
    spec = JobSpec(**given, **names, time_limit_min=None, start="torchrun", work=("train",))
    assert spec.bind_arguments == arguments
    bound = (sys.executable, "-P", "-m", bind.__name__, *arguments, "train") if arguments else ("train",)
    assert local_command(spec, RunFolder(Path("run"))) == (sys.executable, *words(1, spec.placement.processes), *bound)
    assert local_command(spec, RunFolder(Path("run")), StartedRank(0, 8, "node0")) == bound


@pytest.mark.parametrize(("device", "ranks", "binds"), [("cuda", 4, True), ("cuda", 1, False), ("cpu", 4, False)])
def test_measurements_are_bound_as_runs(
    device: Device, ranks: int, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(measure, "run_program", lambda command, *_: commands.append(command))
    measure.run_ranks("program", Path("folder"), ranks, device, "GPUs", lambda _: None)
    bound = bind_words(("none", "auto") if binds else None)
    assert commands == [(*words(1, ranks), *bound, sys.executable, "-P", "-m", "program", "folder")]


@pytest.mark.parametrize(("binding", "binds"), [("none: LLMB_NUMA_BINDING is none", True), (None, False)])
def test_ranks_that_something_else_started_are_bound_if_rank_0_is(
    binding: str | None, binds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    ended = nullcontext(SimpleNamespace(wait=lambda: 0))
    monkeypatch.setattr(started_ranks, "started_program", lambda command, *_: commands.append(command) or ended)
    join_run(StartedRank(1, 2, "127.0.0.1"), {})
    variables = {"LLMB_STORE": str(tmp_path / "store"), "RANK": "0", "LLMB_RANK_VARIABLES": "TORCH_NCCL_A,LD_PRELOAD"}
    for name, value in {**variables, "TORCH_NCCL_A": "1", "LD_PRELOAD": "", "LLMB_BINDING": binding}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    announce_folder(host_store(), tmp_path / "run")
    assert announced_folder() == (tmp_path / "run", {"TORCH_NCCL_A": "1"}, binds)
    monkeypatch.setattr(sys, "argv", commands[0][3:])
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append((program, *command)))
    runpy.run_module(started_ranks.JOIN, run_name="__main__")
    bound = bind_words(("none", "auto") if binds else None)
    worker = (sys.executable, "-P", "-m", "llmb.engine.worker", str(tmp_path / "run"))
    assert commands[1:] == [(sys.executable, *bound, *worker)]


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
