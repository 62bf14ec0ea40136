# SPDX-License-Identifier: Apache-2.0
"""The compute time of ranks that run alone, beside that of the same ranks among the others.

Tiny models on this machine's CPU, one thread a rank. Time is the CPU time of the thread that computes: it takes none
while it waits for others, and other programs add little. It also has a rank's part in collectives: among others it
starts them and waits, and gloo's thread copies; alone it copies itself. Target: ratios between 2/3 and 3/2.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import option_parser, prepare_trainee, print_result, read_options
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.engine.parallel.alone import pretend_others
from llmb.engine.parallel.mesh import join_ranks
from llmb.launch.ranks import words
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan, pretending

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2": {"tp": 2},
    "PP 2": {"pp": 2},
    "CP 2": {"cp": 2},
    "EP 2": {"ep": 2},
    "FSDP 2": {},
}
RANKS = 2
BATCH = {"mbs": 4, "gbs": 16}
"""Larger than that of the recipes, whose collectives take about as long as what is computed between them."""
MOST = 1.5
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds per step, medians; ratio: alone / among others."""

    layout: str
    rank: int
    among_others_s: float
    alone_s: float
    ratio: float


def main() -> None:
    options = _options()
    if options.out:
        measure(options.layout, options.steps, options.out, options.rank)
        os._exit(0)  # as a worker ends
    found = [each for layout in LAYOUTS for each in compare(layout, options.steps)]
    print_result(found, "".join(f"{text(each)}\n" for each in found), as_json=options.json)
    sys.exit(0 if all(1 / MOST <= each.ratio <= MOST for each in found) else 1)


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, steps=(15, "steps that are measured"))
    parser.add_argument("--layout", choices=LAYOUTS, help="of this process")
    parser.add_argument("--rank", type=int, help="the rank that this process runs alone")
    parser.add_argument("--out", type=Path, help="folder for the times of this process")
    return read_options(parser, steps=2)


def compare(layout: str, steps: int) -> list[Compared]:
    with tempfile.TemporaryDirectory() as folder:
        among, alone = Path(folder) / "among", Path(folder) / "alone"
        start(layout, steps, among, RANKS)
        for rank in range(RANKS):
            start(layout, steps, alone, 1, "--rank", str(rank))
        pairs = [(read(among, rank), read(alone, rank)) for rank in range(RANKS)]
    return [Compared(layout, rank, one, other, other / one) for rank, (one, other) in enumerate(pairs)]


def start(layout: str, steps: int, out: Path, processes: int, *more: str) -> None:
    out.mkdir(exist_ok=True)
    own = ["-m", "benchmarks.pretended_rank", "--layout", layout, "--steps", str(steps), "--out", str(out), *more]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *words(1, processes), sys.executable, *own], env=environ, check=True)


def read(folder: Path, rank: int) -> float:
    return float((folder / str(rank)).read_text())


def measure(layout: str, steps: int, out: Path, rank: int | None) -> None:
    """In this process, one rank: alone if it is given, else one of all."""
    plan = plan_of(layout, WARM_UPS + steps, rank)
    ranks = join_ranks(plan) if rank is None else pretend_others(plan)
    trainee = prepare_trainee(plan, ranks)
    times = []
    for number in range(plan.steps):
        began = time.thread_time()
        trainee.step(number)
        times.append(time.thread_time() - began)
    (out / str(ranks.rank)).write_text(str(statistics.median(times[WARM_UPS:])))


def plan_of(layout: str, steps: int, rank: int | None) -> EnginePlan:
    sizes = Overrides(**BATCH, **LAYOUTS[layout])
    workload = "finetune_llama4-maverick" if sizes.ep else "pretrain_llama3.1"
    recipe = resolve(Catalogue(), Request(workload=workload, size="tiny", gpu_type="cpu", scale=RANKS, overrides=sizes))
    sharding = Parallelism(dp_sharding="full") if layout.startswith("FSDP") else Parallelism()
    choices = Choices(
        steps=steps, synthetic=True, parallelism=sharding, force_load_balancing=recipe.model.moe is not None
    )
    return make_plan(recipe if rank is None else pretending(recipe, rank), choices, device="cpu")


def text(found: Compared) -> str:
    return (
        f"{found.layout}, rank {found.rank}: among others {found.among_others_s:.3f} s, alone {found.alone_s:.3f} s, "
        f"ratio {found.ratio:.3f}"
    )


if __name__ == "__main__":
    main()
