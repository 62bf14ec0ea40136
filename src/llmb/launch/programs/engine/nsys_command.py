# SPDX-License-Identifier: Apache-2.0
"""Starts the workers of a run under Nsight Systems.

``python -m llmb.launch.programs.engine.nsys_command RUN_FOLDER`` is started once per rank if nsys profiles a run; it
becomes the worker, with or without ``nsys``.
"""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from llmb.base.errors import EnvironmentProblem, pip_install
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import read_record
from llmb.runs.trace_reports import GPU_METRICS, NSYS, RECORDING, new_report

WORKER, PROFILED_WORKER = "llmb.engine.worker", "llmb.launch.programs.engine.nsys_command"


def check_here(plan: Plan) -> None:
    """Raise EnvironmentProblem if torch is missing, or if nsys is missing and ``plan`` requires it."""
    profile = plan.profile
    required = profile and profile.profiler == "nsys" and (profile.gpu_metrics or not profile.or_torch)
    if required and shutil.which(NSYS) is None:
        raise EnvironmentProblem(
            "Nsight Systems was requested, but 'nsys' is not on the PATH",
            do="install it, add it to the PATH, or pass --profiler torch without --profile-gpu-metrics",
        )
    if find_spec("torch") is None:
        raise EnvironmentProblem("training requires torch, which is not installed", do=pip_install("engine"))


AnyPlan = TypeVar("AnyPlan", bound=Plan)


def with_profiler(plan: AnyPlan) -> AnyPlan:
    """Return the plan, with PyTorch's profiler instead of nsys if nsys is missing here and the plan permits this."""
    profile = plan.profile
    if profile is None or not profile.or_torch:
        return plan
    changes: dict[str, object] = {"or_torch": False}
    if shutil.which(NSYS) is None:
        reason = f"'{NSYS}' is not on the PATH of {platform.node()}: PyTorch's profiler replaces Nsight Systems"
        changes |= {"profiler": "torch", "gpu_metrics": False, "reason": reason}
    return plan.model_copy(update={"profile": profile.model_copy(update=changes)})


def nsys_command(plan: Plan, folder: RunFolder, rank: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the words to put before the command of ``rank``'s worker; none if nsys does not profile this rank."""
    profile = plan.profile
    if profile is None or profile.profiler != "nsys" or rank not in profile.ranks:
        return ()
    metrics = (GPU_METRICS,) if profile.gpu_metrics and rank == profile.ranks[0] else ()
    return (*RECORDING, *metrics, f"--output={new_report(folder, plan, rank, environ).with_suffix('')}")


def worker_module(plan: Plan) -> str:
    """Return the name of the module that is started once per rank."""
    return PROFILED_WORKER if plan.profile and plan.profile.profiler == "nsys" else WORKER


def become_worker() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    worker = (sys.executable, "-P", "-m", WORKER, str(folder.path))
    plan, rank = read_record(folder).plan, int(os.environ["RANK"])
    if plan.profile and plan.profile.reason and rank == 0:
        sys.stdout.write(f"llmb: {plan.profile.reason}\n")
        sys.stdout.flush()
    command = (*nsys_command(plan, folder, rank, os.environ), *worker)
    if command != worker and shutil.which(command[0]) is None:
        sys.stdout.write(f"llmb: rank {rank} is not profiled: '{command[0]}' is not on the PATH of {platform.node()}\n")
        sys.stdout.flush()
        command = worker
    if command != worker:
        folder.nsys_profile.mkdir(exist_ok=True)
    os.execvp(command[0], command)  # noqa: S606 (a list, never a shell)


if __name__ == "__main__":
    become_worker()
