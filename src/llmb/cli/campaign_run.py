# SPDX-License-Identifier: Apache-2.0
"""Shows a campaign, asks, and queues it: what ``llmb submit`` with lists and ``llmb bulk`` have in common."""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.campaigns.campaign import Campaign, CampaignJob, JobRequest, new_campaign
from llmb.campaigns.entry import Entry, Job, Selection
from llmb.campaigns.expansion import expand, grouped, narrowed, told
from llmb.campaigns.history_sender import HistorySender
from llmb.campaigns.plan import PlannedJob, planned, total_gpu_hours
from llmb.campaigns.submission import begin_campaign, find_campaign, submit_campaign
from llmb.catalogue.load import Catalogue
from llmb.cli.job_options import converted, job_request
from llmb.cli.said import say
from llmb.errors import UsageError, UserInterrupt
from llmb.jobs.history import open_history
from llmb.jobs.order import Order, make_order
from llmb.report.campaign_report import campaign_document, campaign_table, hours_text, total_text
from llmb.report.output import print_json, print_table
from llmb.runs.folder import install_root
from llmb.runs.record import now
from llmb.schedulers.lookup import read_cluster_site
from llmb.site.site import Site

MOST_TOLD = 30

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be queued, queue nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before queueing.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the unfinished campaign from here, even if this has changed since.")
]
Anew = Annotated[bool, typer.Option("--new", help="Begin a new campaign even if one like it is unfinished.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """How a campaign is dealt with."""

    dry_run: bool
    yes: bool
    json: bool
    resume: bool
    anew: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The jobs that are wanted: ``values`` are all options, ``given`` those of them that the command line has."""

    source: str
    entries: Sequence[Entry]
    problems: Sequence[str] = ()
    values: Mapping[str, Any]
    given: Mapping[str, Any]
    within: Selection = field(default_factory=Selection)
    """Leaves some of the jobs only."""


def run_campaign(wanted: Wanted, modes: Modes) -> None:
    """Raises UsageError with all that is wrong, and where jobs are refused."""
    catalogue, install = Catalogue(), install_root(os.environ, Path.cwd())
    site = read_cluster_site(catalogue, install, os.environ)
    campaign = new_campaign(wanted.source, _checked(catalogue, site, wanted), now())
    unfinished = find_campaign(install, campaign, resume=modes.resume, anew=modes.anew)
    shown = unfinished or campaign
    jobs = [planned(job, _order(catalogue, site, job)) for job in shown.jobs]
    if modes.dry_run:
        _show(shown, jobs, json=modes.json)
        return
    _confirm(shown, jobs, goes_on=unfinished is not None, yes=modes.yes)
    begun = unfinished or begin_campaign(install, campaign, anew=modes.anew)
    with open_history(install, say) as history:
        sender = HistorySender(lambda job: _order(catalogue, site, job), install, os.environ, history, say)
        try:
            outcome = submit_campaign(install, begun.campaign, sender, _teller(len(begun.jobs)))
        except KeyboardInterrupt as error:
            do = "call the same again: it goes on where it was; 'llmb jobs list' shows what is queued"
            raise UserInterrupt(f"campaign {begun.campaign} was interrupted", do=do) from error
    if modes.json:
        print_json(campaign_document(outcome.campaign, jobs))
    if outcome.refusals:
        refused = sum(job.state == "refused" for job in outcome.campaign.jobs)
        reasons = "\n".join(f"  - {error.what}" for error in outcome.refusals)
        do = "correct the cause and call the same again: only these are submitted then"
        raise UsageError(f"{refused} of {len(begun.jobs)} jobs could not be queued:\n{reasons}", do=do)


def _checked(catalogue: Catalogue, site: Site, wanted: Wanted) -> list[CampaignJob]:
    """Every job, planned without a problem. What nobody asked for by name and cannot be run is left out, and told."""
    expansion = expand(catalogue, wanted.entries, site.config.gpu_type)
    refused: list[tuple[Job, str]] = []
    jobs = []
    for job in narrowed(catalogue, expansion.jobs, wanted.within):
        try:
            found = _campaign_job(job, wanted)
            _order(catalogue, site, found)
            jobs.append(found)
        except UsageError as error:
            refused.append((job, told(error)))
    problems = [*wanted.problems, *expansion.problems, *grouped(item for item in refused if item[0].named)]
    left_out = [*expansion.left_out, *grouped(item for item in refused if not item[0].named)]
    if problems:
        do = "docs/how-to/run-many-recipes.md tells what a file may hold" if wanted.problems else None
        raise UsageError(_listed("the campaign cannot be queued", problems), do=do)
    if not jobs:
        raise UsageError(_listed("nothing is left to queue", left_out), do="see 'llmb list'")
    if left_out:
        sys.stderr.write(_listed("left out", left_out) + "\n")
    return jobs


def _listed(what: str, items: Iterable[str]) -> str:
    found = list(dict.fromkeys(items))
    more = [f"  ... and {len(found) - MOST_TOLD} more"] if len(found) > MOST_TOLD else []
    return "\n".join([f"{what}:" if found else what, *(f"  {item}" for item in found[:MOST_TOLD]), *more])


def _campaign_job(job: Job, wanted: Wanted) -> CampaignJob:
    options = {**wanted.values, **_own_options(job), **wanted.given}
    given_variables = dict(
        text.partition("=")[::2] for text in wanted.given.get("env") or wanted.values.get("env") or ()
    )
    options["env"] = [f"{name}={value}" for name, value in {**job.variables, **given_variables}.items()]
    return CampaignJob(key="", where=job.where, repeat=job.repeat, profiled=job.profiled, wanted=job_request(options))


def _own_options(job: Job) -> dict[str, Any]:
    """What the job says itself. Raises UsageError with all values that cannot be."""
    found: dict[str, Any] = {
        "workload": job.workload,
        "size": job.size,
        "dtype": job.dtype,
        "scale": job.scale,
        "gpu_type": job.gpu_type,
        "release": job.release,
    }
    problems = []
    for name, values in (*job.options.items(), *([("profile", ("true",))] if job.profiled else [])):
        try:
            found[name] = converted(name, values)
        except UsageError as error:
            problems.append(told(error))
    if problems:
        raise UsageError("; ".join(problems))
    return found


def _order(catalogue: Catalogue, site: Site, job: CampaignJob) -> Order:
    wanted: JobRequest = job.wanted
    order = make_order(catalogue, wanted.request, wanted.choices, wanted.options, site, wanted.framework)
    if order.sample().array:
        raise UsageError("--array does not go with a campaign", do="use --repeats")
    return order


def _show(campaign: Campaign, jobs: Sequence[PlannedJob], *, json: bool) -> None:
    if json:
        print_json(campaign_document(campaign, jobs))
    else:
        print_table(campaign_table(jobs))


def _confirm(campaign: Campaign, jobs: Sequence[PlannedJob], *, goes_on: bool, yes: bool) -> None:
    """Raises UserInterrupt where the user says no, UsageError where nobody can be asked."""
    left = [item for item in jobs if item.job.state != "submitted"]
    if goes_on:
        sys.stderr.write(f"campaign {campaign.campaign} goes on: {len(jobs) - len(left)} of {len(jobs)} are queued\n")
    what = f"{total_text(left)}, {hours_text(total_gpu_hours(left))} GPU-hours at most"
    if yes:
        sys.stderr.write(f"campaign {campaign.campaign}: {what}\n")
        return
    if not sys.stdin.isatty():
        raise UsageError(f"nobody is here to be asked whether to queue {what}", do="add --yes, or --dry-run to look")
    print_table(campaign_table(left))
    if not typer.confirm(f"Queue {what}?", default=False, err=True):
        raise UserInterrupt("nothing was queued")


def _teller(count: int) -> Callable[[CampaignJob], None]:
    """Tells of each job that is done with."""
    width = len(str(count))

    def tell(job: CampaignJob) -> None:
        number = int(job.key.rpartition("-")[2])
        what = f"job {job.job_id}  {job.folder}" if job.state == "submitted" else f"refused: {job.reason}"
        sys.stderr.write(f"{number:>{width}}/{count}  {what}\n")

    return tell
