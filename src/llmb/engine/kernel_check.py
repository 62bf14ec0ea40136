# SPDX-License-Identifier: Apache-2.0
"""Compares the engine's kernels with torch's code for the same operations, at the start of a run and at its shapes.

Assemblers have lost values of kernels that are right (``fp8_cast.cast_activation_gradient`` names one). Which ones
depends on the GPU, the shapes and the assembler's version, so a test elsewhere cannot exclude it. Attention by spans is
compared by ``attention_backend``, which leaves it out if it is wrong; for these kernels a run has no alternative.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.engine.attention_backend import forget_memory
from llmb.engine.kernels.arguments import (
    Activation,
    BothWays,
    Heads,
    Rotation,
)
from llmb.engine.kernels.fp8_cast import (
    activate,
    activate_backward,
    cast,
    cast_activated,
    cast_activation_gradient,
    cast_both_ways,
    cast_into,
    has_kernel,
    largest_value,
)
from llmb.engine.kernels.rotary import cast_rotated_gradient, rotated_back
from llmb.engine.model.attention import rotary_tables
from llmb.engine.parallel.context_parallel import rank_positions
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.errors import EnvironmentProblem, itemized
from llmb.runs.environment import KernelCheck
from llmb.runs.plan import EnginePlan

Parts = Iterator[tuple[Tensor, Tensor]]
"""What a kernel and what torch computed, part after part, of which few are in memory as fp32 at a time."""
MOST_VALUES = 2**26
"""How many a part has at most."""
MOST_EXPERTS = 2
"""How many matrices of a stack are compared: each is cast like any other."""
SCALE = 100.0
"""Casts of values that are normally distributed then clamp a few to the range of e4m3, and take bits of a few."""


class KernelTrial(NamedTuple):
    """One kernel at one shape; ``parts`` computes with random values."""

    kernel: str
    shape: tuple[int, ...]
    parts: Callable[[], Parts]


class RankShapes(NamedTuple):
    """What one rank computes for a micro-batch. rows: tokens; shard_rows: those of the residual stream."""

    batch: int
    seq: int
    shard_rows: int
    hidden: int
    query: int
    value: int
    features: tuple[int, ...]
    """Inner features of the feed-forward layers that process every token."""
    experts: int
    expert_features: int
    expert_rows: int

    @property
    def rows(self) -> int:
        return self.batch * self.seq


class Values:
    """Random tensors on a device, the same in every run."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def number(self, value: float) -> Tensor:
        return torch.full((), value, device=self.device)


def compare_kernels(plan: EnginePlan, ranks: Ranks) -> tuple[KernelCheck, ...]:
    """The results of the first rank, and wrong ones of others; empty without kernels, as on a CPU. A collective."""
    values, probe = Values(ranks.device, plan.seed), torch.empty(0, device=ranks.device)
    with torch.no_grad():
        own = [result_of(each, ranks.rank) for each in checks(plan, ranks, values)] if has_kernel(probe) else []
    forget_memory(ranks.device)
    told = of_every_rank([each for each in own if ranks.is_first or not each.right], ranks)
    return tuple(chain.from_iterable(told))


def result_of(check: KernelTrial, rank: int) -> KernelCheck:
    difference = difference_of(check.parts())
    known = difference if math.isfinite(difference) else None
    right = known is not None and known <= 1
    return KernelCheck(kernel=check.kernel, shape=check.shape, rank=rank, difference=known, right=right)


def refuse_wrong(found: Sequence[KernelCheck], ptxas: str | None) -> None:
    """Raises EnvironmentProblem if a kernel computes something else."""
    wrong = [
        f"{each.kernel}, {'x'.join(map(str, each.shape))}, on rank {each.rank}: "
        + ("not finite" if each.difference is None else f"{each.difference:.3g} times as far off as rounding explains")
        for each in found
        if not each.right
    ]
    if wrong:
        raise EnvironmentProblem(
            f"{len(wrong)} kernels are wrong at the shapes of this run:{itemized(wrong)}",
            do=f"assemble them by another version of ptxas than {ptxas or 'this one'}, which TRITON_PTXAS_PATH names "
            "(from compute capability 10.0 on TRITON_PTXAS_BLACKWELL_PATH)",
        )


