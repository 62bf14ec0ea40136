# SPDX-License-Identifier: Apache-2.0
"""What this machine has to train on, seen without torch."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from llmb.errors import EnvironmentProblem
from llmb.resources.host import usable_cores
from llmb.runs.plan import Plan
from llmb.tools import ask_program

QUERY = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
QUERY_LIMIT_S = 30
MOST_GPUS = 1024
"""A longer text is not a list of GPUs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs by the driver's name, and the CPU cores this process may use."""

    gpu_names: tuple[str, ...]
    cores: int


def this_machine() -> Machine:
    return Machine(gpu_names=_gpu_names(), cores=usable_cores())


def _gpu_names() -> tuple[str, ...]:
    """Empty without a driver. CUDA_VISIBLE_DEVICES counts as the workers will count it."""
    if shutil.which(QUERY[0]) is None:
        return ()
    said = ask_program(QUERY, QUERY_LIMIT_S)
    if said.problem:
        return ()
    names = tuple(line.strip() for line in said.text.splitlines() if line.strip())[:MOST_GPUS]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else visible_names(names, visible)


def visible_names(names: Sequence[str], visible: str) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES, numbers or UUIDs: CUDA ends at the first that is not there, such as -1.

    Which GPU has a UUID is not known: then the first ones count.
    """
    found: list[str] = []
    for device in visible.split(","):
        number = int(device) if device.strip().isdecimal() else len(found)
        if not device.strip() or device.strip().startswith("-") or number >= len(names):
            break
        found.append(names[number])
    return tuple(found)


def check_machine(plan: Plan, machine: Machine) -> None:
    """Raises EnvironmentProblem where this machine cannot run ``plan``."""
    recipe, gpus = plan.recipe, len(machine.gpu_names)
    if plan.device == "cuda" and plan.processes > gpus:
        needed = "1 GPU" if plan.processes == 1 else f"{plan.processes} GPUs"
        raise EnvironmentProblem(
            f"{recipe.workload} {recipe.size} at this scale needs {needed}; this machine has {gpus}",
            do="take a smaller --scale, '-s tiny --gpu-type cpu', or look at the plan with --dry-run",
        )
