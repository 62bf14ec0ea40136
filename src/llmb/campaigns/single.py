# SPDX-License-Identifier: Apache-2.0
"""Queues one job."""

from collections.abc import Callable

from llmb.campaigns.campaign import JobRequest
from llmb.campaigns.queueing import CampaignContext
from llmb.errors import UsageError
from llmb.jobs.history import open_history
from llmb.jobs.job import Job
from llmb.jobs.order import Order
from llmb.jobs.submit import new_key, submit_order, unanswered_is_explained

Say = Callable[[str], None]


def plan_one(context: CampaignContext, wanted: JobRequest, *, wait: bool) -> Order:
    """The job, which is to be waited for if ``wait``. Raises UsageError."""
    order = context.order(wanted)
    if wait and order.sample().array:
        raise UsageError("--wait follows one job, and --array makes several", do="omit one of them")
    return order


def queue_one(context: CampaignContext, order: Order, say: Say) -> list[Job]:
    """The job that was queued, or those of an array.

    Raises UsageError and EnvironmentProblem if it is rejected; InfrastructureError and UserInterrupt if it may be
    queued all the same.
    """
    with open_history(context.install, say) as store, unanswered_is_explained():
        return submit_order(store, order, context.environ, key=new_key())
