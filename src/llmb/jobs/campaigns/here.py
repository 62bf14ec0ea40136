# SPDX-License-Identifier: Apache-2.0
"""Plans campaigns on this machine without a scheduler; their runs are made one after another."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llmb.base.errors import EnvironmentProblem, UsageError
from llmb.catalogue.records import gpu_type_of
from llmb.catalogue.resolve import CPU
from llmb.jobs.campaigns.campaign import CampaignJob, JobRequest
from llmb.jobs.campaigns.proposal import CampaignContext, RequestedJobs, check_jobs
from llmb.jobs.local_run import LocalRun, plan_here
from llmb.launch.scheduler_lookup import scheduler_of
from llmb.launch.site.site import this_machine
from llmb.runs.record import LOCAL

MOST_OF_NAME = 40
"""The maximum length of the campaign file's name in the label of its runs."""
DIGITS = 8
"""The number of digits of the jobs' digest in the label of a campaign's runs."""


@dataclass(frozen=True, slots=True)
class CampaignHere:
    """Runs of a campaign on this machine, and each run's number of repeats; ``left_out`` lists jobs that cannot run."""

    runs: Sequence[LocalRun]
    repeats: Sequence[int]
    left_out: Sequence[str]


def is_local(context: CampaignContext) -> bool:
    """Return True if the settings select local runs. If they name no scheduler, return True if the default one is
    not installed, except for a dry run."""
    scheduler = scheduler_of(context.site)
    if context.site.config.scheduler is None:
        return not context.dry_run and not scheduler.is_installed(context.environ)
    return scheduler.name == LOCAL


def campaign_here(context: CampaignContext, requested: RequestedJobs) -> CampaignHere:
    """Plan the jobs for this machine; raise UsageError with all problems if a named job cannot run, or none can.

    A run without a label receives one that is derived from the campaign, so that the campaign can be resumed.
    """
    config = context.site.config.model_copy(update={"scheduler": LOCAL})
    context = replace(context, site=replace(context.site, config=config))
    planned: dict[str, LocalRun] = {}

    def plan(job: CampaignJob) -> None:
        if (key := _key(job.wanted)) not in planned:  # repeats are planned once
            planned[key] = _plan(context, job.wanted)

    jobs, left_out = check_jobs(context, requested, _gpu_type(context, requested.values), plan)
    digest = hashlib.sha256("\n".join(f"{_key(job.wanted)} {job.repeat}" for job in jobs).encode()).hexdigest()
    named = re.sub(r"[^\w.+-]+", "-", Path(requested.source).stem, flags=re.ASCII)[:MOST_OF_NAME]
    label = f"campaign-{named}-{digest[:DIGITS]}"
    repeats = {_key(job.wanted): 0 for job in jobs}
    for job in jobs:
        repeats[_key(job.wanted)] += 1
    runs = [replace(planned[key], label=planned[key].label or label) for key in repeats]
    return CampaignHere(runs, list(repeats.values()), left_out)


def _key(request: JobRequest) -> str:
    """Format the request as text, without the options that only a cluster needs."""
    fields = {"request", "choices", *(["framework"] if request.framework.framework else [])}
    chosen = request.model_dump(mode="json", include=fields)
    return json.dumps([chosen, sorted(request.options.variables.items())], sort_keys=True)


def _gpu_type(context: CampaignContext, values: Mapping[str, object]) -> str | None:
    if gpu_type := values.get("gpu_type") or context.site.config.gpu_type:
        return str(gpu_type)
    names = this_machine().gpu_names
    return next((gpu_type_of(name, context.catalogue.gpus.values()) for name in names), None) if names else CPU


def _plan(context: CampaignContext, request: JobRequest) -> LocalRun:
    environ = {**context.environ, **request.options.variables}
    chosen = request.request, request.choices, environ, context.install, None, request.framework
    local = plan_here(context.catalogue, *chosen)
    if not context.dry_run:
        try:
            local.check()
        except EnvironmentProblem as error:
            raise UsageError(error.what, where=error.where, do=error.do) from error
    return local
