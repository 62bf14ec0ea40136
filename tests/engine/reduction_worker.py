# SPDX-License-Identifier: Apache-2.0
"""One of two ranks that compute in bf16: compares summed gradients with sums made by hand.

Arguments: folder with plans.json and room for the rendezvous, rank. The first rank prints, as JSON, for each plan the
relative error against the sum in fp32, whether every element is a bf16 number, how often this rank gathered,
reduced and scattered, and reduced, and how many of its own reductions began before the last product.
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from layout_values import gradients
from ranks import joined, ranks_of, run
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from llmb.engine.attention_backend import attention_kernel
from llmb.engine.data.batches import rank_data, rank_samples
from llmb.engine.data.build import build_data
from llmb.engine.loop import add_gradients
from llmb.engine.model.decoder import build_model
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import prepare_stages
from llmb.runs.plan import EnginePlan

TRAFFIC = (
    ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor_out"),
    ("c10d::_reduce_scatter_base_", "_c10d_functional::reduce_scatter_tensor"),
    ("c10d::allreduce_", "_c10d_functional::all_reduce_"),
)
"""Collectives by the names that a profile has for them: as FSDP calls them, as the engine does, or both."""
REDUCTIONS = [names[1] for names in TRAFFIC[1:]]
PRODUCTS = ("aten::mm", "aten::addmm_")


def summed(plan: EnginePlan) -> dict[str, Tensor]:
    """Mean over all ranks and micro-batches of the gradients that a bf16 model has, in fp64."""
    layout = plan.recipe.layout
    data = build_data(plan)
    model = build_model(plan.recipe.model)
    TrainedStage(model).initialize(plan.seed)
    model.to(torch.bfloat16)
    sums = {name: torch.zeros(parameter.shape, dtype=torch.float64) for name, parameter in model.named_parameters()}
    for rank in range(layout.dp):
        for numbers in rank_samples(layout, 0, rank):
            batch = data.micro_batch(numbers)
            loss = model(batch.tokens, batch.labels)
            (loss / layout.ga).backward()
            for name, parameter in model.named_parameters():
                sums[name] += parameter.grad.double()
                parameter.grad = None
    return {name: total / layout.dp for name, total in sums.items()}


def compare(plan: EnginePlan, ranks: Ranks) -> dict[str, object]:
    source = rank_data(build_data(plan), plan, ranks, varlen=False)
    stages = prepare_stages(plan, ranks)
    passes = build_passes(stages, plan, ranks)
    # Equal but for the sums: a CPU's fused kernel gives the last bit of a bf16 gradient by where its memory is.
    with attention_kernel("math"):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            add_gradients(passes, plan, source.step(0), 0, ranks)
        expected = summed(plan)
    calls = {event.key: event.count for event in profiled.key_averages()}
    worst, all_bf16 = 0.0, True
    for name, gradient in gradients(stages).items():
        worst = max(worst, float((gradient - expected[name]).norm() / expected[name].norm()))
        all_bf16 &= torch.equal(gradient, gradient.bfloat16().float())
    gathered: list[tuple[float, bool]] = [(0.0, True)] * ranks.world_size
    dist.all_gather_object(gathered, (worst, all_bf16))  # pipeline ranks hold different parameters
    errors, flags = zip(*gathered, strict=True)
    traffic = [max(calls.get(name, 0) for name in names) for names in TRAFFIC]
    return {"error": max(errors), "all_bf16": all(flags), "traffic": traffic, "early": early_reductions(profiled)}


def early_reductions(profiled: profile) -> int:
    events = profiled.events()
    last_product = max(event.time_range.start for event in events if event.name in PRODUCTS)
    return sum(event.name in REDUCTIONS and event.time_range.start < last_product for event in events)


def main(folder: Path, rank: int) -> None:
    plans = [EnginePlan(**fields) for fields in json.loads((folder / "plans.json").read_text())]
    with joined(folder, rank, 2):
        found = [compare(plan, ranks_of(plan, rank)) for plan in plans]
        if rank == 0:
            print(json.dumps(found))


run(main)
