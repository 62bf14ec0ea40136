# SPDX-License-Identifier: Apache-2.0
"""How much longer a step in FP8 takes than one in bf16 on this machine's CPU, and on lesser ones that it can stand for.

Both train the same tiny model in one process, a step of each in turn. What oneDNN, ATen and MKL may use of the
processor is limited by their own variables, in a process for each limit. Target: at most 3 times the time, whatever
the processor.

One thread computes, so that CPU time can stand in for time where other programs disturb the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

import torch

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import Request, resolve
from llmb.engine.data.build import build_data
from llmb.engine.data.steps import rank_data
from llmb.engine.device import exact_fp32
from llmb.engine.loop import build_passes, do_step, prepare_stages
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.mesh import Ranks, arrange, join_ranks
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

TARGET = 3.0
WARM_UPS = 2
WORKLOADS = ("pretrain_llama3.1", "finetune_llama4-maverick")
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIMITS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "this CPU": {},
        "AVX-512 BF16, no AMX": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        "AVX-512, no BF16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        "AVX2": AVX2,
    }
)
"""A processor without the instructions of a limit is measured as it is."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over pairs of steps; CPU seconds."""

    workload: str
    limit: str
    bf16_s: float
    fp8_s: float
    ratio: float
    """Median over the pairs."""


def main() -> None:
    options = _options()
    if options.workload:
        comparison = measure(options.workload, options.limit, options.pairs)
        sys.stdout.write(json.dumps(asdict(comparison)) + "\n")
        sys.stdout.flush()
        os._exit(0)  # as a worker ends
    found = [apart(workload, limit, options.pairs) for workload in WORKLOADS for limit in LIMITS]
    if options.json:
        sys.stdout.write(json.dumps([asdict(comparison) for comparison in found], indent=2) + "\n")
    else:
        sys.stdout.write(text(found))
    sys.exit(0 if all(comparison.ratio <= TARGET for comparison in found) else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="steps of each precision (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it works, not how fast")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--workload", choices=WORKLOADS, help="measure this one alone, in this process")
    parser.add_argument("--limit", choices=LIMITS, default="this CPU", help="the name of its limit")
    options = parser.parse_args()
    if options.quick:
        options.pairs = 2
    return options


def apart(workload: str, limit: str, pairs: int) -> Comparison:
    """One comparison in a process of its own: libraries read their variables when they are loaded."""
    command = [sys.executable, __file__, "--workload", workload, "--limit", limit, "--pairs", str(pairs)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **LIMITS[limit]}
    return Comparison(**json.loads(subprocess.run(command, env=environ, check=True, capture_output=True).stdout))


def measure(workload: str, limit: str, pairs: int) -> Comparison:
    """Does a step in bf16 and one in FP8 in turn, in this process."""
    # Port 0 is any free one: a port that is looked for first may be another program's when it is opened.
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)
    exact_fp32()
    plans = [plan_of(workload, dtype, WARM_UPS + pairs) for dtype in (Dtype.BF16, Dtype.FP8)]
    joined = join_ranks(plans[0])
    bf16, fp8 = (steps_of(plan, joined) for plan in plans)
    both = [(seconds(bf16, number), seconds(fp8, number)) for number in range(WARM_UPS + pairs)][WARM_UPS:]
    return Comparison(
        workload=workload,
        limit=limit,
        bf16_s=statistics.median(pair[0] for pair in both),
        fp8_s=statistics.median(pair[1] for pair in both),
        ratio=statistics.median(pair[1] / pair[0] for pair in both),
    )


def plan_of(workload: str, dtype: Dtype, steps: int) -> EnginePlan:
    request = Request(workload=workload, size="tiny", gpu_type="cpu", scale=1, dtype=dtype)
    return make_plan(resolve(Catalogue(), request), Choices(steps=steps), device="cpu")


def steps_of(plan: EnginePlan, joined: Ranks) -> Callable[[int], object]:
    """What does a step of the plan, by its number."""
    ranks = arrange(joined.rank, joined.device, plan.recipe.layout, plan.parallelism.replicas(plan.recipe.layout))
    stages = prepare_stages(plan, ranks)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    passes = build_passes(stages, plan, ranks)
    source = rank_data(build_data(plan), plan, ranks, varlen=False)
    return lambda number: do_step(number, plan, passes, optimizers, source, ranks)


def seconds(step: Callable[[int], object], number: int) -> float:
    began = time.process_time()
    step(number)
    return time.process_time() - began


def text(found: list[Comparison]) -> str:
    lines = [
        f"tiny models, one thread, torch {torch.__version__}, medians of CPU time",
        f"{'workload':<28}{'processor':<24}{'bf16 s':>9}{'fp8 s':>9}{'ratio':>8}",
    ]
    for one in found:
        lines.append(f"{one.workload:<28}{one.limit:<24}{one.bf16_s:>9.4f}{one.fp8_s:>9.4f}{one.ratio:>8.2f}")
    slowest = max(one.ratio for one in found)
    lines.append(f"largest ratio: {slowest:.2f} (target: at most {TARGET:g})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
