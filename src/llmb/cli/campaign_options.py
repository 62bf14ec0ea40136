# SPDX-License-Identifier: Apache-2.0
"""Shared by the commands that queue campaigns: options, confirmation, and output."""

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from llmb.campaigns.campaign import Campaign, CampaignJob, total_gpu_hours
from llmb.campaigns.entry import Entry, Selection
from llmb.campaigns.expansion import MOST_RECIPES
from llmb.campaigns.proposal import CampaignContext, Proposal, RequestedJobs, job_options, propose
from llmb.campaigns.submission import SubmissionOutcome, queue
from llmb.catalogue.load import Catalogue
from llmb.cli.options import selection_options, value_options
from llmb.cli.root import agree, can_ask, say
from llmb.errors import UsageError, itemized
from llmb.health.exclusion import OPTION, excluded_nodes
from llmb.options.option import options_of
from llmb.programs.engine.memory_check import memory_warnings
from llmb.report.campaign_report import campaign_document, campaign_table, total_text
from llmb.report.junit import campaign_cases, write_junit
from llmb.report.output import print_output
from llmb.report.table import number
from llmb.runs.folder import chosen_root
from llmb.runs.published_verdict import figure_of
from llmb.schedulers.lookup import read_cluster_site, scheduler_of
from llmb.shown_text import counted, listed


def with_excluded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options, with the nodes that ``--exclude`` stands for. Raises UsageError."""
    text = values.get(OPTION)
    return {**values, OPTION: excluded_here(text)} if text else {**values}


def excluded_here(text: str) -> str:
    """Raises UsageError."""
    install = chosen_root(os.environ, Path.cwd()).path
    site = read_cluster_site(Catalogue(), install, os.environ)
    return excluded_nodes(text, install, scheduler_of(site), say)


REPEATS = replace(options_of(Entry)["repeats"], annotation=int | None, default=None)
"""None means the value of the file."""
_SELECTION = (*options_of(Selection).values(), REPEATS)
SELECTION = value_options(_SELECTION)
"""The options that select recipes."""
NAMED_SELECTION = selection_options(_SELECTION)
"""``SELECTION`` with workload and size as arguments too."""
JOB = value_options([option for name, option in job_options().items() if name not in options_of(Selection)])
"""The options of one job, except those that name its recipe."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be queued, queue nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before queueing.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the unfinished campaign, even if the file or the options have changed.")
]
StartNew = Annotated[bool, typer.Option("--new", help="Begin a new campaign even if one like it exists.")]


def run_campaign(
    context: CampaignContext,
    requested: RequestedJobs,
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
    resume: bool,
    start_new: bool,
    junit: Path | None = None,
) -> None:
    """Shows a campaign, asks for confirmation, and queues it.

    Raises UsageError with all problems, and if jobs are rejected.
    """
    proposal = propose(context, requested, resume=resume, start_new=start_new)
    for line in (*_left_open(context, requested, proposal), *_without_figure(proposal)):
        say(line)
    if proposal.left_out:
        sys.stderr.write(f"left out:{itemized(proposal.left_out)}\n")
    for warning in dict.fromkeys(job.order.missing.warning for job in proposal.jobs if job.order.missing):
        say(f"warning: {warning}")
    orders = [job.order for job in proposal.jobs]
    for warning in dict.fromkeys(line for order in orders for line in order.scheduler.warnings(order.sample())):
        say(f"warning: {warning}")
    for warning in dict.fromkeys(line for order in orders for line in memory_warnings(order.plan)):
        say(f"warning: {warning}")
    if dry_run:
        write_junit(junit, "bulk", lambda: campaign_cases(proposal.campaign, proposal.left_out))
        if proposal.queued:
            say(f"{_queued_before(proposal.queued)}; --new queues them again")
        _print(proposal.campaign, proposal, json=json)
        return
    if proposal.queued:
        do = f"add --new to queue them again; 'llmb jobs list --campaign {proposal.queued.campaign}' shows them"
        raise UsageError(_queued_before(proposal.queued), do=do)
    _confirm(proposal, yes=yes)
    outcome = queue(context, proposal, say, _show_job, start_new=start_new)
    write_junit(junit, "bulk", lambda: campaign_cases(outcome.campaign, proposal.left_out))
    if json:
        _print(outcome.campaign, proposal, json=True)
    say(_counts(outcome.campaign, len(proposal.left_out)))
    _raise_refusals(outcome)


