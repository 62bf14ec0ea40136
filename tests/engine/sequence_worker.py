# SPDX-License-Identifier: Apache-2.0
"""One of two tensor-parallel ranks with a shard of the sequence each: what a block keeps, and what it communicates.

Arguments: folder with plans.json and room for the rendezvous, rank. The first rank prints, as JSON, for each plan how
many elements each tensor has that the block keeps for its backward pass, and how often this rank gathered, and reduced
and scattered, in the forward and in the backward pass.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from llmb.engine import transformations
from llmb.engine.compile import apply_compile
from llmb.engine.data.batches import rank_samples
from llmb.engine.loop import prepare_stages
from llmb.engine.lora import token_keys
from llmb.engine.model.rotary import rotary_tables
from llmb.engine.parallel.data_parallel import compute_dtype
from llmb.engine.parallel.gloo import gloo_backend
from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.engine.precision.step import fp8_step
from llmb.runs.plan import EnginePlan

CPU = torch.device("cpu")


def traffic(action: Callable[[], Tensor | None]) -> tuple[Tensor | None, list[int]]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = action()
    calls = {event.key: event.count for event in profiled.key_averages()}
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    return result, [calls.get(f"_c10d_functional::{name}", 0) for name in names]


def passes(plan: EnginePlan, ranks: Ranks) -> dict[str, object]:
    layout, hidden_size = plan.recipe.layout, plan.recipe.model.hidden_size
    (stage,) = prepare_stages(plan, ranks)
    positions = torch.arange(layout.seq_len)
    if (keys := token_keys(stage)) is not None:
        (samples, *_) = rank_samples(layout, 0, 0)
        keys.set(samples, positions, layout.seq_len)
    shape = layout.mbs, layout.seq_len // layout.tp, hidden_size
    hidden = torch.randn(shape, dtype=compute_dtype(plan.recipe.dtype), requires_grad=True)
    rotary, kept = rotary_tables(plan.recipe.model, positions), list[int]()

    def forward() -> Tensor:
        with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
            return stage.layers["0"](hidden, rotary)

    with fp8_step([stage], 0):
        forward().sum().backward()  # compiles
        kept.clear()
        output, of_forward = traffic(forward)
        _, of_backward = traffic(output.sum().backward)
    return {"kept": kept, "forward": of_forward, "backward": of_backward}


def main(folder: Path, rank: int) -> None:
    plans = [EnginePlan(**fields) for fields in json.loads((folder / "plans.json").read_text())]
    dist.init_process_group(gloo_backend(), rank=rank, world_size=2, init_method=f"file://{folder}/store")
    found = []
    for plan in plans:
        layout = plan.recipe.layout
        found.append(passes(plan, arrange(rank, CPU, layout, plan.parallelism.replicas(layout))))
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


warnings.simplefilter("ignore")
transformations.apply_compile = partial(apply_compile, backend="aot_eager")
main(Path(sys.argv[1]), int(sys.argv[2]))
