# SPDX-License-Identifier: Apache-2.0
"""Queues the jobs of a campaign, each of them once, however often the client is killed and called again.

Before Slurm is asked, the campaign's file says that the job is being submitted, and with which run folder. A client
that finds this asks Slurm for a job with that folder's batch script, once whatever the last client started is gone: the
lock is held by sbatch too. Only a job that Slurm never got is submitted again, with the same script.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from llmb.errors import EnvironmentProblem, LlmbError, UsageError
from llmb.runs.folder import RunFolder, cannot_write

PATIENCE_S = 120.0
"""How long to wait for another client, or for what a killed one left: sbatch gives up earlier."""
POLL_S = 0.05


class Sender(Protocol):
    """Hands jobs to the scheduler. A job is sent under its key, and found again by its key or its run folder."""

    def find(self, job: CampaignJob) -> CampaignJob | None:
        """The job as submitted, where an earlier client got as far as the scheduler; null where it never did.

        Raises InfrastructureError where the scheduler does not answer.
        """

    def send(self, job: CampaignJob, before: Callable[[RunFolder], None], lock: int) -> CampaignJob:
        """The job as submitted. ``before`` hears of its run folder before the scheduler does; the program that asks the
        scheduler inherits the descriptor ``lock``.

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
    with _lock(campaigns_folder(install) / "campaigns.lock"):
        found = find_campaign(install, wanted, resume=False, anew=anew)
        if found is None:
            write_campaign(install, wanted)
        return found or wanted


def submit_campaign(install: Path, name: str, sender: Sender, on_job: Callable[[CampaignJob], None]) -> Outcome:
    """Submits what is left of a campaign, in its order; ``on_job`` hears of each job that is done with.

    A job that Slurm refuses is left for the next call, and the others go on. Raises EnvironmentProblem where nothing
    can be written or another client is at work, InfrastructureError where Slurm does not answer; then the same call
    goes on later.
    """
    refusals: dict[str, LlmbError] = {}
    with _lock(campaigns_folder(install) / f"{name}.lock") as lock:
        campaign = read_campaign(install, name)
        for job in campaign.jobs:
            if job.state == "submitted":
                continue
            writer = _Writer(install, campaign, job)
            try:
                found = sender.find(job) if job.state == "submitting" else None
                done = found or sender.send(job, writer.submitting, lock)
            except UsageError as error:
                refusals[error.what] = error
                done = job.model_copy(update={"state": "refused", "reason": error.what, "folder": None})
            campaign = campaign.with_job(done)
            on_job(done)
        write_campaign(install, campaign)
    return Outcome(campaign, tuple(refusals.values()))


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes down what a job is about to be, before it is."""

    install: Path
    campaign: Campaign
    job: CampaignJob

    def submitting(self, folder: RunFolder) -> None:
        job = self.job.model_copy(update={"state": "submitting", "folder": str(folder.path), "reason": None})
        write_campaign(self.install, self.campaign.with_job(job))


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Holds the lock of a campaign and gives its descriptor; a child that inherits that holds the lock, too."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        end = time.monotonic() + PATIENCE_S
        while not _taken(descriptor, path):
            if time.monotonic() > end:
                do = "wait for the other client; 'lsof' tells which process it is"
                raise EnvironmentProblem("another client is submitting this campaign", where=str(path), do=do)
            time.sleep(POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def _taken(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        do = "set LLMB_INSTALL to a folder on a file system with locks"
        raise EnvironmentProblem(f"cannot lock: {error.strerror}", where=str(path), do=do) from error
    return True
