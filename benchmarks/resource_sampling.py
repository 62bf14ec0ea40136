# SPDX-License-Identifier: Apache-2.0
"""What it costs a run that its node is sampled: blocks of steps with the sampler and without it, alternating.

One process trains a tiny model on this machine's CPU, with one thread. Before every other block the sampler is started
as a run starts it, and the block begins when it has written its first sample. Each block is compared with its neighbor:
wall-clock time, and CPU time of the process that trains. The sampler's own CPU time is counted by the kernel.
Target: less than 0.5 % more CPU time, and less than 0.5 % of a core for the sampler.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scipy.stats import t as student

from benchmarks.support import join_alone, option_parser, print_result, read_options, tiny_plan
from llmb.catalogue.resolve import Overrides
from llmb.engine.loop import train
from llmb.engine.watchdog import Progress
from llmb.readers.samples.host import host_name
from llmb.readers.samples.sampler import Sampler, start_sampler
from llmb.runs.failure import Phase
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan

THREADS = "OMP_NUM_THREADS"
TARGET_PCT = 0.5
WARM_UPS = 3
SAMPLE_S = 60.0


class Moment(NamedTuple):
    """Wall-clock time and the process's CPU time, in seconds."""

    time_s: float
    cpu_s: float


class Ratio(NamedTuple):
    """Percent that blocks with the sampler take longer: mean of the pairs, and its 95 % confidence interval."""

    more_pct: float
    ci95_pct: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Cost:
    """The results."""

    pairs: int
    steps_per_block: int
    interval_s: float
    step_s: float
    """Median of the blocks without the sampler."""
    cpu_time: Ratio
    wall_time: Ratio
    sampler_pct: float
    """CPU time of the sampler after its first sample, in percent of one core."""
    sampled_s: float
    target_pct: float = TARGET_PCT


def main() -> None:
    options = _options()
    if THREADS not in os.environ:  # libraries read it when they are loaded, which has already happened
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.resource_sampling", *sys.argv[1:]],
            {**os.environ, THREADS: "1"},
        )
    steps = WARM_UPS + 2 * options.pairs * options.steps + 1
    plan = tiny_plan(steps, Overrides(seq_len=options.seq_len, mbs=options.batch, gbs=options.batch))
    with tempfile.TemporaryDirectory(prefix="resource-sampling-") as folder:
        cost = measure(plan, RunFolder(Path(folder)), options)
    print_result(cost, text(cost), as_json=options.json)
    # A miss is only one that the noise of a busy machine does not explain.
    fine = cost.cpu_time.ci95_pct[0] < TARGET_PCT and cost.sampler_pct < TARGET_PCT
    os._exit(0 if fine else 1)  # as a worker does


def _options() -> argparse.Namespace:
    parser = option_parser(
        __doc__,
        pairs=(30, "blocks of each kind"),
        steps=(8, "steps of a block"),
        interval=(1.0, "seconds between samples"),
        seq_len=(512, "tokens per sequence"),
        batch=(4, "sequences per step"),
    )
    return read_options(parser, pairs=3, steps=2, interval=0.05, seq_len=64, batch=1)


def measure(plan: EnginePlan, folder: RunFolder, options: argparse.Namespace) -> Cost:
    blocks = Blocks(folder, options.steps, options.interval)
    ranks = join_alone(plan)
    log, sys.stdout = sys.stdout, folder.log.open("w")
    try:
        train(plan, folder, ranks, blocks)
    finally:
        sys.stdout.close()
        sys.stdout = log
    return blocks.cost()


