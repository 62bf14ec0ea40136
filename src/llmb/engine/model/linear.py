# SPDX-License-Identifier: Apache-2.0
"""Products with weights, alone or joined, and sums of their gradients, with sequence parallelism (Korthikanti et al.,
2022, section 4.2.2)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

from llmb.engine.collectives import Context, Group, finish, fuses, start_gather, start_scatter


def local_shard(parameter: Tensor, *, same_tokens: bool = False) -> Tensor:
    """Return a parameter's local shard. Gradients of replicas are partial sums or, with ``same_tokens``, equal."""
    if not isinstance(parameter, DTensor):
        return parameter
    copied = Replicate() if same_tokens else Partial()
    gradient = [copied if placement.is_replicate() else placement for placement in parameter.placements]
    part: Tensor = parameter.to_local(grad_placements=gradient)
    return part


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor unchanged. Forward passes use ``local_shard``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return the tensor that is sharded like ``parameter`` and has ``local`` as this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


SEQUENCE = 1
"""The dimension of hidden states, [batch, seq, hidden], that sequence parallelism shards."""

Found = TypeVar("Found")


def gathered(shard: Tensor, group: Group) -> Tensor:
    """Gather the whole sequence from the shards of a group, without a gradient."""
    return finish(start_gather(shard, SEQUENCE, group), SEQUENCE)


def scattered(summand: Tensor, group: Group) -> Tensor:
    """Sum the whole sequence over the ranks, and return this rank's shard of the sum, without a gradient."""
    return finish(start_scatter(summand, SEQUENCE, group), SEQUENCE)


def gather_multiply(
    shard: Tensor, matrices: Sequence[Tensor], group: Group, *, keeps: bool = False
) -> tuple[Tensor | None, Sequence[Tensor]]:
    """Gather the sequence; return it, or possibly None unless ``keeps``, and its products with ``matrices``, [inputs,
    outputs] each."""
    if fuses(shard, group):
        rows = shard.movedim(SEQUENCE, 0).contiguous().movedim(0, SEQUENCE)  # as the operator sends them
        operator = torch.ops.symm_mem.fused_all_gather_matmul
        whole, products = operator(rows, list(matrices), SEQUENCE, group.name, return_A=keeps)
        return whole, products
    whole = gathered(shard, group)
    return whole, [whole @ matrix for matrix in matrices]


