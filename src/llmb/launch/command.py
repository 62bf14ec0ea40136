# SPDX-License-Identifier: Apache-2.0
"""The command that starts a plan's workers on one machine. Pure."""

import sys
from collections.abc import Mapping

from llmb.launch.profiled_worker import worker_module
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan


def local_command(plan: Plan, folder: RunFolder) -> tuple[str, ...]:
    """One worker per GPU (or CPU process), started and watched by torch.distributed.run."""
    return (
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={plan.recipe.scale}",
        "-m",
        worker_module(plan),
        str(folder.path),
    )


def local_variables(plan: Plan, cores: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What the workers' environment gets on top of ``environ``; what the user has set stays.

    Cores are shared out, or each worker's thread pool would take them all. Threads that wait spin for some ten
    microseconds only: with the default, a core that something else uses made a step 50 times as long.
    """
    threads = max(1, cores // plan.recipe.scale)
    chosen = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if plan.device == "cpu":
        chosen["GOMP_SPINCOUNT"] = "10000"
    return {name: value for name, value in chosen.items() if name not in environ}
