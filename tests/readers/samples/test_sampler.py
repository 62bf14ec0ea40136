# SPDX-License-Identifier: Apache-2.0
"""The process that samples: what it writes, and how it ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.base.parent_death import has_ended
from llmb.readers.samples import sampler as sampler_module
from llmb.readers.samples.node_settings import NodeSettings
from llmb.readers.samples.sample_records import HostSample, Sample, SamplerStart, to_line
from llmb.readers.samples.sampler import (
    LONGEST_INTERVAL_S,
    SAMPLES_PER_INTERVAL,
    Sampler,
    interval_after,
    start_sampler,
)
from llmb.readers.samples.samples import discard_settings, read_samples, settings_of_nodes

SOON_S = 600
WORKER = """
import sys, time
from pathlib import Path
from llmb.readers.samples.sampler import start_sampler
print(start_sampler(Path(sys.argv[1]), "n1", 0.05, "cpu").process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a process of the lowest priority may need longer for its last sample than a run waits."""
    monkeypatch.setattr(sampler_module, "LAST_SAMPLE_S", SOON_S)


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def started(file: Path) -> Sampler:
    sampler = start_sampler(file, "n1", 0.05, "cpu")
    assert sampler
    return sampler


def test_it_samples_until_its_worker_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "NCCL_ALGO": "Ring", "NCCL_API_TOKEN": "hidden"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "resources" / "n1.jsonl"
    sampler = started(file)
    wait_until(lambda: lines(file) > 2)
    assert os.getpriority(os.PRIO_PROCESS, sampler.process.pid) == 19, "the lowest"
    assert b"RANK=" not in Path(f"/proc/{sampler.process.pid}/environ").read_bytes()
    for number in (signal.SIGTERM, signal.SIGINT):  # to the whole job
        sampler.process.send_signal(number)
    signaled = lines(file)
    wait_until(lambda: lines(file) > signaled + 3)
    # A process that was forked meanwhile would hold the pipe open.
    assert sampler.process.stdin
    kept_open = os.dup(sampler.process.stdin.fileno())
    before = time.time()
    sampler.end()
    os.close(kept_open)
    assert sampler.process.returncode == 0
    (found,) = read_samples(tmp_path / "resources")
    assert (found.start.node, found.start.gpus) == ("n1", ())
    assert found.start.missing["gpus"] == "the run is on a CPU"
    assert len(found.samples) == lines(file) - 3
    assert found.ended
    first, last = found.readings
    assert first.read == last.read and "memory" in first.read
    assert last.read_at_s > found.samples[-1].time_s
    assert found.samples[-1].time_s >= before - 0.001
    assert all(sample.host.worker_memory_bytes for sample in found.samples)
    settings = settings_of_nodes(file.parent, ["n1"])
    assert settings and (settings.nodes, settings.unread) == (("n1",), {})
    assert settings.usual["kernel.release"] == os.uname().release
    assert settings.usual["variables.NCCL_ALGO"] == "Ring", "of the job"
    assert "hidden" not in settings.model_dump_json()


def test_nodes_without_settings_have_a_reason(tmp_path: Path) -> None:
    own = NodeSettings(values={"sysctl.vm.swappiness": "1"}, missing={})
    for name, text in {"a.b": own.model_dump_json(), "torn": "{"}.items():
        (tmp_path / f"{name}.settings.json").write_text(text)
    found = settings_of_nodes(tmp_path, ["absent", "torn"])
    assert found and (found.nodes, found.usual) == (("a.b",), own.values)
    assert found.unread == {"absent": "no sampler recorded the settings", "torn": "the sampler's output is damaged"}
    discard_settings(tmp_path)
    assert settings_of_nodes(tmp_path, ["a.b"]) is None


def test_gpus_are_sampled_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(Path(__file__).with_name("fake_pynvml.py"), tmp_path / "pynvml.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    file = tmp_path / "resources" / "n1.jsonl"
    sampler = start_sampler(file, "n1", 0.05, "cuda")
    assert sampler
    wait_until(lambda: lines(file) > 3)
    sampler.end()
    (found,) = read_samples(file.parent)
    assert [gpu.uuid for gpu in found.start.gpus] == ["GPU-0", "GPU-1"]
    assert "gpus" not in found.start.missing
    last = found.samples[-1].gpus
    assert last
    assert last.power_w == (700.0, 400.0)
    assert last.throttle_reasons == ((), ("sw_power_cap", "sw_thermal_slowdown"))


def test_one_that_does_not_end_is_killed_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "LAST_SAMPLE_S", 0.1)
    monkeypatch.setattr(sampler_module, "KILLED_S", SOON_S)
    sampler = started(tmp_path / "n1.jsonl")
    sampler.process.send_signal(signal.SIGSTOP)
    sampler.end()
    assert sampler.process.returncode == -signal.SIGKILL


def test_it_is_gone_when_its_worker_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "n1.jsonl"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(file)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout
    pid = int(worker.stdout.readline())
    wait_until(lambda: lines(file) > 1)
    worker.kill()
    worker.communicate()
    wait_until(lambda: has_ended(pid))


def test_a_file_that_cannot_be_written_ends_it_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    for sampler in (started(tmp_path / "file" / "n1.jsonl"), started(tmp_path / "full.jsonl")):
        sampler.process.wait(SOON_S)
        assert sampler.process.returncode == 1
        sampler.end()


def test_a_later_sampler_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    file = tmp_path / "n1.jsonl"
    first = started(file)
    wait_until(lambda: lines(file) > 3)
    first.end()
    whole = len(read_samples(tmp_path)[0].samples)
    file.write_bytes(file.read_bytes()[:-20])
    second = started(file)
    wait_until(lambda: len(read_samples(tmp_path)) == 2)
    second.end()
    one, two = read_samples(tmp_path)
    assert (len(one.samples), one.ended) == (whole, False), "the last line is that of its counters"
    assert two.samples[0].time_s > one.samples[-1].time_s


@pytest.mark.parametrize("damage", ['"time_s":NaN', '"time_s":1.0,"host":{"load":1e400}', '"time_s":Infinity'])
def test_a_sample_with_a_number_that_is_none_is_left_out(tmp_path: Path, damage: str) -> None:
    lines = [to_line(SamplerStart(node="n", cores=2, interval_s=1.0)), to_line(Sample(time_s=1.0, host=HostSample()))]
    host = "" if "host" in damage else ',"host":{}'
    (tmp_path / "n.jsonl").write_bytes(b"".join(lines) + f"{{{damage}{host}}}\n".encode())
    (found,) = read_samples(tmp_path)
    assert [sample.time_s for sample in found.samples] == [1.0]


def test_the_file_of_a_long_run_stays_small() -> None:
    assert interval_after(1, 1.0) == 1.0
    assert interval_after(SAMPLES_PER_INTERVAL, 1.0) == 2.0
    assert interval_after(10**9, 1.0) == LONGEST_INTERVAL_S
    assert interval_after(10**9, 120.0) == 120.0
    elapsed_s, samples = 0.0, 0
    while elapsed_s < 24 * 3600:
        elapsed_s += interval_after(samples, 1.0)
        samples += 1
    assert samples < 12_000
