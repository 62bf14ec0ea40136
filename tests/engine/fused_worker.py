# SPDX-License-Identifier: Apache-2.0
"""One rank that multiplies by fused operators and by separate ones; on a CPU the former are torch's references.

Arguments: folder with plan.json and room for the rendezvous, device, number of ranks, rank. The first rank prints, as
JSON, the operators that the check of a run's start called, why it refuses them, why it refuses wrong ones, and the
largest difference of products of sequences that are not contiguous, relative to the largest value.
"""

import json
from pathlib import Path

import fused_operators
import torch
import torch.distributed as dist
from ranks import joined, plan_in, run

from llmb.engine.collectives import Group
from llmb.engine.model import linear
from llmb.engine.parallel.symmetric_memory import why_not_fused
from llmb.engine.precision import fp8_layers
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT, Scaled

BATCH, SEQ, INPUTS, OUTPUTS = 2, 64, 128, 96


def largest_difference(group: Group, device: torch.device) -> float:
    torch.manual_seed(group.rank)
    shard = torch.randn(SEQ, BATCH, INPUTS, device=device, dtype=torch.bfloat16).transpose(0, 1)
    matrices = [torch.randn(OUTPUTS, INPUTS, device=device, dtype=torch.bfloat16).t() for _ in range(2)]
    one = torch.full((), 0.5, device=device)
    kind = fp8_layers.ProductKind(True, "fp8", None, None, None, BATCH, False, ())
    right = Scaled(matrices[0].t().contiguous().to(FORMATS[WEIGHT]), one).mT

    def found(way: Group) -> list[torch.Tensor]:
        whole, products = linear.gather_multiply(shard, matrices, way, keeps=True)
        tensors = [whole, *products, linear.multiply_scatter(whole, matrices[0], way)]
        for dtype in (FORMATS[INPUT], FORMATS[GRADIENT]):
            left = Scaled(shard.flatten(0, 1).to(dtype), one)
            rows, product = fp8_layers.gather_multiply(left, right, kind, way, fast=dtype is FORMATS[INPUT])
            tensors += [rows, product, fp8_layers.multiply_scatter(Scaled(rows, one), right, kind, way)]
        return [tensor.float() for tensor in tensors]

    pairs = zip(*(found(group._replace(fused=fused)) for fused in (True, False)), strict=True)
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)


def main(folder: Path, device: str, size: int, rank: int) -> None:
    plan, place = plan_in(folder), torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
        dist.init_process_group(
            "nccl", rank=rank, world_size=size, init_method=f"file://{folder}/store", device_id=place
        )
        print(json.dumps(outcome(plan, Group(dist.group.WORLD.group_name, size, rank), place)))
        return
    library = fused_operators.use_fused_operators()
    with joined(folder, rank, size):
        print(json.dumps(outcome(plan, Group(dist.group.WORLD.group_name, size, rank), place)))
    del library


def outcome(plan, group: Group, device: torch.device) -> dict[str, object]:
    refused = why_not_fused(plan, group, device)
    calls = list(fused_operators.calls)
    difference = largest_difference(group, device)
    right = linear.multiply_scatter
    linear.multiply_scatter = lambda hidden, matrix, way: (2 if way.fused else 1) * right(hidden, matrix, way)
    return {"refused": refused, "calls": calls, "difference": difference, "wrong": why_not_fused(plan, group, device)}


run(main)
