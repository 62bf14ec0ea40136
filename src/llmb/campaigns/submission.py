# SPDX-License-Identifier: Apache-2.0
"""Queues the jobs of a campaign, each of them once, however often the client is killed and rerun.

Before a job is sent, the campaign's file records that. A client that finds this record asks the sender, which tracks
jobs by key, whether the job reached the scheduler; only a job that never did is sent again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmb.campaigns.campaign import (
    Campaign,
    CampaignJob,
    campaigns_folder,
    queued_campaign,
    read_campaign,
    read_campaigns,
    unfinished_campaign,
    write_campaign,
)
from llmb.errors import LlmbError, UsageError
from llmb.jobs.locks import file_lock

PATIENCE_S = 120.0
"""How long to wait for another client."""
BUSY = "submitting this campaign"


class Sender(Protocol):
    """Submits jobs to the scheduler. A job is sent, and later found, by its key."""

    def find(self, job: CampaignJob) -> CampaignJob | None:
        """The submitted job if an earlier client reached the scheduler with it, else None.

        Raises InfrastructureError if the scheduler does not answer.
        """

    def send(self, job: CampaignJob) -> CampaignJob:
        """The submitted job.

        Raises UsageError if the scheduler rejects it, InfrastructureError if it does not answer.
        """


@dataclass(frozen=True, slots=True)
class SubmissionOutcome:
    """A campaign after a client has submitted its jobs."""

    campaign: Campaign
    refusals: tuple[LlmbError, ...]
    """One of each kind."""


def find_campaign(install: Path, wanted: Campaign, *, resume: bool, start_new: bool) -> Campaign | None:
    """The newest unfinished campaign with the same request as ``wanted``; with ``resume`` the newest one from the same
    source, whatever its jobs, and with ``start_new`` none. Raises UsageError if there is none to resume."""
    if start_new:
        return None
    found = unfinished_campaign(read_campaigns(install), wanted.fingerprint, wanted.source, any_jobs=resume)
    if resume and not found:
        do = "omit --resume to start a new campaign"
        raise UsageError("no campaign from this source is unfinished", where=wanted.source, do=do)
    return found


def find_queued(install: Path, wanted: Campaign) -> Campaign | None:
    """The newest campaign with the same request as ``wanted`` of which nothing is left to submit."""
    return queued_campaign(read_campaigns(install), wanted.fingerprint)


def begin_campaign(install: Path, wanted: Campaign, *, start_new: bool) -> Campaign:
    """Writes ``wanted``, unless another client has just started, or queued, the same campaign: then returns that one.

    Whether it was queued earlier is checked before: see ``find_queued``.
    """
    with file_lock(campaigns_folder(install) / "campaigns.lock", PATIENCE_S, BUSY):
        found = find_campaign(install, wanted, resume=False, start_new=start_new)
        if found is None and not start_new:
            found = find_queued(install, wanted)
        if found is None:
            write_campaign(install, wanted)
        return found or wanted


def submit_campaign(
    install: Path, name: str, sender: Sender, on_job: Callable[[CampaignJob], None]
) -> SubmissionOutcome:
    """Submits the remaining jobs of a campaign, in its order; calls ``on_job`` with each submitted or rejected job.

    A rejected job is left for the next call, and the others are submitted. Raises EnvironmentProblem if files cannot
    be written or another client is submitting, InfrastructureError if the scheduler does not answer; then the same
    call resumes later.
    """
    refusals: dict[str, LlmbError] = {}
    with file_lock(campaigns_folder(install) / f"{name}.lock", PATIENCE_S, BUSY):
        campaign = read_campaign(install, name)
        for job in campaign.jobs:
            if job.state == "submitted":
                continue
            try:
                done = sender.find(job) if job.state == "submitting" else None
                if done is None:
                    sending = job.model_copy(update={"state": "submitting", "reason": None})
                    write_campaign(install, campaign.with_job(sending))
                    done = sender.send(job)
            except UsageError as error:
                refusals[error.what] = error
                done = job.model_copy(update={"state": "refused", "reason": error.what})
            campaign = campaign.with_job(done)
            on_job(done)
        write_campaign(install, campaign)
    return SubmissionOutcome(campaign, tuple(refusals.values()))
