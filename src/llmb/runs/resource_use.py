# SPDX-License-Identifier: Apache-2.0
"""Adds to a result what the run used of its GPUs and nodes, from the samples in its folder."""

from collections.abc import Sequence

from llmb.catalogue.records import Window
from llmb.resources.other_work import find_other_work
from llmb.resources.read import read_samples
from llmb.resources.records import OtherWork, ResourceUse
from llmb.resources.series import TimeSpan
from llmb.resources.summary import SampledWork, summarize
from llmb.runs.environment import Environment
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan
from llmb.runs.result import Result
from llmb.runs.steps import Step


def with_resources(
    result: Result, folder: RunFolder, plan: EnginePlan, steps: Sequence[Step], environment: Environment | None
) -> Result:
    """``plan`` has the window of the result. Samples that cannot be read do not spoil a result."""
    use: ResourceUse | str
    others: OtherWork | str
    if plan.resource_interval_s is None:
        use = others = "the run was not sampled"
    elif result.step_time_s is None:
        use = others = result.step_time_reason or "the run has no statistics"
    else:
        use, others = _found(folder, plan, steps, environment)
    return result.model_copy(
        update={
            "resources": None if isinstance(use, str) else use,
            "resources_reason": use if isinstance(use, str) else None,
            "other_work": None if isinstance(others, str) else others,
            "other_work_reason": others if isinstance(others, str) else None,
        }
    )


def _found(
    folder: RunFolder, plan: EnginePlan, steps: Sequence[Step], environment: Environment | None
) -> tuple[ResourceUse | str, OtherWork | str]:
    inside = _inside(plan.window, steps)
    spans = tuple(TimeSpan(step.ended_s - step.step_time_s, step.ended_s) for step in inside)
    layout = plan.recipe.layout
    try:
        sampled = read_samples(folder.resources)
    except OSError as error:
        return (why := f"the samples cannot be read: {error.strerror}"), why
    gpus = _gpus(environment) if environment and environment.gpus else None
    work = SampledWork(
        spans=spans,
        tokens=len(spans) * layout.gbs * layout.seq_len,
        device=plan.device,
        nodes=environment.nodes if environment else (),
        gpus=gpus,
    )
    return summarize(sampled, work), find_other_work(sampled, spans, plan.device, gpus)


def _inside(window: Window, steps: Sequence[Step]) -> list[Step]:
    """Steps that statistics are of."""
    return [step for step in steps if window.first <= step.step <= window.last and not step.profiled]


def _gpus(environment: Environment) -> dict[str, set[str]] | None:
    """By node the GPUs that train; None if an id is unknown."""
    found: dict[str, set[str]] = {}
    for gpu in environment.gpus or ():
        if gpu.uuid is None:
            return None
        found.setdefault(gpu.node, set()).add(gpu.uuid)
    return found
