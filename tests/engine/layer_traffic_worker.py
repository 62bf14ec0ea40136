# SPDX-License-Identifier: Apache-2.0
"""Prints how many times its hidden state, in bf16, the code of a compiled layer for a GPU reads and writes.

Arguments: workload, dtype. Only this process pretends to have a GPU: see ``support/pretended``.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.runs.choices import Choices
from llmb.runs.plan import EnginePlan, make_plan

sys.path.append(str(Path(__file__).parents[1] / "support" / "pretended"))
from generated_graphs import generating, moved_bytes
from pretended_torch import GPU, fake_tensors, on_the_host, pretend_gpu

TOKENS = 1024


def planned(workload: str, dtype: str) -> EnginePlan:
    overrides = Overrides(seq_len=TOKENS, mbs=1, gbs=1)
    request = Request(workload=workload, size="tiny", dtype=dtype, gpu_type="cpu", scale=1, overrides=overrides)
    return make_plan(resolve(Catalogue(), request), Choices(steps=1, window="all"), device="cuda")


def passes(plan: EnginePlan) -> float:
    from llmb.engine.parallel.mesh import arrange
    from llmb.engine.stages import (
        give_memory,  # only now: the engine looks for a GPU when it is imported
        shape_stages,
    )

    layout, graphs = plan.recipe.layout, []
    ranks = arrange(0, GPU, layout, plan.parallelism.replicas(layout))
    with generating(lambda lowering: graphs.append(moved_bytes(lowering))), fake_tensors() as mode:
        with on_the_host(mode):
            (stage,) = shape_stages(plan, ranks)
            give_memory([stage], plan, ranks)
        size = 1, TOKENS, plan.recipe.model.hidden_size
        hidden = torch.empty(size, dtype=torch.bfloat16, device=GPU, requires_grad=True)
        rotary = stage.rotary(torch.empty(TOKENS, dtype=torch.int64, device=GPU))
        stage.block("0")(hidden, rotary).sum().backward()
    forward, backward = graphs
    return (forward + backward) / hidden.nbytes


if __name__ == "__main__":
    library = pretend_gpu("NVIDIA H200", 10**11, 60 * 2**20)
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    sys.stdout.write(f"{passes(planned(*sys.argv[1:])):.1f}\n")