def multiply_scatter(hidden: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """Sum the product with ``matrix``, [inputs, outputs], over the ranks; return this rank's shard of the sum."""
    if fuses(hidden, group):
        operator = torch.ops.symm_mem.fused_matmul_reduce_scatter
        shard: Tensor = operator(hidden, matrix, "sum", SEQUENCE, group.name)
        return shard
    return scattered(hidden @ matrix, group)


def overlapped(
    shard: Tensor, group: Group, to_input: Callable[[], Tensor], to_weights: Callable[[Tensor], Found]
) -> tuple[Tensor, Found]:
    """Return the contiguous gradient of ``shard``, and the result of ``to_weights``; overlap both with collectives."""
    again = start_gather(shard, SEQUENCE, group)
    summed = start_scatter(to_input(), SEQUENCE, group)
    of_weights = to_weights(finish(again, SEQUENCE))
    return finish(summed, SEQUENCE).contiguous(), of_weights


def multiply_shard(shard: Tensor, weights: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Gather the whole sequence; return its products, [batch, seq, outputs], with each weight, [outputs, inputs]."""
    products: tuple[Tensor, ...] = _MultiplyShard.apply(shard, group, *weights)
    return products


def _gradients(
    gradients: list[Tensor], shard: Tensor, weights: list[Tensor], name: str, size: int, rank: int
) -> list[Tensor]:
    """Return the gradients of ``shard`` and of each weight, from ``gradients``, the gradients of the products."""

    def to_weights(whole: Tensor) -> list[Tensor]:
        return [gradient.flatten(0, -2).t() @ whole.flatten(0, -2) for gradient in gradients]

    to_shard, of_weights = overlapped(shard, Group(name, size, rank), lambda: _to_input(gradients, weights), to_weights)
    return [to_shard, *of_weights]


shard_gradients = torch.library.custom_op("llmb::shard_gradients", _gradients, mutates_args=())
"""One operator in compiled code: otherwise the compiler would save the gathered sequence for the backward pass."""


@shard_gradients.register_fake
def _(_gradients: list[Tensor], shard: Tensor, weights: list[Tensor], *_: object) -> list[Tensor]:
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (shard, *weights)]


def _to_input(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    total = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        total.view(-1, total.shape[-1]).addmm_(gradient.flatten(0, -2), weight)
    return total


class _ShardContext(Context):
    group: Group


class _MultiplyShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ShardContext, shard: Tensor, group: Group, *weights: Tensor) -> tuple[Tensor, ...]:
        trained = any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(shard if trained else None, *weights)
        ctx.group = group
        return tuple(gather_multiply(shard, [weight.t() for weight in weights], group)[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: _ShardContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shard: Tensor | None
        shard, *matrices = ctx.saved_tensors
        if shard is None:
            return scattered(_to_input(gradients, matrices), ctx.group), None, *[None for _ in matrices]
        compute = shard_gradients if torch.compiler.is_compiling() else _gradients
        to_shard, *of_weights = compute(list(gradients), shard, matrices, *ctx.group[:3])
        return to_shard, None, *of_weights


class _MultiplySummed(torch.autograd.Function):
    """The product with a weight, [outputs, inputs], summed over the ranks of a group: this rank's shard."""

    @staticmethod
    def forward(ctx: _ShardContext, hidden: Tensor, weight: Tensor, group: Group) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.group = group
        return multiply_scatter(hidden, weight.t(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ShardContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        whole, (to_hidden,) = gather_multiply(gradient, [weight], ctx.group, keeps=True)
        assert whole is not None
        trained = ctx.needs_input_grad[1]
        return to_hidden, whole.flatten(0, -2).t() @ hidden.flatten(0, -2) if trained else None, None


class CastOnce(Protocol):
    """A layer that can cast its weight once for all micro-batches of a step."""

    def keep_weight(self) -> None: ...


class GradientSum:
    """The sum of one matrix's gradients. ``is_empty`` is a tensor, so that the same compiled code serves all
    micro-batches."""

    def __init__(self, matrix: Tensor, parameters: Sequence[Tensor]) -> None:
        self.total = torch.empty_like(matrix)
        self.is_empty = torch.ones((), dtype=torch.bool, device="cpu")
        self.parameters = parameters

    def multiply(
        self, hidden: Tensor, matrix: Tensor, trained: Tensor, group: Group | None, summed_over: Group | None = None
    ) -> Tensor:
        """Return ``hidden`` times ``matrix`` transposed; the backward pass, which ``trained`` enforces, adds to
        ``total``."""
        # Otherwise it is not passed: torch 2.11 would compile a gradient of zeros for a DTensor parameter.
        because = None if hidden.requires_grad else trained
        sums = self.total, self.is_empty
        product: Tensor = _Multiply.apply(hidden, matrix.detach(), because, *sums, group, summed_over)
        return product

    def give(self) -> None:
        """Set the parameters' gradients to views of the sum, unless it is empty; then begin a new sum."""
        if self.is_empty:
            return
        sizes = [len(local_tensor(weight)) for weight in self.parameters]
        for weight, part in zip(self.parameters, torch.split(self.total, sizes), strict=True):
            weight.grad = sharded_like(weight, part)
        self.is_empty.fill_(True)


@torch.library.custom_op("llmb::add_product", mutates_args=("total", "is_empty"))
def add_product(total: Tensor, is_empty: Tensor, gradient: Tensor, rows: Tensor) -> None:
    """Add ``gradient.t() @ rows`` to ``total``, or overwrite it if empty. gradient: [n, outputs]. rows: [n, inputs]."""
    if is_empty:
        torch.mm(gradient.t(), rows, out=total)
        is_empty.fill_(False)
    else:
        total.addmm_(gradient.t(), rows)


def _add_shard_product(
    total: Tensor, is_empty: Tensor, gradient: Tensor, shard: Tensor, weight: Tensor, name: str, size: int, rank: int
) -> Tensor:
    def to_weight(whole: Tensor) -> None:
        add_product(total, is_empty, gradient.flatten(0, -2), whole.flatten(0, -2))

    to_shard, _ = overlapped(shard, Group(name, size, rank), lambda: gradient @ weight, to_weight)
    return to_shard


add_shard_product = torch.library.custom_op(
    "llmb::add_shard_product", _add_shard_product, mutates_args=("total", "is_empty")
)


@add_shard_product.register_fake
def _(_total: Tensor, _is_empty: Tensor, _gradient: Tensor, shard: Tensor, *_: object) -> Tensor:
    return torch.empty_like(shard, memory_format=torch.contiguous_format)


class _SumContext(Context):
    total: Tensor
    is_empty: Tensor
    group: Group | None
    summed_over: Group | None


class _Multiply(torch.autograd.Function):
    """A product; its backward pass adds to ``total``, which is not saved, because saved tensors must not change."""

    @staticmethod
    def forward(
        ctx: _SumContext,
        hidden: Tensor,
        weight: Tensor,
        trained: Tensor | None,  # noqa: ARG004
        total: Tensor,
        is_empty: Tensor,
        group: Group | None,
        summed_over: Group | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.total, ctx.is_empty, ctx.group, ctx.summed_over = total, is_empty, group, summed_over
        if summed_over is not None:
            return multiply_scatter(hidden, weight.t(), summed_over)
        if group is not None:
            return gather_multiply(hidden, [weight.t()], group)[1][0]
        return functional.linear(hidden, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _SumContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        if ctx.group is not None:
            compute = add_shard_product if torch.compiler.is_compiling() else _add_shard_product
            to_hidden = compute(ctx.total, ctx.is_empty, gradient, hidden, weight, *ctx.group[:3])
        elif ctx.summed_over is not None:
            whole, (to_hidden,) = gather_multiply(gradient, [weight], ctx.summed_over, keeps=True)
            assert whole is not None
            add_product(ctx.total, ctx.is_empty, whole.flatten(0, -2), hidden.flatten(0, -2))
        else:
            add_product(ctx.total, ctx.is_empty, gradient.flatten(0, -2), hidden.flatten(0, -2))
            to_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
        return to_hidden, None, None, None, None, None, None


class Linear(nn.Linear):
    """A linear layer without bias."""

    gradients: GradientSum | None = None
    """Accumulates the weight's gradient; None if autograd does."""
    group: Group | None = None
    """Ranks whose shards of the sequence are gathered for the product; None if the input is whole."""
    summed_over: Group | None = None
    """Ranks whose products are summed and scattered along the sequence; None if they are not."""
    adapter: nn.Module | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.adapter = None

    def forward(self, hidden: Tensor) -> Tensor:
        return self.adapted(self.multiply(hidden), hidden)

    def multiply(self, hidden: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        if self.gradients is not None:
            return self.gradients.multiply(hidden, weight, weight, self.group, self.summed_over)
        if self.summed_over is not None:
            product: Tensor = _MultiplySummed.apply(hidden, weight, self.summed_over)
            return product
        return multiply(hidden, weight, self.group)

    def adapted(self, product: Tensor, hidden: object) -> Tensor:
        """Return ``product``, which may be split into heads, plus the adapter's output for ``hidden``, if any."""
        return product if self.adapter is None else product + self.adapter(hidden).view_as(product)


def multiply(hidden: Tensor, weight: Tensor, group: Group | None) -> Tensor:
    """Return ``hidden`` times ``weight`` transposed, [..., outputs]. group: see ``Linear``."""
    return functional.linear(hidden, weight) if group is None else multiply_shard(hidden, [weight], group)[0]


class Joined:
    """The linear layers ``names`` of ``owner``, which have the same input. Not a module: parameters keep their
    names."""

    def __init__(self, owner: nn.Module, *names: str) -> None:
        self.owner = owner
        self.names = names
        self.weight: Tensor | None = None
        """Local shards of the layers' weights as one matrix, [sum of outputs, inputs]; None if multiplied
        separately."""
        self.gradients: GradientSum | None = None

    @property
    def layers(self) -> tuple[Linear, ...]:
        """The current layers, looked up by name because transformations replace them."""
        return tuple(getattr(self.owner, name) for name in self.names)

    def __call__(self, hidden: Tensor, head_dim: int | None = None) -> tuple[Tensor, ...]:
        """Return the outputs of the layers, in order: [..., outputs] or, with ``head_dim``, [..., heads, head_dim]."""
        # If outputs were split into heads later, the compiler would copy the heads' gradients.
        if self.weight is not None:
            return self.adapted(self.split(self.multiply(hidden), head_dim), hidden)
        if self.group is None:
            return tuple(as_heads(layer(hidden), head_dim) for layer in self.layers)
        products = multiply_shard(hidden, [local_shard(layer.weight) for layer in self.layers], self.group)
        return self.adapted([as_heads(product, head_dim) for product in products], hidden)

    @property
    def group(self) -> Group | None:
        """The ranks whose shards of the sequence are gathered for the product; None if the input is whole."""
        return self.layers[0].group

    def adapted(self, products: Iterable[Tensor], hidden: object) -> tuple[Tensor, ...]:
        """Return the products plus the outputs of the layers' adapters for ``hidden``, if any."""
        return tuple(layer.adapted(product, hidden) for layer, product in zip(self.layers, products, strict=True))

    def split(self, product: Tensor, head_dim: int | None) -> tuple[Tensor, ...]:
        """Split the joint product into the products of the layers."""
        sizes = [len(local_shard(layer.weight)) for layer in self.layers]
        if head_dim is None:
            return torch.split(product, sizes, -1)
        return torch.split(as_heads(product, head_dim), [size // head_dim for size in sizes], -2)

    def multiply(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` times the transposed joined weight: [..., sum of outputs]."""
        if self.gradients is not None and self.weight is not None:
            return self.gradients.multiply(hidden, self.weight, local_shard(self.layers[0].weight), self.group)
        # The gradient of the joined weight goes to the parameters, as views and not as copies.
        matrix: Tensor = _AsOne.apply(self.weight, *(local_shard(layer.weight) for layer in self.layers))
        return multiply(hidden, matrix, self.group)


def as_heads(outputs: Tensor, head_dim: int | None) -> Tensor:
    return outputs if head_dim is None else torch.unflatten(outputs, -1, (-1, head_dim))


class _JoinedContext(FunctionCtx):
    rows: list[int]


class _AsOne(torch.autograd.Function):
    """Returns ``weight``, and passes its gradient to ``parts``, the parameters that share its memory."""

    # All tensors are one argument: if no part is trained, the compiler counts named arguments to see whether there is a
    # context, and would take the first of two parts for the weight.
    @staticmethod
    def forward(ctx: _JoinedContext, *weight_and_parts: Tensor) -> Tensor:
        weight, *parts = weight_and_parts
        ctx.rows = [len(part) for part in parts]
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: _JoinedContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch.split(gradient, ctx.rows)


def joined_layers(stage: nn.Module) -> Iterator[Joined]:
    """Yield every ``Joined`` of ``stage``, whether its layers are multiplied as one or not."""
    for module in stage.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Joined))


def join_products(stages: Iterable[nn.Module], adjacent: Callable[[Sequence[Linear]], Tensor]) -> None:
    """Make each ``Joined`` multiply its layers as one if all are plain; call it once parameters are allocated."""
    for stage in stages:
        for joined in joined_layers(stage):
            if all(map(is_plain, joined.layers)):
                joined.weight = adjacent(joined.layers)


def is_plain(layer: nn.Module) -> bool:
    """Return True if a layer is exactly a ``Linear``, not of a subclass, and has no hooks."""
    return type(layer) is Linear and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks)
