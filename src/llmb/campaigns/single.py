# SPDX-License-Identifier: Apache-2.0
"""Queues one job, and waits for it."""

from collections.abc import Callable

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.queueing import CampaignContext
from llmb.errors import InfrastructureError, UsageError, UserInterrupt
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.order import Order, Queued
from llmb.jobs.submit import new_key, submit_order
from llmb.jobs.wait import Watch, wait_for

Say = Callable[[str], None]


def plan_one(context: CampaignContext, wanted: JobRequest, *, wait: bool) -> Order:
    """The job, which is to be waited for if ``wait``. Raises UsageError."""
    order = context.order(wanted)
    if wait and order.sample().array:
        raise UsageError("--wait follows one job, and --array makes several", do="omit one of them")
    return order


def queue_one(context: CampaignContext, order: Order, say: Say) -> list[Queued]:
    """The job that was queued, or those of an array.

    Raises UsageError and EnvironmentProblem if it is rejected. Without an answer, rerunning the command could queue it
    twice: InfrastructureError and UserInterrupt say so.
    """
    do = "'llmb jobs refresh' finds out, and 'llmb jobs list' then shows it; do not resubmit it before"
    with open_history(context.install, say) as store:
        try:
            return submit_order(store, order, context.environ, key=new_key())
        except InfrastructureError as error:
            raise InfrastructureError(f"{error.what}; the job may be queued all the same", do=do) from error
        except KeyboardInterrupt as error:
            raise UserInterrupt("interrupted; the job may be queued all the same", do=do) from error


def wait_for_one(context: CampaignContext, run: Queued, say: Say, watch: Watch) -> Job:
    """The job once it has ended, or the last of its retries. Raises InfrastructureError, UserInterrupt."""
    with open_history(context.install, say) as store:
        try:
            (job,) = wait_for(store, context.install, [run.job.key], context.environ, say, watch=watch)
        except KeyboardInterrupt as error:
            job_id = run.job.job_id
            do = f"'llmb jobs wait {job_id}' waits again, 'llmb jobs cancel {job_id}' ends the job"
            raise UserInterrupt("stopped waiting; the job continues", where=str(run.folder.path), do=do) from error
    return job
