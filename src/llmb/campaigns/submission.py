# SPDX-License-Identifier: Apache-2.0
"""Queues the jobs of a campaign, each of them once, however often the client is killed and called again.

Before a job is sent, the campaign's file says so. A client that finds this asks the sender, who keeps account of the
keys, whether the job got as far as the scheduler; only one that never did is sent again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llmb.campaigns.campaign import (
    Campaign,
    CampaignJob,
    campaigns_folder,
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
    """Hands jobs to the scheduler. A job is sent under its key, and found again by it."""

    def find(self, job: CampaignJob) -> CampaignJob | None:
        """The job as submitted, where an earlier client got as far as the scheduler; null where it never did.

        Raises InfrastructureError where the scheduler does not answer.
        """

    def send(self, job: CampaignJob) -> CampaignJob:
        """The job as submitted.

        Raises UsageError where the scheduler refuses it, InfrastructureError where it does not answer.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """A campaign after a client's work on it."""

    campaign: Campaign
    refusals: tuple[LlmbError, ...]
    """One of each kind."""


def find_campaign(install: Path, wanted: Campaign, *, resume: bool, anew: bool) -> Campaign | None:
    """The newest unfinished campaign that was asked for like ``wanted``; with ``resume`` the newest one from the same
    source, whatever its jobs, and with ``anew`` none. Raises UsageError where there is none to resume."""
    if anew:
        return None
    found = unfinished_campaign(read_campaigns(install), wanted.fingerprint, wanted.source, any_jobs=resume)
    if resume and not found:
        do = "leave --resume out to begin a new campaign"
        raise UsageError("no campaign from here is unfinished", where=wanted.source, do=do)
    return found


def begin_campaign(install: Path, wanted: Campaign, *, anew: bool) -> Campaign:
    """Writes ``wanted`` down, unless another client has just begun the same: then that one."""
    with file_lock(campaigns_folder(install) / "campaigns.lock", PATIENCE_S, BUSY):
        found = find_campaign(install, wanted, resume=False, anew=anew)
        if found is None:
            write_campaign(install, wanted)
        return found or wanted


def submit_campaign(install: Path, name: str, sender: Sender, on_job: Callable[[CampaignJob], None]) -> Outcome:
    """Submits what is left of a campaign, in its order; ``on_job`` hears of each job that is done with.

    A job that is refused is left for the next call, and the others go on. Raises EnvironmentProblem where nothing
    can be written or another client is at work, InfrastructureError where the scheduler does not answer; then the
    same call resumes later.
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
    return Outcome(campaign, tuple(refusals.values()))
