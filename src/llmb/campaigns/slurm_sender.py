# SPDX-License-Identifier: Apache-2.0
"""Hands the jobs of campaigns to Slurm, which knows them by the batch scripts in their run folders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmb.campaigns.campaign import CampaignJob
from llmb.jobs.store import Store
from llmb.jobs.submit import adopt
from llmb.launch.slurm.submission import Order, Queued, queue, queue_folder, submitted_job
from llmb.runs.folder import RunFolder
from llmb.runs.record import SubmittedJob, now


@dataclass(frozen=True, slots=True)
class SlurmSender:
    """``order_of`` plans a job; ``environ`` is what sbatch gets; ``history`` hears of every job that is queued."""

    order_of: Callable[[CampaignJob], Order]
    environ: Mapping[str, str]
    history: Store

    def find(self, job: CampaignJob) -> CampaignJob | None:
        folder = _folder(job)
        job_id = submitted_job(folder) if folder else None
        if folder is None or job_id is None:
            return None
        return self._submitted(job, Queued(folder, SubmittedJob(job_id=job_id, submitted_at=now())))

    def send(self, job: CampaignJob, before: Callable[[RunFolder], None], lock: int) -> CampaignJob:
        folder = _folder(job)
        if folder and folder.batch_script.is_file():
            return self._submitted(job, queue_folder(folder, self.environ, held=(lock,)))
        (queued,) = queue(self.order_of(job), self.environ, before=before, held=(lock,))
        return self._submitted(job, queued)

    def _submitted(self, job: CampaignJob, queued: Queued) -> CampaignJob:
        adopt(self.history, self.order_of(job), queued, key=job.key, campaign=job.key.rpartition("-")[0])
        done = {"state": "submitted", "folder": str(queued.folder.path), "job_id": queued.job.job_id, "reason": None}
        return job.model_copy(update=done)


def _folder(job: CampaignJob) -> RunFolder | None:
    """Of a job that an earlier client was about to submit."""
    return RunFolder(Path(job.folder)) if job.state == "submitting" and job.folder else None
