# SPDX-License-Identifier: Apache-2.0
"""One rank that trains as plans say, one after the other, and writes what it found.

Arguments: folder with plans.json and room for the rendezvous, number of ranks, compiler, "late" for collectives that
complete when they are waited for or "soon", with " fused" for torch's fused operators, rank. For the plan number N the
first rank writes N.pt, with losses, gradient norms and counts of every step, the first and the last step's gradients,
and the last scales.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fused_operators import calls, use_fused_operators
from late_collectives import Late, make_collectives_late
from layout_values import gradients, mean_loss
from ranks import joined, ranks_of, run

from llmb.engine import transformations
from llmb.engine.attention_backend import attention_kernel, choose_attention
from llmb.engine.checkpoint.load import load_checkpoint
from llmb.engine.checkpoint.save import Saver
from llmb.engine.data.batches import RankData, rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import add_gradients, update
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.exchange import TrainedStage, await_updates
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.precision.apply import fp8_counts, scale_state
from llmb.engine.stages import prepare_stages
from llmb.engine.transformations import apply_compile
from llmb.runs.folder import RunFolder
from llmb.runs.plan import EnginePlan


def train(plan: EnginePlan, ranks: Ranks, folder: Path) -> dict[str, Any]:
    stages = prepare_stages(plan, ranks)
    backend = choose_attention([stage.model for stage in stages], plan, ranks).backend
    source = rank_data(build_data(plan), plan, ranks, varlen=backend == "varlen")
    with attention_kernel(backend):
        return train_stages(stages, source, ranks, folder)


def train_stages(stages: list[TrainedStage], source: RankData, ranks: Ranks, folder: Path) -> dict[str, Any]:
    plan = source.plan
    passes = build_passes(stages, plan, ranks)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    if plan.start:
        load_checkpoint(Path(plan.start.path), stages, optimizers, ranks)
    folder.mkdir(exist_ok=True)
    saver = Saver(plan, RunFolder(folder), ranks, stages, optimizers)
    first: dict[str, torch.Tensor] = {}
    losses, norms, counts = [], [], []
    for number in range(plan.first_step, plan.last_step + 1):
        losses.append(mean_loss(add_gradients(passes, plan, source.step(number), number, ranks)))
        if number in (plan.first_step, plan.last_step):
            last = {name: gradient.clone() for name, gradient in gradients(stages).items()}
            first = first or last
        norms.append(update(stages, optimizers, plan.recipe.training, number).item())
        of_step = fp8_counts(plan, [stage.model for stage in stages], ranks)
        counts += [] if of_step is None else [of_step.int().tolist()]
        saver.after_step(number)
    for stage in stages:
        await_updates(stage.buckets)
    saver.finish()
    scales = {name: tensor.clone() for stage in stages for name, tensor in scale_state(stage.model).items()}
    found = everybody({"gradients": first, "last_gradients": last, "scales": scales}, ranks)
    return {"losses": losses, "norms": norms, "counts": counts, **found}


def everybody(found: dict[str, dict[str, Any]], ranks: Ranks) -> dict[str, dict[str, Any]]:
    """What the ranks found together: pipeline ranks hold different layers, and others have to agree on the scales."""
    gathered: list[dict[str, dict[str, Any]]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(gathered, found)
    for name, scale in found["scales"].items():
        assert all(torch.equal(each["scales"].get(name, scale), scale) for each in gathered), name
    return {kind: {name: value for each in gathered for name, value in each[kind].items()} for kind in found}


def main(folder: Path, world_size: int, compiler: str, late: str, rank: int) -> None:
    transformations.apply_compile = lambda stage, _backend: apply_compile(stage, compiler)
    library = use_fused_operators() if "fused" in late else None
    if "late" in late:
        make_collectives_late()
    plans = [EnginePlan(**fields) for fields in json.loads((folder / "plans.json").read_text())]
    with joined(folder, rank, world_size):
        for number, plan in enumerate(plans):
            calls.clear()
            found = train(plan, ranks_of(plan, rank), folder / str(number))
            assert bool(calls) == ("fused" in late and plan.communication == "fused")
            if rank == 0:
                torch.save(found, folder / f"{number}.pt")
        dist.barrier()
        assert [each.name for each in Late.unfinished.values()] == [], "nobody waits for these"
    del library


run(main)
