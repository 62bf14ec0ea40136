# SPDX-License-Identifier: Apache-2.0
"""Plans and queues single jobs and campaigns. Every job is planned before the user confirms; a campaign's jobs are
submitted once, even if the client is killed and run again."""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmb.base.errors import LlmbError, UsageError, UserInterrupt, itemized, see
from llmb.base.options import Option, build, convert, limit_problems, options_of
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.model_name import split_model
from llmb.catalogue.resolve import Request
from llmb.jobs.campaigns.campaign import (
    Campaign,
    CampaignJob,
    JobRequest,
    PlannedJob,
    begin_campaign,
    campaign_lock,
    find_campaign,
    find_queued,
    new_campaign,
    read_campaign,
    write_campaign,
)
from llmb.jobs.campaigns.expansion import (
    ALL,
    Entry,
    SelectedJob,
    Selection,
    Values,
    expand,
    grouped,
    narrowed,
    problem_text,
)
from llmb.jobs.history import open_history
from llmb.jobs.job import NOT_SUBMITTED, Job
from llmb.jobs.order import Order, make_order
from llmb.jobs.refresh import TIME_OUT_S
from llmb.jobs.store import Store
from llmb.jobs.submit import new_key, resolve_submissions, submit_order, unanswered_is_explained
from llmb.launch.jobspec.job_options import FrameworkChoices, framework_options
from llmb.launch.scheduler_lookup import all_schedulers, read_cluster_site, read_job_options, scheduler_of
from llmb.launch.site.site import Site
from llmb.runs.choices import Choices
from llmb.runs.record import now


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedJobs:
    """The requested jobs: ``values`` are all options, ``explicit`` only options on the command line."""

    source: str
    entries: Sequence[Entry]
    problems: Sequence[str] = ()
    values: Mapping[str, Any]
    explicit: Mapping[str, Any]
    within: Selection = field(default_factory=Selection)
    """Only jobs that match this selection are queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignContext:
    """The catalogue, settings and environment with which campaigns are planned and queued."""

    catalogue: Catalogue
    site: Site
    environ: Mapping[str, str]
    """Environment of the submitting shell."""
    dry_run: bool = False
    """True if nothing is queued, so that jobs need not be prepared."""

    @property
    def install(self) -> Path:
        return self.site.install

    def gpu_type(self, values: Mapping[str, Any]) -> str | None:
        """Return the default GPU type, if any, of jobs with these options; raise UsageError if an option is invalid."""
        options = read_job_options(self.site, values, self.environ, sys.executable)
        return scheduler_of(self.site).defaults(self.site, options).gpu_type

    def order(self, request: JobRequest) -> Order:
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
        return self.order(job.wanted)


def campaign_context(install: Path, environ: Mapping[str, str], *, dry_run: bool = False) -> CampaignContext:
    """Return the context; raise UsageError with all problems of the cluster's settings if they are invalid."""
    catalogue = Catalogue()
    site = read_cluster_site(catalogue, install, environ)
    return CampaignContext(catalogue=catalogue, site=site, environ=environ, dry_run=dry_run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A campaign that could be queued."""

    campaign: Campaign
    jobs: Sequence[PlannedJob]
    resumed: bool
    """True if an earlier client created the campaign."""
    left_out: Sequence[str] = ()
    """Jobs that were not named and cannot run, with reasons."""
    queued: Campaign | None = None
    """An earlier campaign with the same jobs, all queued, if any."""

    @property
    def remaining(self) -> list[PlannedJob]:
        return [item for item in self.jobs if item.job.state != "submitted"]


def from_command_line(
    entries: Iterable[Entry], selection: Selection, repeats: int | None, *, profile: bool
) -> list[Entry]:
    """Return the entries of a file with the repeats, profile, GPU type and release of the command line, if any."""
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
    """Plan a campaign, or continue an unfinished one; raise the errors of ``find_campaign`` and ``check_jobs``."""
    checked, left_out = check_jobs(context, requested, context.gpu_type(requested.values), context.order_of)
    campaign = new_campaign(requested.source, checked, now())
    unfinished = None if start_new else find_campaign(context.install, campaign, resume=resume)
    current = unfinished or campaign
    queued = None if unfinished or start_new else find_queued(context.install, campaign)
    orders = [(job, context.order_of(job)) for job in current.jobs]
    jobs = [PlannedJob(job, order, order.sample()) for job, order in orders]
    return Proposal(campaign=current, jobs=jobs, resumed=unfinished is not None, left_out=left_out, queued=queued)


def check_jobs(
    context: CampaignContext, requested: RequestedJobs, gpu_type: str | None, check: Callable[[CampaignJob], object]
) -> tuple[list[CampaignJob], list[str]]:
    """Return the jobs that can run, and a line about each group of unnamed jobs that cannot.

    Raise UsageError if the request has problems, if ``check`` raises it for a named job, or if no job remains.
    """
    expansion = expand(context.catalogue, requested.entries, gpu_type)
    refused: list[tuple[SelectedJob, str]] = []
    jobs = []
    for job in narrowed(context.catalogue, expansion.jobs, requested.within):
        try:
            planned = _campaign_job(job, requested, context)
            check(planned)
            jobs.append(planned)
        except UsageError as error:
            refused.append((job, problem_text(error)))
    problems = [*requested.problems, *expansion.problems, *grouped(item for item in refused if item[0].named)]
    left_out = [*expansion.left_out, *grouped(item for item in refused if not item[0].named)]
    if problems:
        do = see("run-many-recipes", "for the format of files") if requested.problems else None
        raise UsageError(f"the campaign cannot run:{itemized(problems)}", do=do)
    if not jobs:
        raise UsageError(
            f"the selection has no job to run{':' if left_out else ''}{itemized(left_out)}",
            do="see 'llmb list' for recipes; with a file, options select only from its jobs",
        )
    return jobs, left_out


def _campaign_job(job: SelectedJob, requested: RequestedJobs, context: CampaignContext) -> CampaignJob:
    profile = {"profile": ("true",)} if job.profiled else {}
    base = {name: getattr(job.request, name) for name in ("workload", "size", "dtype", "scale", "gpu_type", "release")}
    own = {**base, **converted({**job.options, **profile})}
    options = {**requested.values, **own, **requested.explicit}
    variables = dict(
        text.partition("=")[::2] for text in requested.explicit.get("env") or requested.values.get("env") or ()
    )
    options["env"] = [f"{name}={value}" for name, value in {**job.variables, **variables}.items()]
    request = job_request(context.site, options, context.environ)
    return CampaignJob(key="", where=job.where, repeat=job.repeat, profiled=job.profiled, wanted=request)


def job_options() -> Mapping[str, Option]:
    """Return the options of recipes, training, schedulers and frameworks by name."""
    return options_of(Request, Choices, *(item.choices for item in all_schedulers()), FrameworkChoices)


def job_request(site: Site, values: Mapping[str, Any], environ: Mapping[str, str]) -> JobRequest:
    """Build the request from option values; raise UsageError if a value is invalid.

    Missing options are set from environment variables or to their defaults.
    """
    return JobRequest(
        request=build(Request, values),
        choices=build(Choices, values),
        options=read_job_options(site, values, environ, sys.executable),
        framework=framework_options(build(FrameworkChoices, values)),
    )


def converted(texts: Mapping[str, Values]) -> dict[str, Any]:
    """Convert the values of options from text; raise UsageError with all problems if some are invalid."""
    readings, problems = {}, list[str]()
    for name, values in texts.items():
        try:
            readings[name] = convert(_known(name), name, values)
        except UsageError as error:
            problems.append(error.what)
    if problems:
        raise UsageError("; ".join(problems))
    return readings


def _known(name: str) -> Option:
    if name not in job_options():
        raise UsageError(f"this llmb has no option '{name}'")
    return job_options()[name]


def selection_of(values: Mapping[str, Any]) -> Selection:
    """Build the selection from option values, lists as text with commas; raise UsageError if they are invalid."""
    fields: dict[str, Any] = {}
    for name, option in options_of(Selection).items():
        value = values.get(name)
        if option.listed and value is not None:
            fields["everything"] = fields.get("everything", False) or value == ALL
            fields[option.field] = convert(option, option.spelled, _items(option.spelled, value))
        elif value is not None:
            fields[option.field] = option.value(value)
    selection = Selection(**fields)
    if problems := list(limit_problems(selection)):
        raise UsageError("\n".join(problems))
    if selection.scales and (selection.max_scale is not None or selection.min_scale):
        raise UsageError("--scale cannot be combined with --max-scale or --min-scale", do="omit --scale, or the limits")
    return selection


def single_model(catalogue: Catalogue, selection: Selection, repeats: int) -> tuple[str, str] | None:
    """Return the workload and size if a selection names one job; raise UsageError for an unknown name."""
    if not selection.names_one or repeats != 1:
        return None
    workload, own_size = split_model(catalogue, selection.workloads[0])
    sizes = (own_size, *selection.sizes) if own_size else selection.sizes
    return (workload, sizes[0]) if len(sizes) == 1 else None


def _items(option: str, text: str) -> Values:
    if text == ALL:
        return ()
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise UsageError(f"{option} is '{text}'; it must be a value, or values separated by commas")
    return tuple(dict.fromkeys(items))


Say = Callable[[str], None]
OnJob = Callable[[Campaign, CampaignJob], None]
"""A function that is called with each job after it was submitted or rejected."""
POLL_S = 1.0


def queue_one(context: CampaignContext, order: Order, say: Say) -> Job:
    """Queue one job. Raise UsageError or EnvironmentProblem if it is rejected, InfrastructureError or UserInterrupt if
    it may still have been queued."""
    with open_history(context.install, say) as store, unanswered_is_explained():
        return submit_order(store, order, context.environ, key=new_key())


@dataclass(frozen=True, slots=True)
class SubmissionOutcome:
    """A campaign after its jobs were submitted or rejected."""

    campaign: Campaign
    refusals: tuple[LlmbError, ...]
    """One example of each kind of rejection."""


def queue(
    context: CampaignContext, proposal: Proposal, say: Say, on_job: OnJob, *, start_new: bool
) -> SubmissionOutcome:
    """Queue the remaining jobs of a proposal. Rejected jobs remain for the next call.

    Raise EnvironmentProblem if files cannot be written, the scheduler is missing here, or another client is submitting
    the campaign, InfrastructureError if the scheduler does not answer, and UserInterrupt on Ctrl-C. The same call then
    resumes.
    """
    install = context.install
    begun = proposal.campaign if proposal.resumed else begin_campaign(install, proposal.campaign, start_new=start_new)
    name = begun.campaign
    with open_history(install, say) as history, campaign_lock(install, name):
        try:
            return _submit_all(context, read_campaign(install, name), history, say, on_job)
        except KeyboardInterrupt as error:
            do = "run the same command again to resume; 'llmb jobs list' shows the jobs that are queued"
            raise UserInterrupt(f"campaign {name} was interrupted", do=do) from error


def _submit_all(
    context: CampaignContext, campaign: Campaign, history: Store, say: Say, on_job: OnJob
) -> SubmissionOutcome:
    refusals: dict[str, LlmbError] = {}
    for job in campaign.jobs:
        if job.state == "submitted":
            continue
        try:
            entry = _find(context, job, history, say) if job.state == "submitting" else None
            if entry is None:
                sending = job.model_copy(update={"state": "submitting", "reason": None})
                write_campaign(context.install, campaign.with_job(sending))
                entry = submit_order(
                    history, context.order_of(job), context.environ, key=job.key, campaign=campaign.campaign
                )
            changes = {"state": "submitted", "folder": entry.run_dir, "job_id": str(entry.job_id), "reason": None}
        except UsageError as error:
            refusals[error.what] = error
            changes = {"state": "refused", "reason": error.what}
        updated = job.model_copy(update=changes)
        campaign = campaign.with_job(updated)
        on_job(campaign, updated)
    write_campaign(context.install, campaign)
    return SubmissionOutcome(campaign, tuple(refusals.values()))


def _find(context: CampaignContext, job: CampaignJob, history: Store, say: Say) -> Job | None:
    """Return the job if an earlier client submitted it successfully, else None."""
    row = history.by_key(job.key)
    while row and row.job_id is None and row.state != NOT_SUBMITTED:
        # A submission counts as failed only after a while, because the scheduler may still be processing it.
        for line in resolve_submissions(history, context.install, row.scheduler, TIME_OUT_S):
            say(line)
        row = history.by_key(job.key)
        if row and row.job_id is None and row.state != NOT_SUBMITTED:
            time.sleep(POLL_S)
    return row if row and row.job_id else None
