# SPDX-License-Identifier: Apache-2.0
"""The overhead of the engine: its steps compared with those of a bare training loop, alternating.

Both train the same tiny model, from the same initial weights, on the same number of tokens, on this machine's CPU. The
bare loop is plain PyTorch: forward, backward, clipping, AdamW, on one prepared batch. The engine's steps include
everything that they have in a run: data, record, log, watchdog. Target: less than 2 % more time.

Only one thread computes, so that CPU time can replace wall-clock time if other programs disturb the machine.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.utils import clip_grad_norm_

from benchmarks.support import option_parser, print_result, read_options, tiny_plan
from llmb.catalogue.resolve import Overrides
from llmb.engine.data.build import build_data
from llmb.engine.loop import train
from llmb.engine.model.decoder import build_model
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import join_ranks
from llmb.engine.watchdog import Progress, start_watchdog
from llmb.launch.local import local_variables
from llmb.launch.local_spec import local_spec
from llmb.launch.ranks import STORE
from llmb.launch.site.site import this_machine
from llmb.runs.failure import Phase
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan

TARGET_PCT = 2.0
LARGEST_SPREAD_PCT = 4.0
"""Spread of the middle half of the pairs; above it, other programs dominated the times."""
WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds per step of one loop; ``cpu_s`` is the median of the process's CPU time."""

    median_s: float
    quartiles_s: tuple[float, float]
    min_s: float
    max_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Overhead:
    """The results. Percentages are of the bare loop's step."""

    model: str
    parameters: int
    tokens_per_step: int
    threads: int
    torch: str
    pairs: int
    engine: Times
    bare: Times
    step_pct: float
    """Median over the pairs of the additional time of the engine's step."""
    step_pct_quartiles: tuple[float, float]
    cpu_pct: float
    """The same for CPU time."""
    judged_by: str
    """``time``, or ``cpu time`` if the quartiles are too far apart."""
    watch_pct: float
    """CPU time of the threads of the watchdog, which run beside both loops, counted as fully lost."""
    overhead_pct: float
    target_pct: float = TARGET_PCT


def main() -> None:
    options = _options()
    sizes = Overrides(seq_len=options.seq_len, mbs=options.batch, gbs=options.batch)
    plan = tiny_plan(WARM_UPS + options.pairs, sizes)
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    spec = local_spec(plan, Path(), environ, RunFolder(Path()))
    variables = local_variables(spec, this_machine().cores, environ)
    if variables:  # libraries read some of them when they are loaded, which has already happened
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.engine_overhead", *sys.argv[1:]],
            {**environ, **variables},
        )
    with tempfile.TemporaryDirectory(prefix="engine-overhead-") as folder:
        overhead = measure(plan, RunFolder(Path(folder)))
    print_result(overhead, text(overhead), as_json=options.json)
    os._exit(0 if overhead.overhead_pct < TARGET_PCT else 1)  # as a worker does


def _options() -> argparse.Namespace:
    parser = option_parser(
        __doc__,
        pairs=(30, "timings of each loop"),
        seq_len=(512, "tokens per sequence"),
        batch=(8, "sequences per step"),
    )
    return read_options(parser, pairs=4, seq_len=64, batch=1)


def measure(plan: EnginePlan, folder: RunFolder) -> Overhead:
    """Runs the engine in this process as a worker does, with a step of the bare loop before each of its steps."""
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", STORE: str(folder.path / "store")})
    bare = BareLoop(plan)
    turns = Turns(bare)
    start_watchdog(plan, folder, turns)
    ranks = join_ranks(plan)
    log, sys.stdout = sys.stdout, folder.log.open("w")
    try:
        train(plan, folder, ranks, turns)
    finally:
        sys.stdout.close()
        sys.stdout = log
    return turns.overhead(plan, bare)


