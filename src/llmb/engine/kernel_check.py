# SPDX-License-Identifier: Apache-2.0
"""Compares the engine's kernels with torch's code at the start of a run, because some assemblers miscompile correct
kernels."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from llmb.base.errors import EnvironmentProblem, itemized
from llmb.catalogue.layout_check import rank_model
from llmb.engine.attention_backend import forget_memory
from llmb.engine.kernels import elementwise
from llmb.engine.kernels.elementwise import Activation, BothWays, Heads
from llmb.engine.model.attention import rotary_tables
from llmb.engine.parallel.context_parallel import rank_positions
from llmb.engine.parallel.mesh import Ranks, of_every_rank
from llmb.engine.precision.scaling import FORMATS, GRADIENT, INPUT, WEIGHT
from llmb.runs.environment import KernelCheck
from llmb.runs.plan import EnginePlan

Shape = tuple[int, ...]
Parts = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a kernel's results and torch's, in parts that fit in memory as fp32."""
MOST_VALUES = 2**26
"""Maximum number of values in a part."""
MOST_EXPERTS = 2
"""Maximum number of matrices of a stack to compare: all are cast in the same way."""
SCALE = 100.0
"""With this scale, casts of normally distributed values to e4m3 clamp a few of them and round the rest."""


class KernelTrial(NamedTuple):
    """One kernel at one shape; ``parts`` computes its results and torch's from random values."""

    kernel: str
    shape: Shape
    parts: Callable[[], Parts]


class RankShapes(NamedTuple):
    """Shapes of the tensors that one rank casts for a micro-batch of ``rows`` tokens."""

    rows: int
    hidden: int
    cast: set[Shape]
    """Shapes of inputs and weights."""
    joined: set[Shape]
    """Rows of each weight in joint casts."""
    activated: set[Shape]
    """Shapes of the results of activations."""
    heads: tuple[int, int, int, int]
    """Batch, positions, query heads, key heads."""


class Values:
    """Draws random bf16 tensors on a device, reproducibly for a seed."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.bfloat16)

    def number(self, value: float) -> Tensor:
        return torch.full((), value, device=self.device)


def compare_kernels(plan: EnginePlan, ranks: Ranks) -> tuple[KernelCheck, ...]:
    """Return the first rank's checks and all failed checks; no checks without FP8 on a GPU. A collective."""
    values, probe, own = Values(ranks.device, plan.seed), torch.empty(0, device=ranks.device), list[KernelCheck]()
    with torch.no_grad():
        for kernel, shape, parts in checks(plan, ranks, values) if elementwise.has_kernel(probe) else ():
            difference = difference_of(parts())
            finite = difference if math.isfinite(difference) else None
            right = finite is not None and finite <= 1
            own.append(KernelCheck(kernel=kernel, shape=shape, rank=ranks.rank, difference=finite, right=right))
    forget_memory(ranks.device)
    gathered = of_every_rank([each for each in own if ranks.is_first or not each.right], ranks)
    return tuple(chain.from_iterable(gathered))


def refuse_wrong(checks: Sequence[KernelCheck], ptxas: str | None) -> None:
    """Raise EnvironmentProblem if a check has failed."""
    wrong = [
        f"{each.kernel}, {'x'.join(map(str, each.shape))}, on rank {each.rank}: "
        + ("not finite" if each.difference is None else f"{each.difference:.3g} times the error that rounding explains")
        for each in checks
        if not each.right
    ]
    if wrong:
        raise EnvironmentProblem(
            f"kernels compute wrong results at the shapes of this run:{itemized(wrong)}",
            do="set TRITON_PTXAS_PATH (from compute capability 10.0 on, TRITON_PTXAS_BLACKWELL_PATH) to the path of "
            f"a different version of ptxas{f' than {ptxas}' if ptxas else ''}",
        )


def difference_of(parts: Parts) -> float:
    """Return the largest difference within pairs, as a multiple of what rounding to their format can explain."""
    multiples = []
    for ours, theirs in parts:
        dtype = torch.bfloat16 if theirs.dtype is torch.float32 else theirs.dtype
        one, other = ours.float(), theirs.float()
        explained = torch.finfo(dtype).eps * (other.abs() + other.square().mean().sqrt())
        multiples.append(((one - other).abs() / explained).amax())
    return float(torch.stack(multiples).amax())


def checks(plan: EnginePlan, ranks: Ranks, values: Values) -> Iterator[KernelTrial]:
    """Yield trials of the cast kernels that the run may use, at its shapes; none without FP8."""
    if plan.fp8_recipe is None:
        return
    shapes, activation = shapes_of(plan), plan.recipe.model.mlp
    for shape in sorted(shapes.cast):
        yield KernelTrial("cast_both_ways", shape, partial(cast_parts, values, shape, FORMATS[INPUT]))
    shape = shapes.rows, shapes.hidden
    yield KernelTrial("cast_both_ways of gradients", shape, partial(cast_parts, values, shape, FORMATS[GRADIENT]))
    for parts in sorted(shapes.joined):
        compute = partial(joined_parts, values, parts, shapes.hidden)
        yield KernelTrial("cast_into", (sum(parts), shapes.hidden), compute)
    if not plan.compute_path.fuses_casts:
        return
    for shape in sorted(shapes.activated):
        yield KernelTrial("cast_activated", shape, partial(activation_parts, values, shape, activation))
        compute = partial(activation_gradient_parts, values, shape, activation)
        yield KernelTrial("cast_activation_gradient", shape, compute)
    if plan.recipe.model.qk_norm is None:
        _, _, queries, keys = shapes.heads
        shape = shapes.rows, (queries + 2 * keys) * plan.recipe.model.head_dim
        compute = partial(rotation_gradient_parts, plan, ranks, shapes, values)
        yield KernelTrial("cast_rotated_gradient", shape, compute)


