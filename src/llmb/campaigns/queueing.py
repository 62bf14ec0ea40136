# SPDX-License-Identifier: Apache-2.0
"""Queues a campaign: every job is planned first, then the user confirms."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmb.campaigns.campaign import (
    Campaign,
    CampaignJob,
    JobRequest,
    PlannedJob,
    SubmissionOutcome,
    begin_campaign,
    find_campaign,
    find_queued,
    new_campaign,
    planned,
    submit_campaign,
)
from llmb.campaigns.entry import Entry, SelectedJob, Selection
from llmb.campaigns.expansion import expand, grouped, narrowed, problem_text
from llmb.campaigns.job_request import converted, job_request
from llmb.catalogue.load import Catalogue
from llmb.doc_pages import see
from llmb.errors import UsageError, UserInterrupt
from llmb.jobs.history import open_history
from llmb.jobs.job import NOT_SUBMITTED, Job
from llmb.jobs.order import Order, make_order
from llmb.jobs.refresh import TIME_OUT_S
from llmb.jobs.store import Store
from llmb.jobs.submit import new_key, resolve_submissions, submit_order, unanswered_is_explained
from llmb.runs.record import now
from llmb.schedulers.lookup import read_cluster_site, read_job_options, scheduler_of
from llmb.site.site import Site

Say = Callable[[str], None]
POLL_S = 1.0
MOST_SHOWN = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedJobs:
    """The requested jobs: ``values`` are all options, ``given`` those specified on the command line."""

    source: str
    entries: Sequence[Entry]
    problems: Sequence[str] = ()
    values: Mapping[str, Any]
    given: Mapping[str, Any]
    within: Selection = field(default_factory=Selection)
    """Restricts the jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignContext:
    """Where campaigns are planned and queued."""

    catalogue: Catalogue
    site: Site
    environ: Mapping[str, str]
    """Environment of the submitting shell."""
    dry_run: bool = False
    """Nothing is queued, so that jobs need not be prepared."""

    @property
    def install(self) -> Path:
        return self.site.install

    def gpu_type(self, values: Mapping[str, Any]) -> str | None:
        """GPU type of jobs with these options if they name none. Raises UsageError."""
        options = read_job_options(self.site, values, self.environ, sys.executable)
        return scheduler_of(self.site).defaults(self.site, options).gpu_type

    def order(self, request: JobRequest) -> Order:
        """Raises UsageError."""
        return make_order(
            self.catalogue,
            request.request,
            request.choices,
            request.options,
            self.site,
            request.framework,
            dry_run=self.dry_run,
        )

    def order_of(self, job: CampaignJob) -> Order:
        """Raises UsageError."""
        order = self.order(job.wanted)
        if order.sample().array:
            raise UsageError("--array is not supported for a campaign", do="use --repeats")
        return order


