# SPDX-License-Identifier: Apache-2.0
"""torch's symmetric memory, in which a host's GPUs read each other's memory: the workspace of fused operators."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from llmb.base.errors import EnvironmentProblem
from llmb.engine.collectives import Group, group_of
from llmb.engine.model import linear
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.engine.precision import fp8_layers
from llmb.engine.precision.scaling import FORMATS, INPUT, WEIGHT, Scaled
from llmb.engine.torch_names import FUSED, check_names
from llmb.readers.samples.host import host_name
from llmb.runs.plan import EnginePlan

TRIED = 256
"""Number of rows, inputs and outputs of a rank's products that are tried before the first step."""
TOLERANCE = 0.02
"""The largest permitted difference of a result, relative to the sum of its expected value and the largest one."""


def prepare_fused_products(plan: EnginePlan, ranks: Ranks) -> None:
    """Allocate the workspace of fused operators and try them, if used; raise EnvironmentProblem if unusable. A
    collective."""
    if not plan.compute_path.fuses_tp:
        return
    check_names(FUSED)
    group, hosts = ranks.mesh["tp"].get_group(), of_every_rank(host_name(), ranks)
    own = sorted({hosts[rank] for rank in dist.get_process_group_ranks(group)})
    raise_first(of_every_rank(f"its TP ranks are on {', '.join(own)}" if len(own) > 1 else None, ranks))
    raise_first(of_every_rank(why_not_fused(plan, group_of(ranks.mesh["tp"]), ranks.device), ranks))


def raise_first(reasons: Iterable[str | None]) -> None:
    """Raise EnvironmentProblem for the first rank with a reason, if any."""
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise EnvironmentProblem(
                f"--communication fused failed before the first step, on rank {rank}: {reason}",
                do="omit --communication fused",
            )


def why_not_fused(plan: EnginePlan, group: Group, device: torch.device) -> str | None:
    """Return why the operators do not work in ``group``; None if they do."""
    from torch.distributed._symmetric_memory import get_symm_mem_workspace  # registers the operators

    try:
        get_symm_mem_workspace(group.name, min_size=plan.fused_workspace_bytes)  # type: ignore[arg-type]
        ours, expected = (products(plan, group._replace(fused=fused), device) for fused in (True, False))
    except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        # Memory that cannot be shared, or operators that this version of torch lacks or calls with other arguments.
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if torch.allclose(ours, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().amax())):
        return None
    return "the fused and the separate operators compute different products"


def products(plan: EnginePlan, group: Group, device: torch.device) -> Tensor:
    """Return products after a gather and before a scatter, in bf16 and, if used without emulation, in FP8."""
    random = torch.Generator(device).manual_seed(group.rank)
    shard, matrix = (
        torch.randn(1, TRIED, TRIED, device=device, dtype=torch.bfloat16, generator=random) for _ in range(2)
    )
    whole, (product,) = linear.gather_multiply(shard, [matrix[0]], group, keeps=True)
    assert whole is not None
    found = [product, linear.multiply_scatter(whole, matrix[0], group)]
    if plan.fp8_recipe and not plan.emulate_fp8:
        one = torch.ones((), device=device)
        left, right = Scaled(shard[0].to(FORMATS[INPUT]), one), Scaled(matrix[0].to(FORMATS[WEIGHT]), one).mT
        kind = fp8_layers.ProductKind(True, "fp8", None, None, None, 1, False, ())
        rows, product = fp8_layers.gather_multiply(left, right, kind, group, fast=True)
        found += [product[None], fp8_layers.multiply_scatter(Scaled(rows, one), right, kind, group)]
    return torch.cat(found, 1)