def _counts(campaign: Campaign, left_out: int) -> str:
    refused = sum(job.state == "refused" for job in campaign.jobs)
    counts = [f"{sum(job.state == 'submitted' for job in campaign.jobs)} of {len(campaign.jobs)} jobs are queued"]
    counts += [f"{refused} rejected"] if refused else []
    counts += [f"recipes were left out for {counted(left_out, 'reason')}"] if left_out else []
    return f"campaign {campaign.campaign}: {', '.join(counts)}"


def _queued_before(campaign: Campaign) -> str:
    return f"all {len(campaign.jobs)} jobs were queued before, by campaign {campaign.campaign} of {campaign.created_at}"


def _left_open(context: CampaignContext, requested: RequestedJobs, proposal: Proposal) -> list[str]:
    """What the jobs take that neither the request nor the cluster's settings name."""
    found = {choice.name: choice.text() for job in proposal.jobs for choice in job.recipe.unspecified}
    if context.gpu_type(requested.values) is None and not all(entry.selection.gpu_type for entry in requested.entries):
        types = ", ".join(dict.fromkeys(job.recipe.gpu_type for job in proposal.jobs))
        found["GPU type"] = f"GPU type {types} (--gpu-type, or gpu_type in cluster_config.yaml, names another)"
    return [f"not specified: {'; '.join(found.values())}"] if found else []


def _without_figure(proposal: Proposal) -> Iterator[str]:
    """The jobs that nothing published can be compared with."""
    without = [recipe for job in proposal.jobs if not figure_of(recipe := job.recipe)]
    if without:
        of = f"{len(without)} of {len(proposal.jobs)} jobs"
        texts = (f"{one.workload} {one.size} {one.dtype.value} on {one.scale} {one.gpu_type}" for one in without)
        named = listed(dict.fromkeys(texts), MOST_RECIPES)
        do = "'llmb judge LABEL --against BASELINE' or '--expect FILE' judges them"
        yield f"without a published figure: {of} ({named}); {do}"


def _print(campaign: Campaign, proposal: Proposal, *, json: bool) -> None:
    print_output(campaign_document(campaign, proposal.jobs) if json else campaign_table(proposal.jobs))


def _confirm(proposal: Proposal, *, yes: bool) -> None:
    name, remaining, count = proposal.campaign.campaign, proposal.remaining, len(proposal.jobs)
    if proposal.resumed:
        sys.stderr.write(f"campaign {name} is resumed: {count - len(remaining)} of {count} are queued\n")
    what = f"{total_text(remaining)}, {number(total_gpu_hours(remaining))} GPU-hours at most"
    if yes:
        sys.stderr.write(f"campaign {name}: {what}\n")
        return

    if can_ask():
        print_output(campaign_table(remaining))
    agree(f"Queue {what}?", default=False, do="add --yes, or --dry-run to see the jobs")


def _raise_refusals(outcome: SubmissionOutcome) -> None:
    """Raises UsageError if the scheduler rejected jobs."""
    if outcome.refusals:
        jobs = outcome.campaign.jobs
        refused = sum(job.state == "refused" for job in jobs)
        reasons = itemized(error.what for error in outcome.refusals)
        do = "correct the cause and rerun the same command: it submits only these"
        raise UsageError(f"{refused} of {len(jobs)} jobs could not be queued:{reasons}", do=do)


def _show_job(campaign: Campaign, job: CampaignJob) -> None:
    """Reports a job that was submitted or rejected."""
    count = len(campaign.jobs)
    number = int(job.key.rpartition("-")[2])
    what = f"job {job.job_id}  {job.folder}" if job.state == "submitted" else f"rejected: {job.reason}"
    sys.stderr.write(f"{number:>{len(str(count))}}/{count}  {what}\n")
