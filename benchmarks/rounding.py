# SPDX-License-Identifier: Apache-2.0
"""What two kinds of rounding on GPUs change, simulated on a CPU; writes the end of docs/reference/numerics.md.

Sums of gradients over many ranks are rounded to bf16 at every hop. FP8 products of Hopper keep partial sums of 14 bits.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.support import join_alone, prepare_trainee, tiny_plan
from llmb.catalogue.records import Dtype
from llmb.catalogue.resolve import Overrides
from llmb.engine.loop import add_gradients
from llmb.engine.parallel.mesh import Ranks, arrange
from llmb.engine.precision import fp8_layers
from llmb.engine.precision.scaling import Scaled
from llmb.runs.plan import EnginePlan

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "numerics.md"
BEGINNING = "<!-- Written by 'python -m benchmarks.rounding'; changes made below are lost. -->\n"
RANKS = (32, 64, 128, 256)
PER_NODE = 8
EVERY = 7
"""Of the elements of a gradient, every seventh is summed."""
STEPS, LAST = 200, 50
PER_INSTRUCTION = 32
"""Elements that one FP8 instruction of a Hopper GPU multiplies and adds (wgmma m64nNk32)."""
PROMOTED = 128
"""Terms after which partial sums are added to fp32 registers; cuBLAS does not document its own number."""
DROPPED_BITS = 10
"""Of 23 bits of fp32's fraction: the accumulators have 13."""
DEPTHS = (128, 1024, 4096, 16384)


def ring(values: Tensor) -> Tensor:
    """Sum [ranks, elements] bf16 one after the other, rounding to bf16 at each rank, as NCCL's rings do."""
    total = values[0]
    for each in values[1:]:
        total = total + each
    return total


def tree(values: Tensor) -> Tensor:
    """Sum within nodes in a chain, then the nodes' sums by pairs, as NCCL's trees do, rounding to bf16 each time."""
    sums = torch.stack([ring(node) for node in values.split(PER_NODE)])
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    return sums[0]


SUMS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "fp32, ring": ring,
        "bf16, ring": lambda values: ring(values.bfloat16()),
        "bf16, tree": lambda values: tree(values.bfloat16()),
        "bf16, added in fp32": lambda values: values.bfloat16().float().sum(0).bfloat16(),
    }
)


def distances(values: Tensor) -> list[float]:
    """Return for each of ``SUMS`` the distance from the exact sum of [ranks, elements] fp32, relative to its norm."""
    exact = values.double().sum(0)
    return [float((way(values).double() - exact).norm() / exact.norm()) for way in SUMS.values()]


def independent(ranks: int) -> Tensor:
    """Return gradients without anything in common: [ranks, elements] fp32."""
    return torch.randn(ranks, 50_000, generator=torch.Generator().manual_seed(1234))


def tiny_gradients(joined: Ranks, trained: int, ranks: int) -> Tensor:
    """Return gradients of as many sequences, one per rank, of the tiny Llama 3.1 after ``trained`` steps, in fp32."""
    plan = tiny_plan(trained + ranks, Overrides(gbs=1, mbs=1), dtype=Dtype.BF16)
    trainee = prepare_trainee(plan, of(joined, plan))
    for number in range(trained):
        trainee.step(number)
    found = []
    for number in range(trained, trained + ranks):
        add_gradients(trainee.passes, plan, trainee.source.step(number), number, trainee.ranks)
        parameters = [each for stage in trainee.passes.stages for each in stage.model.parameters()]
        found.append(torch.cat([each.grad.float().flatten()[::EVERY] for each in parameters if each.grad is not None]))
        for optimizer in trainee.optimizers:
            optimizer.zero_grad()
    return torch.stack(found)


def of(joined: Ranks, plan: EnginePlan) -> Ranks:
    layout = plan.recipe.layout
    return arrange(joined.rank, joined.device, layout, plan.parallelism.replicas(layout))


def truncated(values: Tensor) -> Tensor:
    """Drop the last bits of fp32 values."""
    return (values.view(torch.int32) & -(1 << DROPPED_BITS)).view(torch.float32)


def hopper_sums(left: Tensor, right: Tensor, *, promotes: bool) -> Tensor:
    """Return the product of [m, k] and [k, n] in fp32, with partial sums as in Hopper's accumulators.

    The products of one instruction are added exactly, which is better than the hardware, and then to the accumulator.
    """
    missing = -left.shape[1] % PER_INSTRUCTION
    left, right = (torch.nn.functional.pad(each, (0, missing)) for each in (left, right.mT))
    chunks = zip(left.split(PER_INSTRUCTION, 1), right.split(PER_INSTRUCTION, 1), strict=True)
    total, partial_sum = torch.zeros(len(left), len(right)), torch.zeros(len(left), len(right))
    for number, (rows, columns) in enumerate(chunks, start=1):
        partial_sum = truncated(partial_sum + rows @ columns.mT)
        if promotes and number * PER_INSTRUCTION % PROMOTED == 0:
            total += partial_sum
            partial_sum = torch.zeros_like(total)
    return total + partial_sum


