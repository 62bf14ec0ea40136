# SPDX-License-Identifier: Apache-2.0
"""One rank that compares attention and kernels before it trains, as a run does, where those of one rank are broken.

Arguments: folder with plan.json and room for the rendezvous, the rank with broken ones, rank. Prints the report of
attention, the results of kernels, and why the run ends, as JSON.
"""

import json
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from ranks import joined, plan_in, ranks_of, run
from torch import Tensor

from llmb.base.errors import EnvironmentProblem
from llmb.engine import kernel_check
from llmb.engine.attention_backend import choose_attention
from llmb.engine.kernel_check import compare_kernels, refuse_wrong
from llmb.engine.kernels import elementwise, span_attention
from llmb.engine.kernels.elementwise import cast_both_ways
from llmb.engine.stages import prepare_stages


def break_kernels() -> None:
    """They lose the keys' gradients of every fourth token, and every fourth row of a cast."""
    usual = span_attention.KERNELS["cpu-flash"]

    def lossy_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        to_query, to_key, to_value = usual.backward(*tensors, **options)
        return to_query, to_key * (torch.arange(to_key.shape[2]) % 4 < 3)[:, None], to_value

    def lossy_cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        return cast_both_ways(values * (torch.arange(len(values)) % 4 < 3)[:, None], scale, dtype)

    span_attention.KERNELS = MappingProxyType({"cpu-flash": usual._replace(backward=lossy_backward)})
    kernel_check.elementwise.cast_both_ways = lossy_cast


def main(folder: Path, broken: int, rank: int) -> None:
    plan = plan_in(folder)
    with joined(folder, rank, plan.recipe.layout.gpus):
        ranks = ranks_of(plan, rank)
        kernel_check.elementwise = SimpleNamespace(**vars(elementwise) | {"has_kernel": lambda _tensor: True})
        if rank == broken:
            break_kernels()
        report = choose_attention([stage.model for stage in prepare_stages(plan, ranks)], plan, ranks)
        kernels = compare_kernels(plan, ranks)
        problem = None
        try:
            refuse_wrong(kernels, "12.8.93")
        except EnvironmentProblem as error:
            problem = str(error)
        print(
            json.dumps(
                {
                    "attention": report.model_dump(),
                    "kernels": [each.model_dump() for each in kernels],
                    "problem": problem,
                }
            )
        )


run(main)
