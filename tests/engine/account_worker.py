# SPDX-License-Identifier: Apache-2.0
"""What one rank of a layout takes in a step: one that really trains, or one among fake ones.

Arguments: folder with plan.json and room for the rendezvous; ``real``, ``allocated``, ``pretended`` or ``fake``; rank.
Prints, as JSON, the account, the collectives in order with the members of their groups and, for ``allocated``, what the
allocator was asked for.
"""

import gc
import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import joined, plan_in, ranks_of, run
from torch import Tensor

from llmb.engine.account.graphs import group_of
from llmb.engine.account.one_rank import Ledger, SameBatches, account_of, fake_account
from llmb.engine.loop import do_step
from llmb.engine.model.linear import local_tensor
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.alone import pretend_others
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import give_memory, prepare_stages, shape_stages
from llmb.runs.plan import EnginePlan, pretending


def allocated_at_peak(plan: EnginePlan, ranks: Ranks) -> int:
    """Bytes, of torch's own record of every allocation in a second step; no mode sees the operators."""
    stages = prepare_stages(plan, ranks)
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    layout = plan.recipe.layout
    source = SameBatches(layout, ranks.device)
    for number in range(2):
        passes = build_passes(stages, plan, ranks)
        gc.collect()
        before = live_bytes()
        with torch.profiler.profile(profile_memory=True) as profile:
            do_step(number, plan, passes, optimizers, source, ranks)
    events = profile.profiler.kineto_results.events()
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    return before + max(accumulate(size for _, size in changes))


def live_bytes() -> int:
    storages = {}
    for each in gc.get_objects():
        if isinstance(each, Tensor):
            storage = local_tensor(each.detach()).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sequence(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        each._asdict() | {"members": dist.get_process_group_ranks(group_of(each.group))} for each in ledger.collectives
    ]


def fake(plan: EnginePlan, rank: int) -> dict[str, Any]:
    account, ledger = fake_account(plan, rank)
    return {"account": account.model_dump(), "sequence": sequence(ledger)}


def real(plan: EnginePlan, ranks: Ranks, *, allocates: bool) -> dict[str, Any]:
    allocated = allocated_at_peak(plan, ranks) if allocates else None
    gc.collect()
    ledger = Ledger(fuses=False)
    stages = shape_stages(plan, ranks)
    with ledger:
        trained = give_memory(stages, plan, ranks)
        for stage in trained:
            stage.initialize(plan.seed)
        ledger.follow(stages)
        account = account_of(plan, trained, ranks, ledger, extends=False)
    return {"account": account.model_dump(), "sequence": sequence(ledger), "allocated": allocated}


def main(folder: Path, way: str, rank: int) -> None:
    plan = plan_in(folder)
    if way == "fake":
        found = fake(plan, rank)
    elif way == "pretended":
        alone = plan.model_copy(update={"recipe": pretending(plan.recipe, rank)})
        found = real(alone, pretend_others(alone), allocates=False)
    else:
        with joined(folder, rank, plan.recipe.layout.gpus):
            ranks = ranks_of(plan, rank, experts=plan.recipe.model.moe is not None)
            found = real(plan, ranks, allocates=way == "allocated")
    print(json.dumps(found))


run(main)
