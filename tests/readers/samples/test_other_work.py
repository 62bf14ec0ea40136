# SPDX-License-Identifier: Apache-2.0
"""What else a node did beside a run: processes, and the figures made of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Request
from llmb.jobs.local_run import plan_here
from llmb.readers.samples.host import TICKS_PER_S, NodeProcesses, find_cpu_limit, read_host
from llmb.readers.samples.other_work import NOT_SAMPLED, find_other_work
from llmb.readers.samples.sample_records import (
    GpuSamples,
    HostSample,
    OtherRun,
    OtherWork,
    Sample,
    SampledGpu,
    SamplerStart,
)
from llmb.readers.samples.samples import Sampled, TimeSpan
from llmb.runs.choices import Choices

SPIN = "while True: pass"
ORPHAN = '"$@" >/dev/null & echo $!'
WINDOW = (TimeSpan(12, 14), TimeSpan(14, 16))
SEEN = OtherRun(program="llmb.engine.worker", folder="/b/run", pid=7, since_s=11.0)
MANY = tuple(replace(SEEN, folder=f"/b/exp_{number}/exp", pid=number) for number in range(4))


def put_process(root: Path, pid: int, parent: int, words: str, *ticks: int, began: int = 5000) -> None:
    """``ticks``: user and system time of its own, and of its ended children."""
    times = (*ticks, *(0,) * (4 - len(ticks)))
    fields = ["S", str(parent), *["0"] * 9, *map(str, times), *["0"] * 4, str(began)]
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stat").write_text(f"{pid} (py (x) thon) {' '.join(fields)} 0 0\n")
    (folder / "cmdline").write_bytes("\0".join(words.split(" ")).encode() + b"\0")


def node_of_two_runs(root: Path) -> NodeProcesses:
    put_process(root, 1, 0, "init", 900)
    put_process(root, 10, 1, "llmb run", 100, 0, 50, 0)
    put_process(root, 11, 10, "python -P -m llmb.launch.ranks 1 2 python -m llmb.engine.worker /a/run", 100)
    put_process(root, 12, 11, "python -m llmb.engine.worker /a/run", 300, 100)
    put_process(root, 13, 12, "cc1plus", 100)
    put_process(root, 20, 1, "python -m llmb.engine.worker /a/run2", 500, began=7000)
    put_process(root, 21, 20, "python -m llmb.engine.worker /a/run2", 500, began=8000)
    put_process(root, 30, 1, "vi llmb.engine.worker", 500)
    (root / "proc/stat").write_text("cpu 1 2 3\nbtime 1000\n")
    return NodeProcesses(Path("/a/run"), root)


def test_the_processes_of_a_run_and_other_runs(tmp_path: Path) -> None:
    node = node_of_two_runs(tmp_path)
    node.look()
    assert set(node.own) == {11, 12, 13}
    assert node.cpu_s() == pytest.approx((100 + 400 + 100 + 100 + 900) / TICKS_PER_S)
    (other,) = node.others()
    assert (other.folder, other.pid) == ("/a/run2", 20)
    assert other.since_s == 1000 + 7000 / TICKS_PER_S


def test_the_time_of_processes_that_ended_still_counts(tmp_path: Path) -> None:
    """Once, whether their parent has it or is none of the run."""
    node = node_of_two_runs(tmp_path)
    node.look()
    before = node.cpu_s()
    for name in ("stat", "cmdline"):
        (tmp_path / "proc/13" / name).unlink()
    put_process(tmp_path, 12, 11, "python -m llmb.engine.worker /a/run", 300, 100, 100)
    node.look()
    assert node.cpu_s() == before
    (tmp_path / "proc/11/stat").unlink()  # its parent is the client
    put_process(tmp_path, 12, 1, "python -m llmb.engine.worker /a/run", 300, 100, 100)
    node.look()
    assert node.cpu_s() == before


def test_without_processes_nothing_is_known(tmp_path: Path) -> None:
    node = NodeProcesses(Path("/a/run"), tmp_path)
    node.look()
    assert (node.cpu_s(), node.others()) == (None, ())


@contextmanager
def spinning(*words: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", SPIN, *words])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def test_a_busy_process_beside_a_run_is_seen_in_its_cores(tmp_path: Path) -> None:
    """However much else the machine does: that is other work, too."""
    with spinning(str(tmp_path / "run" / "file")) as own, spinning() as other:
        node = NodeProcesses(tmp_path / "run")
        node.look()
        samples = [replace(read_host(own, None), run_cpu_s=node.cpu_s())]
        start_s, taken = time.monotonic(), dict.fromkeys((own, other), 0.0)
        while any(seconds < 1 for seconds in taken.values()):
            time.sleep(0.1)
            node.look()
            taken = {pid: node.stats[pid].cpu_time_s for pid in taken}
            assert time.monotonic() < start_s + 600
        host = read_host(own, None)
        node.look()
        samples.append(replace(host, run_cpu_s=node.cpu_s()))
    first, last = samples
    assert first.run_cpu_s is not None and last.run_cpu_s is not None
    assert first.cpu_used_s is not None and last.cpu_used_s is not None
    own_s = last.run_cpu_s - first.run_cpu_s
    assert own_s > 0.5
    assert last.cpu_used_s - first.cpu_used_s - own_s > 0.5


@pytest.mark.parametrize(
    ("files", "cores", "throttled_s"),
    [
        ({"cpu.max": "150000 100000\n", "cpu.stat": "usage_usec 5\nthrottled_usec 2500000\n"}, 1.5, 2.5),
        ({"cpu.cfs_quota_us": "200000", "cpu.cfs_period_us": "100000", "cpu.stat": "throttled_time 500000000"}, 2, 0.5),
        ({"cpu.max": "max 100000\n"}, None, None),
        ({"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}, None, None),
        ({"cpu.max": "garbage"}, None, None),
        ({}, None, None),
    ],
)
def test_the_limit_of_the_control_group(
    tmp_path: Path, files: dict[str, str], cores: float | None, throttled_s: float | None
) -> None:
    version1 = any("cfs" in name for name in files)
    folder = tmp_path / "sys/fs/cgroup" / ("cpu,cpuacct" if version1 else "") / "user"
    (folder / "session").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"0:{'cpu,cpuacct' if version1 else ''}:/user/session\n")
    for name, text in files.items():
        (folder / name).write_text(text)
    found = find_cpu_limit(tmp_path)
    assert (found and found.cores, found and found.throttled_s()) == (cores, throttled_s)


def sampled(
    other: float = 0.0, stolen: float = 0.0, cores: int = 8, runs: tuple[OtherRun, ...] | None = (), every_s: float = 1
) -> Sampled:
    """From second 10 to 20; the run uses 3 cores."""
    samples = tuple(
        Sample(
            time_s=10 + number * every_s,
            host=HostSample(
                cpu_used_s=100 + (3 + other) * number * every_s,
                run_cpu_s=3 * number * every_s,
                cpu_steal_s=stolen * number * every_s,
                load=4.0,
            ),
            runs=runs,
        )
        for number in range(int(10 / every_s) + 1)
    )
    return Sampled(SamplerStart(node="n1", cores=cores, interval_s=every_s), samples)


def found(*nodes: Sampled, spans: tuple[TimeSpan, ...] = WINDOW, device: str = "cpu") -> OtherWork:
    work = find_other_work(nodes, spans, "cuda" if device == "cuda" else "cpu")
    assert isinstance(work, OtherWork), work
    return work


@pytest.mark.parametrize(
    ("device", "other", "stolen", "runs", "disturbing"),
    [
        ("cpu", 0.2, 0.0, (), ()),
        ("cpu", 0.5, 0.0, (), ("other processes used 0.5 of 8 cores",)),
        ("cuda", 3.5, 0.0, (), ()),
        ("cuda", 4.5, 0.0, (), ("other processes used 4.5 of 8 cores",)),
        ("cpu", 0.0, 0.25, (), ("other virtual machines took 0.25 of 8 cores",)),
        ("cuda", 0.0, 0.0, (SEEN,), ("another run",)),
        ("cuda", 0.0, 0.0, MANY, ("4 other runs",)),
        ("cpu", 0.5, 0.0, MANY, ("other processes used 0.5 of 8 cores",)),
    ],
)
def test_what_disturbs(
    device: str, other: float, stolen: float, runs: tuple[OtherRun, ...], disturbing: tuple[str, ...]
) -> None:
    work = found(sampled(other, stolen, runs=runs), device=device)
    assert work.disturbing == disturbing
    (node,) = work.nodes
    assert node.other_cores == pytest.approx(other)
    assert node.run_cores == pytest.approx(3)
    assert (node.sampled_s, node.load_before, node.cores) == (4, 4.0, 8)
    assert set(node.reasons) == {"cpu_limit_cores", "throttled_cores", "gpu_processes"}


def test_a_window_between_two_samples_is_known_by_them() -> None:
    assert found(sampled(2.0), spans=(TimeSpan(12.2, 12.3),)).nodes[0].sampled_s == 2
    assert found(sampled(2.0, every_s=0.1), spans=(TimeSpan(12.2, 12.3),)).nodes[0].sampled_s >= 0.5


def test_samples_elsewhere_tell_nothing() -> None:
    assert find_other_work((sampled(),), (TimeSpan(50, 60),), "cpu") == NOT_SAMPLED
    assert find_other_work((), WINDOW, "cpu") == NOT_SAMPLED


def test_each_of_several_nodes_is_named() -> None:
    quiet, busy = sampled(), sampled(4.0)
    work = found(quiet, replace(busy, start=replace(busy.start, node="n2")))
    assert work.disturbing == ("other processes on n2 used 4.0 of 8 cores",)


def test_other_processes_on_the_gpus_of_the_run() -> None:
    ids = (SampledGpu(index=0, uuid="GPU-a"), SampledGpu(index=1, uuid="GPU-b"))
    one = sampled()
    gpus = GpuSamples(other_pids=((), (4711,)))
    one = Sampled(replace(one.start, gpus=ids), tuple(replace(sample, gpus=gpus) for sample in one.samples))
    assert found(one, device="cuda").disturbing == ("other processes on the run's GPUs: 1",)
    elsewhere = find_other_work((one,), WINDOW, "cuda", {"n1": {"GPU-a"}})
    assert isinstance(elsewhere, OtherWork) and elsewhere.disturbing == ()
    assert elsewhere.nodes[0].gpu_processes == {"GPU-a": ()}


def test_a_run_tells_of_another_before_it_starts(tmp_path: Path) -> None:
    local = plan_here(Catalogue(), Request(workload="pretrain_llama3.1", size="tiny"), Choices(), {}, tmp_path)
    sleeping = (
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        "-m",
        "llmb.engine.worker",
        tmp_path / "exp_1" / "exp",
    )
    started = subprocess.run(["sh", "-c", ORPHAN, "sh", *sleeping], stdout=subprocess.PIPE, check=True)
    try:
        told, end_s = [], time.monotonic() + 600
        while not told and time.monotonic() < end_s:  # it may not have become that program yet
            told = [line for line in local.beside() if "in .../exp_1, since " in line]
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    assert len(told) == 1 and "another run is using this machine" in told[0]


def test_this_process_is_no_other_run() -> None:
    node = NodeProcesses()
    node.look()
    assert os.getpid() in node.own
    assert os.getpid() not in [run.pid for run in node.others()]