Promotes = Callable[[bool], bool]
"""Returns whether partial sums are promoted, from whether the engine lets a product accumulate fast."""
WAYS: Mapping[str, Promotes | None] = MappingProxyType(
    {
        "fp32": None,
        "14 bits, promoted every 128": lambda _fast: True,
        "14 bits, promoted in backward passes only": lambda fast: not fast,
        "14 bits, never promoted": lambda _fast: False,
    }
)


def multiply(left: Scaled, right: Scaled, *, fast: bool, product_dtype: str, promotes: Promotes) -> Tensor:
    """Stand in for ``scaling.multiply``."""
    assert product_dtype == "fp32", "a CPU is simulated on"
    product = hopper_sums(left.values.float(), right.values.float(), promotes=promotes(fast))
    return (product * left.inverse * right.inverse).bfloat16()


def losses(joined: Ranks, dtype: Dtype, steps: int) -> list[float]:
    plan = tiny_plan(steps, Overrides(gbs=4), dtype=dtype)
    trainee = prepare_trainee(plan, of(joined, plan))
    return [float(loss) for number in range(steps) if (loss := trainee.step(number)[0]) is not None]


def fp8_losses(joined: Ranks, promotes: Promotes | None, steps: int) -> list[float]:
    """Train in FP8 with products simulated by ``multiply``, or exact ones for None."""
    if promotes is None:
        return losses(joined, Dtype.FP8, steps)
    with patch.object(fp8_layers, "multiply", partial(multiply, promotes=promotes)):
        return losses(joined, Dtype.FP8, steps)


def product_distance(depth: int, *, promotes: bool) -> float:
    """Return the relative distance of a product of random FP8 values with ``depth`` terms from the exact one."""
    generator = torch.Generator().manual_seed(depth)
    shapes = (64, depth), (depth, 64)
    left, right = (torch.randn(shape, generator=generator).to(torch.float8_e4m3fn).double() for shape in shapes)
    exact = left @ right
    return float((hopper_sums(left.float(), right.float(), promotes=promotes) - exact).norm() / exact.norm())


class Difference(NamedTuple):
    """The largest difference of a step's loss from another training's, and that of the mean of the last steps."""

    any_step: float
    late: float

    @classmethod
    def between(cls, ours: Sequence[float], others: Sequence[float]) -> "Difference":
        each = [one - other for one, other in zip(ours, others, strict=True)]
        return cls(max(map(abs, each)), abs(fmean(each[-LAST:])))


def table(columns: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        lines.append(f"| {' | '.join(f'{each:.2g}' if isinstance(each, float) else str(each) for each in row)} |")
    return "\n".join(lines)


def sums_section(joined: Ranks, ranks: Sequence[int], trained: int) -> str:
    def rows() -> Iterator[Sequence[object]]:
        gradients = {f"tiny, step {number}": tiny_gradients(joined, number, max(ranks)) for number in (0, trained)}
        for name, values in {**gradients, "independent": independent(max(ranks))}.items():
            yield from ([name, number, *distances(values[:number])] for number in ranks)

    return f"""## Sums of gradients over ranks

The table has relative errors of sums of gradients over ranks, simulated on a CPU. By default, all recipes except tiny
ones sum in bf16 (`--grad-reduce-dtype`). The gradients are those of tiny Llama 3.1 in bf16, or independent normal
values. Rings and trees are NCCL's; NVLink switches add in fp32.

{table(("gradients", "ranks", *SUMS), rows())}"""


def products_section(joined: Ranks, steps: int) -> str:
    def rows(trained: Mapping[str, Sequence[float]], bf16: Sequence[float]) -> Iterator[Sequence[object]]:
        for name, ours in trained.items():
            yield name, *Difference.between(ours, bf16), *Difference.between(ours, trained["fp32"])

    trained = {name: fp8_losses(joined, promotes, steps) for name, promotes in WAYS.items()}
    measured = rows(trained, losses(joined, Dtype.BF16, steps))
    beside = ("any step", f"mean of the last {LAST}")
    columns = ("partial sums", *(f"{other}: {each}" for other in ("bf16", "FP8 with fp32 sums") for each in beside))
    depths = ([depth, *(product_distance(depth, promotes=way) for way in (True, False))] for depth in DEPTHS)
    return f"""## Partial sums of FP8 products

Hopper's FP8 products keep partial sums of [about 14 bits](https://arxiv.org/abs/2412.19437), and add them to fp32 sums
("promote" them) periodically or never. The table has differences in loss over {steps} simulated steps of tiny Llama 3.1
with delayed scaling.

{table(columns, measured)}

Dot products in large models often have 4,096 terms or more. These are relative errors of simulated ones of random
values:

{table(("terms", "promoted every 128", "never promoted"), depths)}

None of this was measured on a GPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few small steps, printed instead of written")
    quick = parser.parse_args().quick
    joined = join_alone(tiny_plan(1))
    sums = sums_section(joined, (8, 16) if quick else RANKS, 1 if quick else STEPS)
    text = f"{sums}\n\n{products_section(joined, 3 if quick else STEPS)}\n"
    if quick:
        sys.stdout.write(text)
    else:
        PAGE.write_text(PAGE.read_text().partition(BEGINNING)[0].rstrip() + f"\n\n{BEGINNING}\n{text}")


if __name__ == "__main__":
    main()
