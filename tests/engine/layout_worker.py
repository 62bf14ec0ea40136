# SPDX-License-Identifier: Apache-2.0
"""One rank of a layout: compares its model with one on a single process, parameter by parameter.

Arguments: folder with cases.json (plans) and room for the rendezvous, rank. The first
rank prints, as JSON, for each case the relative error of each initial value and gradient and of the loss.
"""

import hashlib
import json
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from llmb.catalogue.records import Layout
from llmb.engine import loop
from llmb.engine.compile import apply_compile
from llmb.engine.data.synthetic import SyntheticData, micro_batches
from llmb.engine.loop import build_data, build_passes, mean_count, prepare_stages
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.model.initialise import initialise
from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.runs.plan import Plan

CPU = torch.device("cpu")


@torch.no_grad()
def spread(model: Decoder) -> None:
    """Moves norms away from the identity, where some mistakes would not show."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            continue
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
        values = 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(values, mesh, placements, src_data_rank=None).to_local()
            parameter.to_local().add_(values)
        else:
            parameter.add_(values)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(ours: Tensor, theirs: Tensor) -> float:
    """Relative; an expert without tokens has a gradient of zero."""
    size = float(theirs.norm())
    return float((ours - theirs).norm()) / (size or 1.0)


def reference(plan: Plan, data: SyntheticData) -> tuple[Decoder, Tensor]:
    model = build_model(plan.recipe.model)
    initialise(model, plan.recipe.model, plan.seed)
    spread(model)
    tokens, labels, starts = data.micro_batch(range(plan.recipe.layout.gbs))
    loss = model(tokens, labels, starts=starts)
    loss.backward()
    return model, loss.detach()


def errors(plan: Plan, ranks: Ranks) -> dict[str, float]:
    layout: Layout = plan.recipe.layout
    data = replace(build_data(plan), distribution="uniform")
    stages = prepare_stages(plan, ranks)
    for stage in stages:
        spread(stage)
    passes = build_passes(stages, plan, ranks)
    count = mean_count(data, layout, 0, ranks)
    loss = passes.add_gradients(micro_batches(data, layout, 0, ranks.dp_rank, CPU), count)
    model, their_loss = reference(plan, data)
    theirs = dict(model.named_parameters())
    found = {}
    for name, ours in [item for stage in stages for item in stage.named_parameters()]:
        found[f"value of {name}"] = error(whole(ours.detach()), theirs[name].detach())
        found[f"gradient of {name}"] = error(whole(ours.grad), theirs[name].grad)
    losses = torch.tensor([0.0, 0.0] if loss is None else [1.0, loss.item()], dtype=torch.float64)
    dist.all_reduce(losses)
    found["loss"] = error(losses[1] / losses[0], their_loss)
    assert (loss is None) == (stages[-1].lm_head is None)
    return everybody(found, ranks)


def everybody(found: dict[str, float], ranks: Ranks) -> dict[str, float]:
    """What the ranks found together: pipeline ranks hold different parameters."""
    gathered: list[dict[str, float]] = [{} for _ in range(ranks.world_size)]
    dist.all_gather_object(gathered, found)
    return {name: value for each in gathered for name, value in each.items()}


def main(folder: Path, rank: int) -> None:
    plans = [Plan(**fields) for fields in json.loads((folder / "cases.json").read_text())]
    layout = plans[0].recipe.layout
    dist.init_process_group("gloo", rank=rank, world_size=layout.gpus, init_method=f"file://{folder}/store")
    ranks = arrange(rank, CPU, layout)
    found = [errors(plan, ranks) for plan in plans]
    if ranks.is_first:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


warnings.simplefilter("ignore")
# The same graphs as compiled code without the minutes that it takes to make it.
loop.apply_compile = partial(apply_compile, backend="aot_eager")
main(Path(sys.argv[1]), int(sys.argv[2]))
