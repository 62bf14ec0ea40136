# SPDX-License-Identifier: Apache-2.0
"""A campaign: a file with its jobs and their progress, and the resources that it requests."""

import hashlib
import json
import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from llmb.base.errors import EnvironmentProblem, UsageError, unknown
from llmb.base.trust import STATE_FOLDER, check_links
from llmb.catalogue.records import Recipe, Record
from llmb.catalogue.resolve import Request
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order
from llmb.launch.jobspec.job_options import FrameworkOptions, JobOptions
from llmb.launch.jobspec.spec import JobSpec
from llmb.runs.choices import Choices
from llmb.runs.folder import write_atomically, writing

FOLDER = Path(STATE_FOLDER) / "campaigns"
PATIENCE_S = 120.0
"""Seconds to wait for another client to release a lock."""
State = Literal["planned", "submitting", "submitted", "refused"]


class JobRequest(Record):
    """Everything that defines one job, except for the cluster's settings."""

    request: Request
    choices: Choices
    options: JobOptions
    framework: FrameworkOptions = FrameworkOptions()


class CampaignJob(Record):
    """One job of a campaign. The state ``submitting`` is written before the submission, and may be out of date."""

    key: str
    """The key of the submission; no job is submitted twice under it."""
    where: str
    """File and line of the job, or the command line."""
    repeat: int
    profiled: bool
    wanted: JobRequest
    state: State = "planned"
    folder: str | None = None
    job_id: str | None = None
    reason: str | None = None


class Campaign(Record):
    """The content of ``<campaign>.json``, with jobs in the order of submission."""

    schema_version: int = 1
    campaign: str
    source: str
    """The file that was read, or the command line."""
    fingerprint: str
    """Digest of the requested jobs; identical requests have identical digests."""
    created_at: str
    jobs: tuple[CampaignJob, ...]

    @property
    def unfinished(self) -> bool:
        return any(job.state != "submitted" for job in self.jobs)

    def with_job(self, job: CampaignJob) -> "Campaign":
        """Return the campaign with ``job`` in place of the job with the same key."""
        jobs = tuple(job if job.key == other.key else other for other in self.jobs)
        return self.model_copy(update={"jobs": jobs})


def new_campaign(source: str, jobs: Iterable[CampaignJob], created_at: str) -> Campaign:
    """Create a campaign whose name sorts by time, and give its jobs unique keys."""
    now = datetime.now(UTC)  # to the microsecond: a script may order several campaigns in a second
    name = f"{now:%Y%m%d-%H%M%S}-{now.microsecond:05x}{secrets.token_hex(1)[0]}"
    listed = tuple(jobs)
    keyed = tuple(job.model_copy(update={"key": f"{name}-{number:04d}"}) for number, job in enumerate(listed, start=1))
    return Campaign(campaign=name, source=source, fingerprint=fingerprint(listed), created_at=created_at, jobs=keyed)


def fingerprint(jobs: Iterable[CampaignJob]) -> str:
    """Return a digest of the jobs' requests in order, without their progress and their lines in the file."""
    requests = [(job.wanted.model_dump(mode="json"), job.repeat, job.profiled) for job in jobs]
    return hashlib.sha256(json.dumps(requests, sort_keys=True).encode()).hexdigest()


def campaigns_folder(install: Path) -> Path:
    return install / FOLDER


def write_campaign(install: Path, campaign: Campaign) -> None:
    """Write the campaign. Raise EnvironmentProblem if it cannot be written."""
    folder = campaigns_folder(install)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{campaign.campaign}.json", campaign.model_dump_json(indent=2) + "\n")


def read_campaigns(install: Path) -> list[Campaign]:
    """Read campaigns, oldest first; raise EnvironmentProblem if one is unreadable, UsageError if another user's link is
    in its path."""
    return [_read(path) for path in sorted(campaigns_folder(install).glob("*.json"))]


def read_campaign(install: Path, name: str) -> Campaign:
    """Read a campaign; raise UsageError if it does not exist, and the errors of ``read_campaigns``."""
    path = campaigns_folder(install) / f"{name}.json"
    if not path.is_file():
        raise unknown("campaign", name, (file.stem for file in campaigns_folder(install).glob("*.json")))
    return _read(path)


def find_campaign(install: Path, campaign: Campaign, *, resume: bool) -> Campaign | None:
    """Return the newest unfinished campaign with the same jobs as ``campaign`` or, if ``resume``, from the same source.

    If there is none, return None or, with ``resume``, raise UsageError; also raise the errors of ``read_campaigns``.
    """
    campaigns = [
        item
        for item in read_campaigns(install)
        if item.unfinished and (item.fingerprint == campaign.fingerprint or (resume and item.source == campaign.source))
    ]
    if resume and not campaigns:
        do = "omit --resume to start a new campaign"
        raise UsageError("there is no unfinished campaign from this source", where=campaign.source, do=do)
    return campaigns[-1] if campaigns else None


def find_queued(install: Path, campaign: Campaign) -> Campaign | None:
    """Return the newest completely submitted campaign with the same jobs as ``campaign``, if any."""
    matching = [item for item in read_campaigns(install) if item.fingerprint == campaign.fingerprint]
    return next((item for item in reversed(matching) if not item.unfinished), None)


def begin_campaign(install: Path, campaign: Campaign, *, start_new: bool) -> Campaign:
    """Write and return ``campaign``, or return an existing campaign with the same jobs unless ``start_new`` is set.

    Callers have looked for such a campaign before, but another client may have created it since.
    """
    with campaign_lock(install, "campaigns"):
        equal = None if start_new else find_campaign(install, campaign, resume=False) or find_queued(install, campaign)
        if equal is None:
            write_campaign(install, campaign)
        return equal or campaign


def campaign_lock(install: Path, name: str) -> AbstractContextManager[object]:
    """Return the lock ``name`` of campaigns; entering it raises EnvironmentProblem on failure or after two minutes."""
    return file_lock(campaigns_folder(install) / f"{name}.lock", PATIENCE_S, "submitting this campaign")


def _read(path: Path) -> Campaign:
    check_links(path)
    try:
        return Campaign.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not a campaign record"
        do = "move the file away; 'llmb jobs list' shows which of its jobs are queued"
        raise EnvironmentProblem(f"the campaign cannot be read: {what}", where=str(path), do=do) from error


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job of a campaign, with its order and a sample of its specification."""

    job: CampaignJob
    order: Order
    spec: JobSpec

    @property
    def recipe(self) -> Recipe:
        return self.order.plan.recipe

    @property
    def gpu_hours(self) -> float | None:
        """Return the GPU hours up to the time limit, which most jobs do not reach; None if there is no limit."""
        minutes = self.spec.time_limit_min
        return None if minutes is None else self.recipe.scale * minutes / 60

    @property
    def expected_gpu_hours(self) -> float | None:
        """Return the GPU hours of all steps at the published step time, if there is one; startup is not included."""
        if (figure := self.recipe.figure) is None:
            return None
        return self.recipe.scale * figure.step_time_s * self.order.plan.steps / 3600


def total(hours: Iterable[float | None]) -> float | None:
    """Return the sum of the hours; None if any of them is None."""
    values = [*hours]
    return None if None in values else sum(hour for hour in values if hour is not None)


def total_gpu_hours(jobs: Iterable[PlannedJob]) -> float | None:
    """Return the GPU hours of all jobs; None if a job has no time limit."""
    return total(job.gpu_hours for job in jobs)
