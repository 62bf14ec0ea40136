# SPDX-License-Identifier: Apache-2.0
"""Samples the resources of this node beside the run: the first worker of each node starts the process that does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from llmb.resources.start import start_sampler
from llmb.runs.folder import RunFolder
from llmb.runs.host import host_name
from llmb.runs.plan import EnginePlan


@contextmanager
def resources_sampled(plan: EnginePlan, folder: RunFolder) -> Iterator[None]:
    """The last sample is taken when the block ends. If it fails, the sampler ends with this process."""
    sampler = None
    if plan.resource_interval_s is not None and os.environ.get("LOCAL_RANK", "0") == "0":
        node = host_name()
        sampler = start_sampler(folder.resources_of(node), node, plan.resource_interval_s, plan.device)
    yield
    if sampler:
        sampler.end()
