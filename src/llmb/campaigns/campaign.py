# SPDX-License-Identifier: Apache-2.0
"""A campaign: its jobs with their progress, the resources it requests, and queueing each job once.

However often the client is killed and rerun: before a job is sent, the file records that. A client that finds
this record asks the sender, which tracks jobs by key, whether the job reached the scheduler; only a job that never did
is sent again.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

from pydantic import ValidationError

from llmb.catalogue.records import Record
from llmb.catalogue.resolve import Request
from llmb.catalogue.unspecified import Unspecified
from llmb.checkpoints.origin import Origin
from llmb.errors import EnvironmentProblem, LlmbError, UsageError, unknown
from llmb.jobs.locks import file_lock
from llmb.jobs.order import Order
from llmb.jobspec.options import FrameworkOptions, JobOptions
from llmb.runs.choices import Choices
from llmb.runs.folder import cannot_write, write_atomically
from llmb.runs.published_verdict import figure_of
from llmb.trust import STATE_FOLDER, check_links

FOLDER = Path(STATE_FOLDER) / "campaigns"
State = Literal["planned", "submitting", "submitted", "refused"]


class JobRequest(Record):
    """Everything that defines one job, apart from the cluster's settings."""

    request: Request
    choices: Choices
    options: JobOptions
    framework: FrameworkOptions = FrameworkOptions()


class CampaignJob(Record):
    """One job of a campaign. ``submitting`` is written down before the scheduler is asked, which may have it."""

    key: str
    """Names the submission; no job is submitted twice under it."""
    where: str
    """File and line that name the job."""
    repeat: int
    profiled: bool
    wanted: JobRequest
    state: State = "planned"
    folder: str | None = None
    job_id: str | None = None
    reason: str | None = None


class Campaign(Record):
    """The content of ``<campaign>.json``, jobs in the order of their submission."""

    schema_version: int = 1
    campaign: str
    source: str
    """The file, or the command line."""
    fingerprint: str
    """Digest of the request: the same command has the same one."""
    created_at: str
    jobs: tuple[CampaignJob, ...]

    @property
    def unfinished(self) -> bool:
        return any(job.state != "submitted" for job in self.jobs)

    def with_job(self, job: CampaignJob) -> "Campaign":
        """The campaign with ``job`` replacing the one with the same key."""
        jobs = tuple(job if job.key == other.key else other for other in self.jobs)
        return self.model_copy(update={"jobs": jobs})


def new_campaign(source: str, jobs: Iterable[CampaignJob], created_at: str) -> Campaign:
    """A name that sorts by time, and keys that no other campaign has; the jobs' own keys are numbers so far."""
    now = datetime.now(UTC)  # to the microsecond: a script may order several campaigns in a second
    name = f"{now:%Y%m%d-%H%M%S}-{now.microsecond:05x}{secrets.token_hex(1)[0]}"
    listed = tuple(jobs)
    keyed = tuple(job.model_copy(update={"key": f"{name}-{number:04d}"}) for number, job in enumerate(listed, start=1))
    return Campaign(campaign=name, source=source, fingerprint=fingerprint(listed), created_at=created_at, jobs=keyed)


def fingerprint(jobs: Iterable[CampaignJob]) -> str:
    """Digest of the jobs' requests, independent of their progress and of their position in the file."""
    asked = [(job.wanted.model_dump(mode="json"), job.repeat, job.profiled) for job in jobs]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def campaigns_folder(install: Path) -> Path:
    return install / FOLDER


def write_campaign(install: Path, campaign: Campaign) -> None:
    """Raises EnvironmentProblem if it cannot be written."""
    folder = campaigns_folder(install)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{campaign.campaign}.json", campaign.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise cannot_write(folder, error) from error


def read_campaigns(install: Path) -> list[Campaign]:
    """All campaigns of an install root, the oldest first. Raises EnvironmentProblem for one that cannot be read."""
    return [_read(path) for path in sorted(campaigns_folder(install).glob("*.json"))]


def read_campaign(install: Path, name: str) -> Campaign:
    """Raises UsageError for a name that does not exist."""
    path = campaigns_folder(install) / f"{name}.json"
    if not path.is_file():
        raise unknown("campaign", name, (found.stem for found in campaigns_folder(install).glob("*.json")))
    return _read(path)


