# SPDX-License-Identifier: Apache-2.0
"""Submits each job of a campaign once, however often the client is killed and run again.

Before a job is sent, the campaign's file records that. A client that finds this record looks in the history, which has
jobs by key, whether the job reached the scheduler; only a job that never did is sent again.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from llmb.campaigns.campaign import (
    Campaign,
    CampaignJob,
    begin_campaign,
    campaign_lock,
    read_campaign,
    write_campaign,
)
from llmb.campaigns.proposal import CampaignContext, Proposal
from llmb.errors import LlmbError, UsageError, UserInterrupt
from llmb.jobs.history import open_history
from llmb.jobs.job import NOT_SUBMITTED, Job
from llmb.jobs.order import Order
from llmb.jobs.refresh import TIME_OUT_S
from llmb.jobs.store import Store
from llmb.jobs.submit import new_key, resolve_submissions, submit_order, unanswered_is_explained

Say = Callable[[str], None]
OnJob = Callable[[Campaign, CampaignJob], None]
"""Called with each job that was submitted or rejected."""
POLL_S = 1.0


def queue_one(context: CampaignContext, order: Order, say: Say) -> Job:
    """Raises UsageError and EnvironmentProblem if it is rejected; InfrastructureError and UserInterrupt if it may be
    queued all the same.
    """
    with open_history(context.install, say) as store, unanswered_is_explained():
        return submit_order(store, order, context.environ, key=new_key())


@dataclass(frozen=True, slots=True)
class SubmissionOutcome:
    """A campaign after a client has submitted its jobs."""

    campaign: Campaign
    refusals: tuple[LlmbError, ...]
    """One of each kind."""


def queue(
    context: CampaignContext, proposal: Proposal, say: Say, on_job: OnJob, *, start_new: bool
) -> SubmissionOutcome:
    """Queues the remaining jobs of a proposal. A rejected job is left for the next call, and the others are submitted.

    Raises EnvironmentProblem if files cannot be written or another client is submitting, InfrastructureError if the
    scheduler does not answer, UserInterrupt if it is interrupted; the same call then resumes.
    """
    install = context.install
    begun = proposal.campaign if proposal.resumed else begin_campaign(install, proposal.campaign, start_new=start_new)
    name = begun.campaign
    with open_history(install, say) as history, campaign_lock(install, name):
        try:
            return _submit_all(context, read_campaign(install, name), history, say, on_job)
        except KeyboardInterrupt as error:
            do = "rerun the same command: it resumes where it was; 'llmb jobs list' shows what is queued"
            raise UserInterrupt(f"campaign {name} was interrupted", do=do) from error


def _submit_all(
    context: CampaignContext, campaign: Campaign, history: Store, say: Say, on_job: OnJob
) -> SubmissionOutcome:
    refusals: dict[str, LlmbError] = {}
    for job in campaign.jobs:
        if job.state == "submitted":
            continue
        try:
            found = _find(context, job, history, say) if job.state == "submitting" else None
            if found is None:
                sending = job.model_copy(update={"state": "submitting", "reason": None})
                write_campaign(context.install, campaign.with_job(sending))
                found = submit_order(
                    history, context.order_of(job), context.environ, key=job.key, campaign=campaign.campaign
                )
            changes = {"state": "submitted", "folder": found.run_dir, "job_id": str(found.job_id), "reason": None}
        except UsageError as error:
            refusals[error.what] = error
            changes = {"state": "refused", "reason": error.what}
        done = job.model_copy(update=changes)
        campaign = campaign.with_job(done)
        on_job(campaign, done)
    write_campaign(context.install, campaign)
    return SubmissionOutcome(campaign, tuple(refusals.values()))


def _find(context: CampaignContext, job: CampaignJob, history: Store, say: Say) -> Job | None:
    """The job if an earlier client reached the scheduler with it, else None.

    Raises InfrastructureError if the scheduler does not answer.
    """
    row = history.by_key(job.key)
    while row and row.job_id is None and row.state != NOT_SUBMITTED:
        # A submission is given up only after a while, since the scheduler may be busy with it.
        for line in resolve_submissions(history, context.install, row.scheduler, TIME_OUT_S):
            say(line)
        row = history.by_key(job.key)
        if row and row.job_id is None and row.state != NOT_SUBMITTED:
            time.sleep(POLL_S)
    return row if row and row.job_id else None