def campaign_context(install: Path, environ: Mapping[str, str], *, dry_run: bool = False) -> CampaignContext:
    """Raises UsageError with all problems of the cluster's settings."""
    catalogue = Catalogue()
    site = read_cluster_site(catalogue, install, environ)
    return CampaignContext(catalogue=catalogue, site=site, environ=environ, dry_run=dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A campaign that could be queued."""

    campaign: Campaign
    jobs: Sequence[PlannedJob]
    resumed: bool
    """An earlier client created it."""
    left_out: Sequence[str] = ()
    """Jobs that were not named and cannot run, with reasons."""
    queued: Campaign | None = None
    """An earlier campaign with the same jobs, all of which were queued."""

    @property
    def remaining(self) -> list[PlannedJob]:
        return [item for item in self.jobs if item.job.state != "submitted"]


def from_command_line(
    entries: Iterable[Entry], selection: Selection, repeats: int | None, *, profile: bool
) -> list[Entry]:
    """Entries of a file, overridden by the command line."""
    return [
        replace(
            entry,
            repeats=entry.repeats if repeats is None else repeats,
            add_profile=entry.add_profile or (profile and not entry.profile),
            selection=replace(
                entry.selection,
                gpu_type=selection.gpu_type or entry.selection.gpu_type,
                release=selection.release or entry.selection.release,
            ),
        )
        for entry in entries
    ]


def propose(context: CampaignContext, requested: RequestedJobs, *, resume: bool, start_new: bool) -> Proposal:
    """Plans every job, and looks for an unfinished campaign like it. Raises UsageError with all problems."""
    checked, left_out = _checked(context, requested)
    campaign = new_campaign(requested.source, checked, now())
    unfinished = find_campaign(context.install, campaign, resume=resume, start_new=start_new)
    shown = unfinished or campaign
    queued = None if unfinished or start_new else find_queued(context.install, campaign)
    jobs = [planned(job, context.order_of(job)) for job in shown.jobs]
    return Proposal(campaign=shown, jobs=jobs, resumed=unfinished is not None, left_out=left_out, queued=queued)


def queued_before(proposal: Proposal) -> UsageError | None:
    """The error for a campaign whose jobs were all queued before."""
    if proposal.queued is None:
        return None
    name, count = proposal.queued.campaign, len(proposal.queued.jobs)
    when = proposal.queued.created_at
    do = f"add --new to queue them again; 'llmb jobs list --campaign {name}' shows them"
    return UsageError(f"all {count} jobs were queued before, by campaign {name} of {when}", do=do)


def agree(what: str, ask: Callable[[], bool] | None) -> None:
    """Raises UserInterrupt if the answer is no, UsageError if ``ask`` is None because there is no terminal."""
    if ask is None:
        do = "add --yes, or --dry-run to see the jobs"
        raise UsageError(f"there is no terminal to ask on, so queueing {what} cannot be confirmed", do=do)
    if not ask():
        raise UserInterrupt("nothing was queued")


def queue(
    context: CampaignContext,
    proposal: Proposal,
    say: Say,
    on_job: Callable[[Campaign, CampaignJob], None],
    *,
    start_new: bool,
) -> SubmissionOutcome:
    """Queues the remaining jobs of a proposal; ``on_job`` is called with each job that was submitted or rejected.

    Raises UserInterrupt if it is interrupted; the same call then resumes.
    """
    install = context.install
    begun = proposal.campaign if proposal.resumed else begin_campaign(install, proposal.campaign, start_new=start_new)
    with open_history(install, say) as history:
        sender = HistorySender(context.order_of, install, context.environ, history, say)
        try:
            return submit_campaign(install, begun.campaign, sender, lambda job: on_job(begun, job))
        except KeyboardInterrupt as error:
            do = "rerun the same command: it resumes where it was; 'llmb jobs list' shows what is queued"
            raise UserInterrupt(f"campaign {begun.campaign} was interrupted", do=do) from error


def refusal(outcome: SubmissionOutcome) -> UsageError | None:
    """The error for jobs that the scheduler rejected."""
    if not outcome.refusals:
        return None
    jobs = outcome.campaign.jobs
    refused = sum(job.state == "refused" for job in jobs)
    reasons = "\n".join(f"  - {error.what}" for error in outcome.refusals)
    do = "correct the cause and rerun the same command: it submits only these"
    return UsageError(f"{refused} of {len(jobs)} jobs could not be queued:\n{reasons}", do=do)


def listed(what: str, items: Iterable[str]) -> str:
    """``what``, then the first of ``items``, one per line."""
    found = list(dict.fromkeys(items))
    more = [f"  ... and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    return "\n".join([f"{what}:" if found else what, *(f"  {item}" for item in found[:MOST_SHOWN]), *more])


def plan_one(context: CampaignContext, request: JobRequest, *, wait: bool) -> Order:
    """The job, which is to be waited for if ``wait``. Raises UsageError."""
    order = context.order(request)
    if wait and order.sample().array:
        raise UsageError("--wait follows one job, and --array makes several", do="omit one of them")
    return order


def queue_one(context: CampaignContext, order: Order, say: Say) -> list[Job]:
    """The job that was queued, or those of an array.

    Raises UsageError and EnvironmentProblem if it is rejected; InfrastructureError and UserInterrupt if it may be
    queued all the same.
    """
    with open_history(context.install, say) as store, unanswered_is_explained():
        return submit_order(store, order, context.environ, key=new_key())


@dataclass(frozen=True, slots=True)
class HistorySender:
    """``order_of`` plans a job; ``environ`` is what the scheduler gets; ``say`` reports lost submissions."""

    order_of: Callable[[CampaignJob], Order]
    install: Path
    environ: Mapping[str, str]
    history: Store
    say: Callable[[str], None]

    def find(self, job: CampaignJob) -> CampaignJob | None:
        row = self.history.by_key(job.key)
        while row and row.job_id is None and row.state != NOT_SUBMITTED:
            # A submission is given up only after a while, since the scheduler may be busy with it.
            for line in resolve_submissions(self.history, self.install, row.scheduler, TIME_OUT_S):
                self.say(line)
            row = self.history.by_key(job.key)
            if row and row.job_id is None and row.state != NOT_SUBMITTED:
                time.sleep(POLL_S)
        return _submitted(job, row.job_id, row.run_dir) if row and row.job_id else None

    def send(self, job: CampaignJob) -> CampaignJob:
        campaign = job.key.rpartition("-")[0]
        (queued,) = submit_order(self.history, self.order_of(job), self.environ, key=job.key, campaign=campaign)
        return _submitted(job, str(queued.job_id), queued.run_dir)


def _submitted(job: CampaignJob, job_id: str, folder: str) -> CampaignJob:
    return job.model_copy(update={"state": "submitted", "folder": folder, "job_id": job_id, "reason": None})


def _checked(context: CampaignContext, requested: RequestedJobs) -> tuple[list[CampaignJob], list[str]]:
    """Every job that can run; and those that are left out because they cannot run and were not named."""
    expansion = expand(context.catalogue, requested.entries, context.gpu_type(requested.values))
    refused: list[tuple[SelectedJob, str]] = []
    jobs = []
    for job in narrowed(context.catalogue, expansion.jobs, requested.within):
        try:
            found = _campaign_job(job, requested, context)
            context.order_of(found)
            jobs.append(found)
        except UsageError as error:
            refused.append((job, problem_text(error)))
    problems = [*requested.problems, *expansion.problems, *grouped(item for item in refused if item[0].named)]
    left_out = [*expansion.left_out, *grouped(item for item in refused if not item[0].named)]
    if problems:
        do = see("run-many-recipes", "for the format of files") if requested.problems else None
        raise UsageError(listed("the campaign cannot be queued", problems), do=do)
    if not jobs:
        raise UsageError(listed("nothing is left to queue", left_out), do="see 'llmb list'")
    return jobs, left_out


def _campaign_job(job: SelectedJob, requested: RequestedJobs, context: CampaignContext) -> CampaignJob:
    profile = {"profile": ("true",)} if job.profiled else {}
    own = {
        "workload": job.workload,
        "size": job.size,
        "dtype": job.dtype,
        "scale": job.scale,
        "gpu_type": job.gpu_type,
        "release": job.release,
        **converted({**job.options, **profile}),
    }
    options = {**requested.values, **own, **requested.given}
    variables = dict(
        text.partition("=")[::2] for text in requested.given.get("env") or requested.values.get("env") or ()
    )
    options["env"] = [f"{name}={value}" for name, value in {**job.variables, **variables}.items()]
    request = job_request(context.site, options, context.environ)
    return CampaignJob(key="", where=job.where, repeat=job.repeat, profiled=job.profiled, wanted=request)
