# SPDX-License-Identifier: Apache-2.0
"""One of two tensor-parallel ranks with a shard of the sequence each: what a block keeps, and what it communicates.

Arguments: folder with plans.json and room for the rendezvous, rank. The first rank prints, as JSON, for each plan how
many elements each tensor has that the block keeps for its backward pass; how often this rank gathered, and reduced and
scattered, in the forward and in the backward pass; and the largest relative difference of results and gradients from
those of a block that gathers its layers' inputs before them.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from layout_values import error
from ranks import joined, ranks_of, run
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from llmb.engine.collectives import all_gather
from llmb.engine.data.batches import rank_samples
from llmb.engine.model.adapter import Dropout
from llmb.engine.model.attention import Attention, rotary_tables
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.layers import GatedMLP
from llmb.engine.model.linear import Linear, local_tensor
from llmb.engine.parallel.data_parallel import compute_dtype
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.precision.apply import fp8_step
from llmb.engine.stages import prepare_stages
from llmb.engine.transformations import token_keys
from llmb.runs.plan import EnginePlan


def traffic(action: Callable[[], Tensor | None]) -> tuple[Tensor | None, list[int]]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        result = action()
    calls = {event.key: event.count for event in profiled.key_averages()}
    names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    return result, [calls.get(f"_c10d_functional::{name}", 0) for name in names]


def passes(plan: EnginePlan, ranks: Ranks) -> dict[str, object]:
    layout, hidden_size = plan.recipe.layout, plan.recipe.model.hidden_size
    (stage,) = prepare_stages(plan, ranks, "aot_eager")
    positions = torch.arange(layout.seq_len)
    if (keys := token_keys(stage.model)) is not None:
        (samples, *_) = rank_samples(layout, 0, 0)
        keys.set(samples, positions, layout.seq_len)
    shape = layout.mbs, layout.seq_len // layout.tp, hidden_size
    torch.manual_seed(ranks.rank)
    hidden = torch.randn(shape, dtype=compute_dtype(plan.recipe.dtype), requires_grad=True)
    rotary, kept = rotary_tables(plan.recipe.model, positions), list[int]()

    def forward() -> Tensor:
        with saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
            output = stage.model.layers["0"](hidden, rotary)
        # Compiled code keeps some tensors without telling.
        kept.extend(tensor.numel() for tensor in getattr(output.grad_fn, "_tensors_no_vc_check", None) or ())
        return output

    with fp8_step([stage], 0):
        forward().sum().backward()  # compiles
        kept.clear()
        clear(stage, hidden)
        output, of_forward = traffic(forward)
        _, of_backward = traffic(output.sum().backward)
        found = taken(stage, hidden, output)
        gather_before(stage.model)
        output = stage.model.layers["0"].compute(hidden, rotary, None)
        output.sum().backward()
        expected = taken(stage, hidden, output)
    worst = max(error(found[name], expected[name]) for name in expected)
    return {"kept": kept, "forward": of_forward, "backward": of_backward, "error": worst}


def clear(stage: TrainedStage, hidden: Tensor) -> None:
    for tensor in (hidden, *stage.model.parameters()):
        tensor.grad = None
    for sums in stage.gradient_sums:
        sums.is_empty.fill_(True)


def taken(stage: TrainedStage, hidden: Tensor, output: Tensor) -> dict[str, Tensor]:
    """The output and all gradients, which are then cleared."""
    for each in stage.gradient_sums:
        each.give()
    tensors = {"hidden": hidden, **dict(stage.model.named_parameters())}
    gradients = {name: local_tensor(each.grad) for name, each in tensors.items() if each.grad is not None}
    found = {name: gradient.clone() for name, gradient in {**gradients, "output": output.detach()}.items()}
    clear(stage, hidden)
    return found


def gather_before(stage: Decoder) -> None:
    for module in stage.modules():
        if isinstance(module, Attention | GatedMLP):
            group = module.q_proj.group if isinstance(module, Attention) else module.gate_proj.group
            module.register_forward_pre_hook(lambda _, given, group=group: (all_gather(given[0], 1, group), *given[1:]))
    for module in stage.modules():
        if isinstance(module, Linear | Dropout):
            module.group = None


def main(folder: Path, rank: int) -> None:
    plans = [EnginePlan(**fields) for fields in json.loads((folder / "plans.json").read_text())]
    with joined(folder, rank, 2):
        found = [passes(plan, ranks_of(plan, rank)) for plan in plans]
        if rank == 0:
            print(json.dumps(found))


run(main)