def unfinished_campaign(campaigns: Iterable[Campaign], asked: str, source: str, *, any_jobs: bool) -> Campaign | None:
    """The newest one with jobs to submit and the same request, or, with ``any_jobs``, from the same source."""
    found = [item for item in campaigns if item.unfinished and (item.fingerprint == asked or any_jobs)]
    return next((item for item in reversed(found) if item.source == source or item.fingerprint == asked), None)


def queued_campaign(campaigns: Iterable[Campaign], asked: str) -> Campaign | None:
    """The newest one with the same request whose jobs were all submitted."""
    return next((item for item in reversed(list(campaigns)) if item.fingerprint == asked and not item.unfinished), None)


def _read(path: Path) -> Campaign:
    check_links(path)
    try:
        return Campaign.model_validate_json(path.read_text())
    except (OSError, ValidationError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is not a record of a campaign"
        do = "move the file away; 'llmb jobs list' shows which of its jobs are queued"
        raise EnvironmentProblem(f"the campaign cannot be read: {what}", where=str(path), do=do) from error


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A job with its resources; None if it has no time limit."""

    job: CampaignJob
    workload: str
    size: str
    dtype: str
    gpu_type: str
    gpus: int
    proxy: str
    """Which proxy it is, in words; empty for the model itself."""
    nodes: int
    time_limit_min: float | None
    expected_s: float | None
    """What its steps take at the published step time; None if there is none."""
    origin: Origin
    warning: str | None = None
    """Why a dry run's job cannot be queued yet."""
    unspecified: tuple[Unspecified, ...] = ()

    @property
    def gpu_hours(self) -> float | None:
        """An upper bound: most jobs end before their time limit."""
        return None if self.time_limit_min is None else self.gpus * self.time_limit_min / 60

    @property
    def expected_gpu_hours(self) -> float | None:
        """Only the steps: the start comes on top."""
        return None if self.expected_s is None else self.gpus * self.expected_s / 3600


def planned(job: CampaignJob, order: Order) -> PlannedJob:
    recipe, spec = order.plan.recipe, order.sample()
    figure = figure_of(recipe)
    return PlannedJob(
        job=job,
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        gpu_type=recipe.gpu_type,
        gpus=recipe.scale,
        proxy=recipe.proxy_text,
        nodes=spec.placement.nodes,
        time_limit_min=spec.time_limit_min,
        expected_s=figure.step_time_s * order.plan.steps if figure and figure.step_time_s else None,
        origin=order.plan.origin,
        warning=order.missing.warning if order.missing else None,
        unspecified=recipe.unspecified,
    )


def total(hours: Iterable[float | None]) -> float | None:
    """None if a job's are not known."""
    known = [*hours]
    return None if None in known else sum(hour for hour in known if hour is not None)


def total_gpu_hours(jobs: Iterable[PlannedJob]) -> float | None:
    """None if a job has no time limit."""
    return total(job.gpu_hours for job in jobs)


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


def find_campaign(install: Path, campaign: Campaign, *, resume: bool, start_new: bool) -> Campaign | None:
    """The newest unfinished campaign with the request of ``campaign``; with ``resume`` the newest one from the same
    source, whatever its jobs, and with ``start_new`` none. Raises UsageError if there is none to resume."""
    if start_new:
        return None
    found = unfinished_campaign(read_campaigns(install), campaign.fingerprint, campaign.source, any_jobs=resume)
    if resume and not found:
        do = "omit --resume to start a new campaign"
        raise UsageError("no campaign from this source is unfinished", where=campaign.source, do=do)
    return found


def find_queued(install: Path, campaign: Campaign) -> Campaign | None:
    """The newest campaign with the same request as ``campaign`` of which nothing is left to submit."""
    return queued_campaign(read_campaigns(install), campaign.fingerprint)


def begin_campaign(install: Path, campaign: Campaign, *, start_new: bool) -> Campaign:
    """Writes ``campaign``, unless another client has just started, or queued, the same campaign: then returns that one.

    Whether it was queued earlier is checked before: see ``find_queued``.
    """
    with file_lock(campaigns_folder(install) / "campaigns.lock", PATIENCE_S, BUSY):
        found = find_campaign(install, campaign, resume=False, start_new=start_new)
        if found is None and not start_new:
            found = find_queued(install, campaign)
        if found is None:
            write_campaign(install, campaign)
        return found or campaign


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
