# SPDX-License-Identifier: Apache-2.0
"""The checkpoint whose weights a run starts with, and the one that saved adapters belong to."""

from collections.abc import Iterator
from pathlib import Path

from llmb.checkpoints.checkpoint import CheckpointRecord, model_differences, read_checkpoint, read_checkpoint_record
from llmb.checkpoints.origin import WeightsOrigin, identity_of
from llmb.errors import UsageError, itemized
from llmb.runs.plan import Plan


def loads_weights(plan: Plan) -> bool:
    """Whether the run reads ``plan.weights``: adapters are resumed beside them, and everything else instead of them."""
    return plan.weights is not None and (plan.start is None or plan.lora is not None)


def check_weights(plan: Plan) -> None:
    """Raises UsageError if the weights that ``plan`` starts with are missing or incomplete, or do not fit the run."""
    if plan.weights is not None and loads_weights(plan):
        checkpoint = read_checkpoint(Path(plan.weights.path))
        if problems := list(weights_problems(plan, checkpoint.record)):
            raise UsageError(f"a run cannot start with these weights:{itemized(problems)}", where=plan.weights.path)
    if plan.lora and plan.start:
        recorded, given = read_checkpoint_record(Path(plan.start.path)).base, base_weights(plan)
        if recorded and given and (problem := base_problem(recorded, given)):
            raise UsageError(problem, where=plan.start.path, do="give the weights that the adapters were trained with")


def weights_problems(plan: Plan, record: CheckpointRecord) -> Iterator[str]:
    """Why the weights of a checkpoint cannot be those of the plan's model. Pure."""
    if record.lora:
        yield "the checkpoint contains only adapters; 'llmb checkpoint export --merge' merges them into their base"
    for difference in model_differences(plan.recipe.model, record.model):
        yield f"the checkpoint is of another model: {difference}"


def base_weights(plan: Plan) -> WeightsOrigin | None:
    """The frozen weights of a run with adapters; None for a run that trains all weights.

    Raises UsageError if the checkpoint cannot be read.
    """
    if plan.lora is None:
        return None
    if plan.weights is None:
        return WeightsOrigin(kind="random")
    record = read_checkpoint_record(Path(plan.weights.path))
    path, name = plan.weights.path, plan.weights.name
    return WeightsOrigin(kind="checkpoint", path=path, name=name, identity=identity_of(record.crc32))


def base_problem(recorded: WeightsOrigin, given: WeightsOrigin) -> str | None:
    """Why adapters of ``recorded`` weights cannot be used with ``given`` ones; None if they can. Pure."""
    belong = f"these adapters belong to {base_text(recorded)}"
    if recorded.kind != given.kind:
        return f"{belong}, but the run has {base_text(given)}"
    if recorded.identity and given.identity and recorded.identity != given.identity:
        return f"{belong} with the identity {recorded.identity}, but those in {given.path} have {given.identity}"
    return None


def base_text(base: WeightsOrigin) -> str:
    return "random weights" if base.path is None else f"the weights of {base.name} in {base.path}"