def shapes_of(plan: EnginePlan) -> RankShapes:
    layout, model = plan.recipe.layout, rank_model(plan.recipe.model, plan.recipe.layout)
    moe, seq, hidden = model.moe, layout.seq_len // layout.cp, model.hidden_size
    query, value = model.attention_heads * model.head_dim, model.kv_heads * model.head_dim
    rows = layout.mbs * seq
    features = {model.ffn_hidden_size} if moe is None or moe.interleave > 1 else set[int]()
    if moe is not None and moe.shared_ffn_hidden_size is not None:
        features |= {moe.shared_ffn_hidden_size}
    cast: set[Shape] = {(rows // layout.sequence_shards, hidden), (rows, query), (value, hidden)}
    for inner in (query, *features):
        cast |= {(hidden, inner), (inner, hidden)}
    joined: set[Shape] = {(query, value, value), *((each, each) for each in features if model.mlp == "swiglu")}
    activated: set[Shape] = {(rows, each) for each in features}
    if moe is not None:
        experts, inner = min(moe.experts, MOST_EXPERTS), moe.ffn_hidden_size
        cast |= {(rows * moe.top_k, hidden), (experts, hidden, 2 * inner), (experts, inner, hidden)}
        activated |= {(rows * moe.top_k, inner)}
    return RankShapes(rows, hidden, cast, joined, activated, (layout.mbs, seq, model.attention_heads, model.kv_heads))


def cast_parts(values: Values, shape: Shape, dtype: torch.dtype) -> Parts:
    source, scale = values(*shape), values.number(SCALE)
    yield from both_ways(elementwise.cast_both_ways(source, scale, dtype), source, scale)


def both_ways(casts: BothWays, stored: Tensor, scale: Tensor) -> Parts:
    """Yield parts of ``casts`` and of torch's casts of ``stored``, a bf16 matrix, or a stack of matrices."""
    yield casts[2], elementwise.largest_value(stored)
    columns = stored.shape[-1]
    for values, transposed, source in zip(
        *(each.view(-1, *each.shape[-2:]) for each in (*casts[:2], stored)), strict=True
    ):
        step = max(1, MOST_VALUES // columns)
        for own in (slice(first, first + step) for first in range(0, len(source), step)):
            expected = elementwise.cast(source[own], scale, values.dtype)
            yield values[own], expected
            yield transposed[:, own], expected.mT


def joined_parts(values: Values, parts: Sequence[int], columns: int) -> Parts:
    """Yield the results of casting layers' weights into one matrix, and torch's results. parts: the layers' rows."""
    rows, scale = sum(parts), values.number(SCALE)
    whole = torch.empty((rows, columns), dtype=FORMATS[WEIGHT], device=values.device)
    transposed, amax = whole.new_empty((columns, rows)), values.number(0.0)
    first = 0
    for number in parts:
        own, source = slice(first, first + number), values(number, columns)
        casts = whole[own], transposed[:, own], amax
        elementwise.cast_into(source, scale, *casts)
        yield from both_ways(casts, source, scale)
        first += number


def activation_parts(values: Values, shape: Shape, activation: Activation) -> Parts:
    inputs, scale = inputs_of(values, shape, activation), values.number(SCALE)
    casts = elementwise.cast_activated(inputs, scale, activation, FORMATS[INPUT])
    yield from both_ways(casts, elementwise.activate(inputs, activation), scale)


def activation_gradient_parts(values: Values, shape: Shape, activation: Activation) -> Parts:
    inputs, gradient, scale = inputs_of(values, shape, activation), values(*shape), values.number(SCALE)
    casts = elementwise.cast_activation_gradient(inputs, gradient, scale, activation, FORMATS[GRADIENT])
    yield from both_ways(casts, elementwise.activate_backward(inputs, gradient, activation), scale)


def inputs_of(values: Values, shape: Shape, activation: Activation) -> Tensor:
    rows, features = shape
    return values(rows, 2 * features if activation == "swiglu" else features)


def rotation_gradient_parts(plan: EnginePlan, ranks: Ranks, shapes: RankShapes, values: Values) -> Parts:
    layout, model, scale = plan.recipe.layout, plan.recipe.model, values.number(SCALE)
    batch, seq, queries, keys = shapes.heads
    heads = Heads(*(values(batch, seq, number, model.head_dim) for number in (queries, keys, keys)))
    positions = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)
    rotation = rotary_tables(model, positions).rotation
    casts = elementwise.cast_rotated_gradient(heads, rotation, scale, FORMATS[GRADIENT])
    yield from both_ways(casts, elementwise.rotated_back(heads, rotation), scale)
