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
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from benchmarks.support import (
    Trainee,
    join_alone,
    option_parser,
    prepare_trainee,
    print_result,
    read_options,
    tiny_plan,
)
from llmb.catalogue.records import Dtype
from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.runs.plan import EnginePlan

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
        print_result(measure(options.workload, options.limit, options.pairs), "", as_json=True)
        os._exit(0)  # as a worker ends
    found = [apart(workload, limit, options.pairs) for workload in WORKLOADS for limit in LIMITS]
    print_result(found, text(found), as_json=options.json)
    sys.exit(0 if all(comparison.ratio <= TARGET for comparison in found) else 1)


def _options() -> argparse.Namespace:
    parser = option_parser(__doc__, pairs=(15, "steps of each precision"))
    parser.add_argument("--workload", choices=WORKLOADS, help="measure this one alone, in this process")
    parser.add_argument("--limit", choices=LIMITS, default="this CPU", help="the name of its limit")
    return read_options(parser, pairs=2)


def apart(workload: str, limit: str, pairs: int) -> Comparison:
    """One comparison in a process of its own: libraries read their variables when they are loaded."""
    own = ("-m", "benchmarks.fp8_on_cpu", "--workload", workload, "--limit", limit, "--pairs", str(pairs))
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **LIMITS[limit]}
    return Comparison(
        **json.loads(subprocess.run([sys.executable, *own], env=environ, check=True, capture_output=True).stdout)
    )


def measure(workload: str, limit: str, pairs: int) -> Comparison:
    """Does a step in bf16 and one in FP8 in turn, in this process."""
    plans = [tiny_plan(WARM_UPS + pairs, workload=workload, dtype=dtype) for dtype in (Dtype.BF16, Dtype.FP8)]
    joined = join_alone(plans[0])
    bf16, fp8 = (trainee_of(plan, joined) for plan in plans)
    both = [(seconds(bf16, number), seconds(fp8, number)) for number in range(WARM_UPS + pairs)][WARM_UPS:]
    return Comparison(
        workload=workload,
        limit=limit,
        bf16_s=statistics.median(pair[0] for pair in both),
        fp8_s=statistics.median(pair[1] for pair in both),
        ratio=statistics.median(pair[1] / pair[0] for pair in both),
    )


def trainee_of(plan: EnginePlan, joined: Ranks) -> Trainee:
    layout = plan.recipe.layout
    return prepare_trainee(plan, arrange(joined.rank, joined.device, layout, plan.parallelism.replicas(layout)))


def seconds(trainee: Trainee, number: int) -> float:
    began = time.process_time()
    trainee.step(number)
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
