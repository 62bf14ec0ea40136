# SPDX-License-Identifier: Apache-2.0
"""Samples a node during a run: ``python -m llmb.readers.samples.sampler FILE NODE INTERVAL_S DEVICE WORKER``.

WORKER is the id of the process that starts it.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from llmb.base.input_files import SystemFiles
from llmb.base.missing import Missing
from llmb.readers.samples.counters import KernelLog, read_counters
from llmb.readers.samples.host import CpuEnergy, NodeProcesses, find_cpu_energy, find_cpu_limit, read_host
from llmb.readers.samples.node_settings import FILE_ENDING, read_settings
from llmb.readers.samples.nvml import Nvml, find_gpus
from llmb.readers.samples.sample_records import CounterReading, Sample, SamplerStart, to_line

MODULE = "llmb.readers.samples.sampler"
OF_RANKS = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"})
"""Variables that identify the processes of a run's ranks; a sampler must not have them."""
LAST_SAMPLE_S = 5.0
"""Time limit of the last sample, in seconds."""
KILLED_S = 5.0
"""Time for a killed sampler to disappear."""
LOWEST_PRIORITY = 19
SAMPLES_PER_INTERVAL = 1800
"""The number of samples after which the interval doubles."""
LONGEST_INTERVAL_S = 30.0
"""Maximum interval, unless the first interval is longer; counters of CPU energy take longer to wrap around."""


class NodeSampler:
    """Samples this node for the run in ``folder`` on ``device``; ``worker`` is the process id of the worker."""

    def __init__(self, node: str, device: str, worker: int, folder: Path) -> None:
        self.node, self.worker = node, worker
        self.processes, self.limit = NodeProcesses(folder), find_cpu_limit()
        gpus = find_gpus() if device == "cuda" else Missing("the run is on a CPU")
        self._no_gpus = gpus.reason if device == "cuda" and isinstance(gpus, Missing) else None
        energy = find_cpu_energy()
        self.gpus: Nvml | None = gpus or None
        self.energy: CpuEnergy | None = energy or None
        ids = {"gpus": gpus, "cpu_energy": energy}
        self.kernel = KernelLog()
        self.missing = {name: item.reason for name, item in ids.items() if isinstance(item, Missing)}

    def start(self, interval_s: float) -> SamplerStart:
        return SamplerStart(
            node=self.node,
            cores=os.cpu_count(),
            interval_s=interval_s,
            gpus=self.gpus.gpus if self.gpus else (),
            cpu_limit_cores=self.limit.cores if self.limit else None,
            missing=self.missing,
        )

    def read(self) -> Sample:
        host = read_host(self.worker, self.energy, self.limit)
        self.processes.look()  # right after the CPU time of all processes, which includes theirs
        return Sample(
            time_s=round(time.time(), 4),
            host=replace(host, run_cpu_s=self.processes.cpu_s()),
            gpus=self.gpus.read(self.processes.own) if self.gpus else None,
            runs=self.processes.others(),
        )

    def counters(self) -> CounterReading:
        """Return the current values of counters, and new messages of the kernel."""
        return read_counters(self.kernel, self.gpus.counters if self.gpus else None, self._no_gpus)


def interval_after(samples: int, first_s: float) -> float:
    """Return the seconds until the next sample, after ``samples`` samples; ``first_s`` is the first interval."""
    doubled: int = 1 << min(samples // SAMPLES_PER_INTERVAL, 32)
    return min(first_s * doubled, max(first_s, LONGEST_INTERVAL_S))


def keep_settings(file: Path) -> None:
    """Write the settings of this node and the job's variables to ``file``. Raise OSError if that fails."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(read_settings(SystemFiles(), os.environ).model_dump_json())
    unfinished.replace(file)


def sample(file: Path, sampler: NodeSampler, interval_s: float, pipe: int) -> None:
    """Write settings, and append samples until ``pipe`` is readable or the worker ends. Raise OSError if this fails."""
    file.parent.mkdir(exist_ok=True)
    output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    # What an earlier sampler was writing when it was killed stays on a line of its own.
    torn = b"\n" if os.fstat(output).st_size else b""
    os.write(output, torn + to_line(sampler.start(interval_s)))
    os.write(output, to_line(sampler.counters()))
    keep_settings(file.with_suffix(FILE_ENDING))
    os.nice(LOWEST_PRIORITY)  # not before: on a busy node it would not get here within a short run
    number, running, parent = 0, True, os.getppid()
    due_s = time.monotonic()
    while running:
        os.write(output, to_line(sampler.read()))
        number += 1
        now_s = time.monotonic()
        due_s = max(due_s + interval_after(number, interval_s), now_s)
        ended, _, _ = select.select([pipe], [], [], due_s - now_s)
        running = not ended and os.getppid() == parent
    os.write(output, to_line(sampler.read()))
    os.write(output, to_line(sampler.counters()))


class Sampler:
    """A running sampler. It ends with the process that started it, or when ``end`` is called."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def end(self) -> None:
        """Let the sampler take its last sample and end; kill it if this takes too long."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            self.process.stdin.write(b"\n")  # a process that was forked meanwhile may hold the pipe open
        self.process.stdin.close()
        try:
            self.process.wait(LAST_SAMPLE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that waits for a driver ends later
                self.process.wait(KILLED_S)


def start_sampler(file: Path, node: str, interval_s: float, device: str) -> Sampler | None:
    """Start a sampler; return None if no process can be started."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, str(file), node, str(interval_s), device, str(os.getpid())],
            env={name: value for name, value in os.environ.items() if name not in OF_RANKS},
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    return Sampler(process)


def main() -> None:
    file, node, interval_s, device, worker = sys.argv[1:]
    # These signals are for the worker; this process ends with it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        sampler = NodeSampler(node, device, int(worker), Path(file).parent.parent)
        sample(Path(file), sampler, float(interval_s), sys.stdin.fileno())
    except OSError as error:
        sys.exit(f"llmb: resources are no longer sampled: {error}")


if __name__ == "__main__":
    main()