def difference_of(parts: Parts) -> float:
    """The largest difference between found and expected values, as a multiple of what rounding can explain.

    That is one step of their format, at their own magnitude plus the mean square's root of all. fp32 is sums in another
    order, or the largest of values in bf16.
    """
    found = []
    for ours, theirs in parts:
        dtype = torch.bfloat16 if theirs.dtype is torch.float32 else theirs.dtype
        one, other = ours.float(), theirs.float()
        explained = torch.finfo(dtype).eps * (other.abs() + other.square().mean().sqrt())
        found.append(((one - other).abs() / explained).amax())
    return float(torch.stack(found).amax())


def checks(plan: EnginePlan, ranks: Ranks, values: Values) -> Iterator[KernelTrial]:
    """A check of each kernel that a run with this plan may use, at each of its shapes."""
    sizes = sizes_of(plan)
    if plan.fp8_recipe is None:
        return
    activation: Activation = plan.recipe.model.mlp
    yield from cast_checks(sizes, activation, values)
    if plan.lora is not None or plan.fp8_recipe != "delayed":
        return
    yield from activation_checks(sizes, activation, values)
    yield from rotation_checks(plan, ranks, sizes, values)


def sizes_of(plan: EnginePlan) -> RankShapes:
    model, layout, moe = plan.recipe.model, plan.recipe.layout, plan.recipe.model.moe
    rows = layout.mbs * layout.seq_len // layout.cp
    features = {model.ffn_hidden_size} if moe is None or moe.interleave > 1 else set[int]()
    if moe is not None and moe.shared_ffn_hidden_size is not None:
        features |= {moe.shared_ffn_hidden_size}
    return RankShapes(
        batch=layout.mbs,
        seq=layout.seq_len // layout.cp,
        shard_rows=rows // layout.tp if layout.sequence_parallel else rows,
        hidden=model.hidden_size,
        query=model.attention_heads * model.head_dim // layout.tp,
        value=model.kv_heads * model.head_dim // layout.tp,
        features=tuple(sorted(each // layout.tp for each in features)),
        experts=min(moe.experts // layout.ep, MOST_EXPERTS) if moe else 0,
        expert_features=moe.ffn_hidden_size // layout.etp if moe else 0,
        expert_rows=rows * moe.top_k if moe else 0,
    )


def matrices_of(sizes: RankShapes) -> set[tuple[int, ...]]:
    """Shapes of a block's weights."""
    inner = {sizes.query, *sizes.features}
    found: set[tuple[int, ...]] = {(sizes.hidden, each) for each in inner} | {(each, sizes.hidden) for each in inner}
    if sizes.experts:
        found |= {(sizes.experts, sizes.hidden, 2 * sizes.expert_features)}
        found |= {(sizes.experts, sizes.expert_features, sizes.hidden)}
    return found | {(sizes.value, sizes.hidden)}


def cast_checks(sizes: RankShapes, activation: Activation, values: Values) -> Iterator[KernelTrial]:
    rows, hidden = sizes.rows, sizes.hidden
    taken: set[tuple[int, ...]] = {(sizes.shard_rows, hidden), (rows, sizes.query), *matrices_of(sizes)}
    if sizes.experts:
        taken |= {(sizes.expert_rows, hidden)}
    given = {(rows, hidden)}
    for name, which, shapes in (("", INPUT, taken), (" of gradients", GRADIENT, given)):
        for shape in sorted(shapes):
            compute = partial(cast_parts, values, shape, FORMATS[which])
            yield KernelTrial(f"cast_both_ways{name}", shape, compute)
    joined: set[tuple[int, ...]] = {(sizes.query, sizes.value, sizes.value)}
    if activation == "swiglu":
        joined |= {(each, each) for each in sizes.features}
    for parts in sorted(joined):
        compute = partial(joined_parts, values, parts, hidden)
        yield KernelTrial("cast_into", (sum(parts), hidden), compute)


def activation_checks(sizes: RankShapes, activation: Activation, values: Values) -> Iterator[KernelTrial]:
    shapes = {(sizes.rows, each) for each in sizes.features}
    if sizes.experts:
        shapes |= {(sizes.expert_rows, sizes.expert_features)}
    for shape in sorted(shapes):
        given = partial(activation_parts, values, shape, activation)
        yield KernelTrial("cast_activated", shape, given)
        given = partial(activation_gradient_parts, values, shape, activation)
        yield KernelTrial("cast_activation_gradient", shape, given)


def rotation_checks(plan: EnginePlan, ranks: Ranks, sizes: RankShapes, values: Values) -> Iterator[KernelTrial]:
    if plan.recipe.model.qk_norm is not None:
        return
    shape = sizes.rows, sizes.query + 2 * sizes.value
    given = partial(rotation_gradient_parts, plan, ranks, sizes, values)
    yield KernelTrial("cast_rotated_gradient", shape, given)


def cast_parts(values: Values, shape: tuple[int, ...], dtype: torch.dtype) -> Parts:
    source, scale = values(*shape), values.number(SCALE)
    yield from both_ways(cast_both_ways(source, scale, dtype), source, scale)


def both_ways(found: BothWays, stored: Tensor, scale: Tensor) -> Parts:
    """A cast of what ``stored`` has in bf16, [rows, columns] or several such."""
    yield found[2], largest_value(stored)
    columns = stored.shape[-1]
    for values, transposed, source in zip(
        *(each.view(-1, *each.shape[-2:]) for each in (*found[:2], stored)), strict=True
    ):
        for own in slices(len(source), columns):
            expected = cast(source[own], scale, values.dtype)
            yield values[own], expected
            yield transposed[:, own], expected.mT


def slices(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, MOST_VALUES // columns)
    return (slice(first, first + step) for first in range(0, rows, step))


def joined_parts(values: Values, parts: Sequence[int], columns: int) -> Parts:
    """Weights of several layers, cast into one matrix."""
    rows, scale = sum(parts), values.number(SCALE)
    whole = torch.empty((rows, columns), dtype=FORMATS[WEIGHT], device=values.device)
    transposed, amax = whole.new_empty((columns, rows)), values.number(0.0)
    first = 0
    for number in parts:
        own, source = slice(first, first + number), values(number, columns)
        found = whole[own], transposed[:, own], amax
        cast_into(source, scale, *found)
        yield from both_ways(found, source, scale)
        first += number


def activation_parts(values: Values, shape: tuple[int, int], activation: Activation) -> Parts:
    inputs, scale = inputs_of(values, shape, activation), values.number(SCALE)
    found = cast_activated(inputs, scale, activation, FORMATS[INPUT])
    yield from both_ways(found, activate(inputs, activation), scale)


def activation_gradient_parts(values: Values, shape: tuple[int, int], activation: Activation) -> Parts:
    inputs, gradient, scale = inputs_of(values, shape, activation), values(*shape), values.number(SCALE)
    found = cast_activation_gradient(inputs, gradient, scale, activation, FORMATS[GRADIENT])
    yield from both_ways(found, activate_backward(inputs, gradient, activation), scale)


def inputs_of(values: Values, shape: tuple[int, int], activation: Activation) -> Tensor:
    rows, features = shape
    return values(rows, 2 * features if activation == "swiglu" else features)


def rotation_gradient_parts(plan: EnginePlan, ranks: Ranks, sizes: RankShapes, values: Values) -> Parts:
    head_dim, scale = plan.recipe.model.head_dim, values.number(SCALE)
    numbers = (each // head_dim for each in (sizes.query, sizes.value, sizes.value))
    heads = Heads(*(values(sizes.batch, sizes.seq, number, head_dim) for number in numbers))
    rotation = rotation_of(plan, ranks)
    found = cast_rotated_gradient(heads, rotation, scale, FORMATS[GRADIENT])
    yield from both_ways(found, rotated_back(heads, rotation), scale)


def rotation_of(plan: EnginePlan, ranks: Ranks) -> Rotation:
    layout = plan.recipe.layout
    positions = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)
    return rotary_tables(plan.recipe.model, positions).rotation
