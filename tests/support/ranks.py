# SPDX-License-Identifier: Apache-2.0
"""What programs of ranks have in common: ``run_ranks`` starts one for each rank, which is the last argument."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.engine.parallel.rendezvous import gloo_backend
from llmb.runs.plan import EnginePlan

CPU = torch.device("cpu")


def run(program: Callable[..., None]) -> None:
    """Calls ``program`` with the arguments of this process, whose types its parameters say, and ends the process."""
    warnings.simplefilter("ignore")
    types = [parameter.annotation for parameter in signature(program).parameters.values()]
    program(*(make(argument) for make, argument in zip(types, sys.argv[1:], strict=True)))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends by itself


@contextmanager
def joined(folder: Path, rank: int, world_size: int, store: str = "store") -> Iterator[None]:
    """Within, this rank is connected with the others by gloo; ``folder`` has room for the rendezvous."""
    init_method = f"file://{folder}/{store}"
    dist.init_process_group(gloo_backend(), rank=rank, world_size=world_size, init_method=init_method)
    yield
    dist.barrier()
    dist.destroy_process_group()


def plan_in(folder: Path) -> EnginePlan:
    return EnginePlan.model_validate_json((folder / "plan.json").read_text())


def ranks_of(plan: EnginePlan, rank: int = 0, device: torch.device = CPU, *, experts: bool = True) -> Ranks:
    layout = plan.recipe.layout
    return arrange(rank, device, layout, plan.parallelism.replicas(layout), experts=experts)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