class BareLoop:
    """The cost of a step without an engine."""

    def __init__(self, plan: EnginePlan) -> None:
        recipe = plan.recipe
        self.model = build_model(recipe.model)
        TrainedStage(self.model).initialize(plan.seed)
        self.largest_norm, training = recipe.training.clip_grad, recipe.training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=training.peak_lr,
            betas=(training.beta1, training.beta2),
            eps=training.eps,
            weight_decay=training.weight_decay,
            fused=True,
        )
        self.tokens, self.labels, *_ = build_data(plan).micro_batch(range(recipe.layout.gbs))

    def step(self) -> None:
        self.model(self.tokens, self.labels).backward()
        clip_grad_norm_(self.model.parameters(), self.largest_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Moment(NamedTuple):
    """Wall-clock time and the process's CPU time, in seconds."""

    time_s: float
    cpu_s: float

    def since(self, earlier: "Moment") -> "Moment":
        return Moment(self.time_s - earlier.time_s, self.cpu_s - earlier.cpu_s)


def now() -> Moment:
    return Moment(time.perf_counter(), time.process_time())


class Turns(Progress):
    """Runs a step of the bare loop whenever the engine is about to begin one, and times both."""

    def __init__(self, bare: BareLoop) -> None:
        self.bare = bare
        self.engine_steps: list[Moment] = []
        self.bare_steps: list[Moment] = []
        self.resumed: Moment | None = None
        self.began = now()
        self.watched_s = 0.0
        super().__init__(0)

    def enter(self, phase: Phase, step: int) -> None:
        super().enter(phase, step)
        if phase != "step":
            return
        reached = now()
        if self.resumed is None:
            self.began, self.watched_s = reached, watch_seconds()
        else:
            self.engine_steps.append(reached.since(self.resumed))
        began = now()
        self.bare.step()
        self.resumed = now()
        self.bare_steps.append(self.resumed.since(began))

    def overhead(self, plan: EnginePlan, bare: BareLoop) -> Overhead:
        watch_pct = 100 * (watch_seconds() - self.watched_s) / now().since(self.began).time_s
        # Each step of the engine except the first follows one of the bare loop.
        pairs = list(zip(self.engine_steps, self.bare_steps, strict=False))[WARM_UPS - 1 :]
        more = [100 * (ours.time_s / theirs.time_s - 1) for ours, theirs in pairs]
        cpu_pct = statistics.median(100 * (ours.cpu_s / theirs.cpu_s - 1) for ours, theirs in pairs)
        low, high = quartiles(more)
        calm = high - low <= LARGEST_SPREAD_PCT
        layout = plan.recipe.layout
        return Overhead(
            model=f"{plan.recipe.model.model} {plan.recipe.size}",
            parameters=sum(parameter.numel() for parameter in bare.model.parameters()),
            tokens_per_step=layout.gbs * layout.seq_len,
            threads=torch.get_num_threads(),
            torch=torch.__version__,
            pairs=len(pairs),
            engine=times_of([ours for ours, _ in pairs]),
            bare=times_of([theirs for _, theirs in pairs]),
            step_pct=statistics.median(more),
            step_pct_quartiles=(low, high),
            cpu_pct=cpu_pct,
            judged_by="time" if calm else "cpu time",
            watch_pct=watch_pct,
            overhead_pct=(statistics.median(more) if calm else cpu_pct) + watch_pct,
        )


def watch_seconds() -> float:
    """CPU time of the threads of the watchdog so far, on Linux; 0 elsewhere."""
    total = 0
    for thread in threading.enumerate():
        counted = Path(f"/proc/self/task/{thread.native_id}/schedstat")
        if thread.name.startswith("watchdog") and counted.exists():
            total += int(counted.read_text().split()[0])
    return total / 1e9


def times_of(steps: Sequence[Moment]) -> Times:
    seconds = [step.time_s for step in steps]
    cpu_s = statistics.median(step.cpu_s for step in steps)
    return Times(statistics.median(seconds), quartiles(seconds), min(seconds), max(seconds), cpu_s)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    first, _, third = statistics.quantiles(values, n=4)
    return first, third


def text(overhead: Overhead) -> str:
    lines = [
        f"{overhead.model}, {overhead.parameters / 1e6:.3g} M parameters, {overhead.tokens_per_step} tokens per step, "
        f"{overhead.threads} threads, torch {overhead.torch}, {overhead.pairs} alternating pairs",
        f"{'':<16}{'median s':>10}{'quartiles s':>20}{'min s':>9}{'max s':>9}{'cpu s':>9}",
    ]
    for name, times in (("engine", overhead.engine), ("bare loop", overhead.bare)):
        between = "{:.4f} to {:.4f}".format(*times.quartiles_s)
        ends = f"{times.min_s:>9.4f}{times.max_s:>9.4f}{times.cpu_s:>9.4f}"
        lines.append(f"{name:<16}{times.median_s:>10.4f}{between:>20}{ends}")
    between = "{:+.2f} to {:+.2f}".format(*overhead.step_pct_quartiles)
    lines += [
        f"step: {overhead.step_pct:+.2f} % (quartiles of the pairs {between}), cpu time {overhead.cpu_pct:+.2f} %",
        f"watchdog threads: {overhead.watch_pct:.3f} %",
        f"engine's overhead, judged by {overhead.judged_by}: {overhead.overhead_pct:.2f} % "
        f"(target: below {TARGET_PCT:g} %)",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
