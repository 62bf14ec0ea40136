# SPDX-License-Identifier: Apache-2.0
"""Submits the jobs of campaigns through the history of jobs, which submits no key twice."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.campaigns.campaign import CampaignJob
from llmb.jobs.job import NOT_SUBMITTED
from llmb.jobs.order import Order
from llmb.jobs.refresh import TIME_OUT_S
from llmb.jobs.resolve import resolve_submissions
from llmb.jobs.store import Store
from llmb.jobs.submit import submit_order

POLL_S = 1.0


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
        return _submitted(job, queued.job.job_id, str(queued.folder.path))


def _submitted(job: CampaignJob, job_id: str, folder: str) -> CampaignJob:
    return job.model_copy(update={"state": "submitted", "folder": folder, "job_id": job_id, "reason": None})
