# SPDX-License-Identifier: Apache-2.0
"""Nsight Systems around the workers of a run: which program, how it is called, and its reports exported."""

import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.profile_report import new_report, profile_file
from llmb.traces.files import SQLITE_END

NSYS = "nsys"
EXPORT_LIMIT_S = 1800
AnyPlan = TypeVar("AnyPlan", bound=Plan)


def with_profiler(plan: AnyPlan) -> AnyPlan:
    """The plan with the profiler that this machine has, where that was left to the machine that runs it."""
    profile = plan.profile
    if profile is None or not profile.or_torch:
        return plan
    changes: dict[str, object] = {"or_torch": False}
    if shutil.which(NSYS) is None:
        reason = f"'{NSYS}' is not on the PATH of {platform.node()}: PyTorch's profiler replaces Nsight Systems"
        changes |= {"profiler": "torch", "gpu_metrics": False, "reason": reason}
    return plan.model_copy(update={"profile": profile.model_copy(update=changes)})


def nsys_command(plan: Plan, folder: RunFolder, rank: int, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The prefix of the command of worker ``rank``; empty if it is not profiled.

    Options: https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options. Only what
    the worker marks is recorded, and the worker continues when the recording stops.
    """
    wanted = plan.profile
    if wanted is None or wanted.profiler != "nsys" or rank not in wanted.ranks:
        return ()
    metrics = ("--gpu-metrics-devices=cuda-visible",) if wanted.gpu_metrics and rank == wanted.ranks[0] else ()
    return (
        NSYS,
        "profile",
        "--sample=none",
        "--trace=nvtx,cuda",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--cuda-graph-trace=node",
        "--wait=primary",
        "--force-overwrite=true",
        *metrics,
        f"--output={new_report(folder, plan, rank, environ).with_suffix('')}",
    )


def export_report(plan: Plan, folder: RunFolder) -> str | None:
    """Exports the report of the first rank that has one, for its breakdown; the reason if it could not, else None."""
    if plan.profile is None or plan.profile.profiler != "nsys":
        return None
    reports = [profile_file(folder, plan, rank) for rank in plan.profile.ranks]
    report = next((path for path in reports if path.exists()), None)
    return _export(report) if report else None


def _export(report: Path) -> str | None:
    target = report.with_suffix(SQLITE_END)
    command = [NSYS, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=EXPORT_LIMIT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{report.name} could not be exported: {error}"
    if done.returncode:
        return f"{report.name} could not be exported: {(done.stderr or done.stdout).strip() or done.returncode}"
    return None