class Blocks(Progress):
    """Starts and ends the sampler between blocks of steps, and times the blocks."""

    def __init__(self, folder: RunFolder, steps: int, interval_s: float) -> None:
        self.file, self.steps, self.interval_s = folder.resources_of(host_name()), steps, interval_s
        self.times: list[Moment] = []
        self.sampler: Sampler | None = None
        self.began: Moment | None = None
        self.first_sample = Moment(0.0, 0.0)
        """Time, and the sampler's CPU time until then."""
        self.lines_at_start = 0
        self.sampler_cpu_s = self.sampled_s = 0.0
        super().__init__(0)

    def enter(self, phase: Phase, step: int) -> None:
        super().enter(phase, step)
        if phase != "step" or step < WARM_UPS or (step - WARM_UPS) % self.steps:
            return
        reached = now()
        if self.began:
            self.times.append(Moment(reached.time_s - self.began.time_s, reached.cpu_s - self.began.cpu_s))
        if self.sampler:
            self._end(self.sampler)
        if is_sampled(len(self.times)):
            self._start()
        self.began = now()

    def _start(self) -> None:
        known = lines(self.file)
        self.sampler = start_sampler(self.file, host_name(), self.interval_s, "cpu")
        assert self.sampler
        self._wait_for_lines(known + 2)
        self.lines_at_start = lines(self.file)
        self.first_sample = Moment(time.perf_counter(), cpu_seconds(self.sampler.process.pid))

    def _wait_for_lines(self, number: int) -> None:
        end_s = time.monotonic() + self.interval_s + SAMPLE_S
        while lines(self.file) < number:
            assert time.monotonic() < end_s, "the sampler wrote nothing"
            time.sleep(0.01)

    def _end(self, sampler: Sampler) -> None:
        # In a block shorter than the interval the sampler would not have worked at all, and would seem to cost nothing.
        self._wait_for_lines(self.lines_at_start + 1)
        self.sampler_cpu_s += cpu_seconds(sampler.process.pid) - self.first_sample.cpu_s
        self.sampled_s += time.perf_counter() - self.first_sample.time_s
        sampler.end()
        self.sampler = None

    def cost(self) -> Cost:
        if self.sampler:
            self._end(self.sampler)
        blocks = list(enumerate(self.times))
        sampled = [block for number, block in blocks if is_sampled(number)]
        others = [block for number, block in blocks if not is_sampled(number)]
        return Cost(
            pairs=len(others),
            steps_per_block=self.steps,
            interval_s=self.interval_s,
            step_s=statistics.median(block.time_s for block in others) / self.steps,
            cpu_time=ratio([block.cpu_s for block in sampled], [block.cpu_s for block in others]),
            wall_time=ratio([block.time_s for block in sampled], [block.time_s for block in others]),
            sampler_pct=100 * self.sampler_cpu_s / self.sampled_s,
            sampled_s=self.sampled_s,
        )


def is_sampled(block: int) -> bool:
    """The order changes from pair to pair: without, with, with, without."""
    return block % 4 in (1, 2)


def now() -> Moment:
    return Moment(time.perf_counter(), time.process_time())


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, by the Linux scheduler."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def ratio(sampled: Sequence[float], others: Sequence[float]) -> Ratio:
    """Pairs are compared by the logarithm of their ratio."""
    logs = [math.log(one / other) for one, other in zip(sampled, others, strict=True)]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    half = float(student.ppf(0.975, len(logs) - 1)) * error
    low, middle, high = (100 * math.expm1(value) for value in (mean - half, mean, mean + half))
    return Ratio(middle, (low, high))


def text(cost: Cost) -> str:
    rows = [
        f"{cost.pairs} pairs of blocks of {cost.steps_per_block} steps, {cost.step_s:.3f} s a step, "
        f"a sample every {cost.interval_s:g} s"
    ]
    for name, found in (("CPU time of the worker", cost.cpu_time), ("wall-clock time", cost.wall_time)):
        rows.append(f"{name}: {found.more_pct:+.2f} % (95 %: {found.ci95_pct[0]:+.2f} to {found.ci95_pct[1]:+.2f})")
    rows.append(f"sampler: {cost.sampler_pct:.3f} % of a core, over {cost.sampled_s:.0f} s")
    return "\n".join(rows) + f"\ntarget: below {TARGET_PCT:g} % each\n"


if __name__ == "__main__":
    main()
