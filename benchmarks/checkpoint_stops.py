# SPDX-License-Identifier: Apache-2.0
"""For how long a save stops the training of two ranks on this CPU, beside a copy of as many bytes to memory in use.

``llmb run`` saves after each step; the first save allocates the memory that later ones reuse. The tensors are many and
small, so that a save takes several times as long as one copy. Target: at most 13 times, a fifth of what torch takes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.support import option_parser, print_result, read_options
from llmb.runs.checkpoints.checkpoint import read_checkpoint_times

TARGET = 13.0
RANKS = 2


@dataclass(frozen=True, slots=True)
class Stops:
    """Medians over ranks and runs, in seconds. size_mib: of one rank's tensors."""

    size_mib: float
    copy_s: float
    first_s: float
    later_s: float

    @property
    def text(self) -> str:
        ratios = f"first {self.first_s / self.copy_s:.2f}, later {self.later_s / self.copy_s:.2f} times the copy"
        return f"{self.size_mib:.0f} MiB, copied in {self.copy_s:.4f} s: {ratios}\n"


def main() -> None:
    parser = option_parser(__doc__, layers=(128, "layers of the model"), steps=(6, "steps"), runs=(3, "runs"))
    options = read_options(parser, layers=2, steps=3, runs=1)
    found = measure(options.layers, options.steps, options.runs)
    print_result(found, found.text, as_json=options.json)
    sys.exit(0 if options.quick or found.later_s <= TARGET * found.copy_s else 1)


def measure(layers: int, steps: int, runs: int) -> Stops:
    first, later, copies, size = [], [], [], 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as install:
            run_saving(Path(install), layers, steps)
            (file,) = Path(install).rglob("checkpoints.jsonl")
            saves = [save for save in read_checkpoint_times(file) if save.ranks[0].blocked_s is not None]
        stops = [[rank.blocked_s or 0.0 for rank in save.ranks] for save in saves]
        size = saves[0].ranks[0].size_bytes
        first += stops[0]
        later += [blocked_s for save in stops[1:] for blocked_s in save]
        copies.append(copy_time(size))
    return Stops(size / 2**20, *map(statistics.median, (copies, first, later)))


def run_saving(install: Path, layers: int, steps: int) -> None:
    command = (sys.executable, "-m", "llmb.cli.main", "run", "-w", "pretrain_llama3.1", "-s", "tiny")
    sizes = ("--scale", str(RANKS), "--layers", str(layers), "--gbs", "2", "--seq-len", "32", "--steps", str(steps))
    saves = ("--save-checkpoint", "--checkpoint-interval", "1", "--no-resources")
    environ = {**os.environ, "LLMB_INSTALL": str(install), "OMP_NUM_THREADS": "1"}
    subprocess.run((*command, *sizes, *saves), env=environ, check=True, stdout=subprocess.DEVNULL)


def copy_time(size: int) -> float:
    """The median time to copy a tensor of ``size`` bytes to another that is in use."""
    torch.set_num_threads(1)
    source, target, times = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8), []
    for _ in range(7):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
