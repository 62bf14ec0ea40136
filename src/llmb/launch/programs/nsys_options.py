# SPDX-License-Identifier: Apache-2.0
"""Nsight Systems, whatever the program that it records: its options, and its reports exported."""

from llmb.base.tools import ask_program
from llmb.readers.profiles.trace_files import SQLITE_END
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.trace_reports import profile_file

NSYS = "nsys"
EXPORT_LIMIT_S = 1800
# https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options. Only what the process
# marks is recorded, and it continues when the recording stops.
RECORDING = (
    NSYS,
    "profile",
    "--sample=none",
    "--trace=nvtx,cuda",
    "--capture-range=cudaProfilerApi",
    "--capture-range-end=stop",
    "--cuda-graph-trace=node",
    "--wait=primary",
    "--force-overwrite=true",
)
GPU_METRICS = "--gpu-metrics-devices=cuda-visible"


def export_report(plan: Plan, folder: RunFolder) -> str | None:
    """Exports the report of the first rank that has one, for its breakdown; the reason if it could not, else None."""
    if plan.profile is None or plan.profile.profiler != "nsys":
        return None
    reports = [profile_file(folder, plan, rank) for rank in plan.profile.ranks]
    report = next((path for path in reports if path.exists()), None)
    if report is None:
        return None
    target = report.with_suffix(SQLITE_END)
    command = [NSYS, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report)]
    output = ask_program(command, EXPORT_LIMIT_S, cwd=None)
    return f"{report.name} could not be exported: {output.problem}" if output.problem else None
