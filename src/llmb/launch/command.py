# SPDX-License-Identifier: Apache-2.0
"""The command that starts a plan's workers on one machine. Pure."""

import sys

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
        "llmb.engine.worker",
        str(folder.path),
    )


def local_variables(plan: Plan, cores: int) -> dict[str, str]:
    """Environment of the workers: cores are shared out, or each worker's thread pool would take them all."""
    threads = max(1, cores // plan.recipe.scale)
    return {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
