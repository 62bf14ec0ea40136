# SPDX-License-Identifier: Apache-2.0
"""One rank of a layout: trains as a plan says, and compares with what one process did.

Arguments: folder with case.json (a plan, and the file of its reference) and room for the rendezvous, rank. The first
rank prints, as JSON, how far the worst initial value, gradient, loss and gradient norm lie apart.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layout_values import error, gradients, mean_loss, spread
from ranks import joined, ranks_of, run, whole
from torch import Tensor

from llmb.engine import transformations
from llmb.engine.attention_backend import varlen_problem
from llmb.engine.data.batches import rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import add_gradients, update
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import prepare_stages
from llmb.engine.transformations import apply_compile
from llmb.runs.plan import EnginePlan


def compare(plan: EnginePlan, ranks: Ranks, expected: dict[str, Any]) -> dict[str, float]:
    """The keys tell what each figure is of."""
    stages = prepare_stages(plan, ranks)
    for stage in stages:
        spread(stage.model)
        if stage.model.lm_head is not None:
            stage.model.lm_head.smallest_bytes = 0  # cuts logits into pieces, as large ones are
    found = differences("value", stages, expected["values"])
    passes = build_passes(stages, plan, ranks)
    source = rank_data(build_data(plan), plan, ranks, varlen=varlen_problem(plan) is None)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    for number in range(plan.steps):
        loss = add_gradients(passes, plan, source.step(number), number, ranks)
        assert (loss is None) == (stages[-1].model.lm_head is None)
        if number == 0:
            found |= differences("gradient", stages, expected["gradients"])
        norm = update(stages, optimizers, plan.recipe.training, number).item()
        found[f"loss of step {number}"] = abs(mean_loss(loss) - expected["losses"][number])
        found[f"{'later ' if number else ''}norm of step {number}"] = abs(norm / expected["norms"][number] - 1)
    return everybody(found, ranks)


def differences(kind: str, stages: list[TrainedStage], expected: dict[str, Tensor]) -> dict[str, float]:
    parameters = [item for stage in stages for item in stage.model.named_parameters()]
    values = {name: whole(parameter.detach()) for name, parameter in parameters}
    ours = gradients(stages) if kind == "gradient" else values
    assert kind == "value" or ours.keys() <= expected.keys()
    return {f"{kind} of {name}": error(tensor, expected[name]) for name, tensor in ours.items()}


def everybody(found: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """The largest that any rank found: pipeline ranks hold different parameters, or both ends of them a tied one."""
    gathered: list[dict[str, float]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(gathered, found)
    names = {name for each in gathered for name in each}
    return {name: max(each[name] for each in gathered if name in each) for name in sorted(names)}


def main(folder: Path, rank: int) -> None:
    case = json.loads((folder / "case.json").read_text())
    plan = EnginePlan(**case["plan"])
    with joined(folder, rank, plan.recipe.layout.gpus):
        found = compare(plan, ranks_of(plan, rank), torch.load(case["reference"], weights_only=True))
        if rank == 0:
            print(json.dumps(found))


# The same graphs as compiled code without the minutes that it takes to make it.
transformations.apply_compile = lambda stage, _backend: apply_compile(stage, "aot_eager")
run(main)
