# SPDX-License-Identifier: Apache-2.0
"""Plans a run of the engine: with the checkpoint that it resumes from, and the prepared files that it starts from."""

from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Recipe
from llmb.catalogue.resolve import CPU
from llmb.checkpoints.checkpoint import read_checkpoint
from llmb.checkpoints.origin import OriginHere
from llmb.errors import UsageError
from llmb.runs.choices import Choices
from llmb.runs.device import Device
from llmb.runs.find_inputs import search_inputs
from llmb.runs.initial_weights import check_weights
from llmb.runs.plan import EnginePlan, make_plan


class NotPrepared(UsageError):
    """The run's weights or data are not prepared. ``plan`` is the plan for when they are."""

    def __init__(self, error: UsageError, plan: EnginePlan) -> None:
        super().__init__(error.what, do=error.do)
        self.plan = plan

    @property
    def warning(self) -> str:
        """For a dry run, which shows the plan all the same."""
        return f"the run would be refused: {self.what}"


def origin_here(catalogue: Catalogue, install: Path, recipe: Recipe) -> OriginHere:
    """What a run of ``recipe`` without further options starts from."""
    search = search_inputs(catalogue, install, recipe, Choices())
    origin = search.origin(search.inputs(None))
    try:
        search.raise_problems()
    except UsageError as error:
        return OriginHere(origin=origin, problem=error.what)
    missing = search.not_prepared()
    return OriginHere(origin=origin, problem=missing.what if missing else None)


def plan_training(catalogue: Catalogue, recipe: Recipe, choices: Choices, install: Path) -> EnginePlan:
    """Prepared files are below ``install``. Raises UsageError with everything that is wrong, else NotPrepared."""
    checkpoint = read_checkpoint(Path(choices.load_checkpoint)) if choices.load_checkpoint else None
    search = search_inputs(catalogue, install, recipe, choices)
    inputs = search.inputs(checkpoint)
    device: Device = "cpu" if recipe.gpu_type == CPU else "cuda"
    plan = make_plan(recipe, choices, device=device, checkpoint=checkpoint, inputs=inputs)
    search.raise_problems()
    if missing := search.not_prepared():
        raise NotPrepared(missing, search.once_prepared(plan))
    check_weights(plan)
    return plan
