# SPDX-License-Identifier: Apache-2.0
"""Finds the files of a run's profile, and breaks down the time of one step."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from llmb.errors import UsageError
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record_file import UNREADABLE, BrokenRecord, read_record_file, why_unreadable
from llmb.shown_text import printable
from llmb.traces.breakdown import StepBreakdown, summarize
from llmb.traces.files import REPORT_END, SQLITE_END, read_traces
from llmb.traces.folders import NCCL_LOG_END


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """``breakdown`` is that of the first profiled rank, of the step with the median duration."""

    profiler: str
    files: tuple[str, ...]
    breakdown: StepBreakdown | None
    warnings: tuple[str, ...]
    """What is missing, and why if that is known."""


def profile_file(folder: RunFolder, plan: Plan, rank: int) -> Path:
    """The file with the profile of ``rank``: the newest one, if several jobs have run the plan."""
    if not plan.profile or plan.profile.profiler != "nsys":
        return folder.torch_profile / f"rank-{rank}.json.gz"
    named = folder.nsys_profile.glob(report_name(plan, rank, job="*", node="*"))
    own = folder.nsys_profile / report_name(plan, rank)
    return max(named, key=lambda path: path.stat().st_mtime, default=own)


def new_report(folder: RunFolder, plan: Plan, rank: int, environ: Mapping[str, str]) -> Path:
    """Where Nsight Systems writes the report of ``rank``, which runs with the variables ``environ``."""
    return folder.nsys_profile / report_name(plan, rank, environ.get("SLURM_JOB_ID"), environ.get("SLURM_NODEID"))


def report_name(plan: Plan, rank: int | str, job: str | None = None, node: str | None = None) -> str:
    """The name of a report of Nsight Systems, of which rank, job and node may be patterns or variables.

    As in the recipe's document, whose names may hold the job and the node; outside of a job llmb's own name.
    """
    document = plan.recipe.document
    if document and document.profile.file and job is not None and node is not None:
        return document.profile.file.format(job=job, node=node, rank=rank) + REPORT_END
    return f"profile_{rank}{REPORT_END}"


def nccl_log(folder: RunFolder, rank: int) -> Path:
    """The file with NCCL's log of ``rank``."""
    return folder.nccl_trace / f"rank-{rank}{NCCL_LOG_END}"


def report_profile(folder: RunFolder, plan: Plan, export_failure: str | None = None) -> ProfileReport | None:
    """None for a run that is not profiled. A breakdown that was saved before is used as it is.

    ``export_failure`` is the reason why an existing report cannot be read.
    """
    if plan.profile is None:
        return None
    wanted = [profile_file(folder, plan, rank) for rank in plan.profile.ranks]
    there = [path for path in wanted if path.exists() and path.stat().st_size]
    missing = [path.name for path in wanted if path not in there]
    warnings = [plan.profile.reason] if plan.profile.reason else []
    warnings += [f"profiles were not written: {', '.join(missing)}; the log may say why"] if missing else []
    try:
        breakdown = kept_breakdown(folder)
    except (OSError, BrokenRecord) as error:
        warnings.append(f"the saved breakdown of a step cannot be read: {why_unreadable(error)}")
        breakdown = None
    if export_failure:
        warnings.append(f"no breakdown of a step: {export_failure}")
    elif there and breakdown is None:
        source = there[0].with_suffix(SQLITE_END) if plan.profile.profiler == "nsys" else there[0]
        try:
            breakdown = summarize(read_traces([source])).ranks[0].typical
        except UsageError as error:
            warnings.append(f"no breakdown of a step: {error.what} ({source.name})")
        except UNREADABLE as error:
            warnings.append(f"no breakdown of a step: {why_unreadable(error)} ({source.name})")
    files = tuple(printable(path.relative_to(folder.path)) for path in there)
    return ProfileReport(plan.profile.profiler, files, breakdown, tuple(warnings))


def keep_breakdown(folder: RunFolder, profile: ProfileReport | None) -> None:
    """Writes the breakdown of a step, if there is one, to the run folder. Raises OSError if that fails."""
    if profile and profile.breakdown:
        write_atomically(folder.breakdown, json.dumps(asdict(profile.breakdown), indent=2) + "\n")


def kept_breakdown(folder: RunFolder) -> StepBreakdown | None:
    """The breakdown that was saved when the run ended, if it was. Raises BrokenRecord."""
    return read_record_file(folder.breakdown, StepBreakdown) if folder.breakdown.exists() else None
