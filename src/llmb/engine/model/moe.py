# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routers, which choose the experts of each token, and the experts, with or without a capacity."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from llmb.catalogue.records import MixtureOfExperts
from llmb.catalogue.records import Router as RouterName
from llmb.engine.collectives import Context
from llmb.engine.model.layers import GatedMLP
from llmb.engine.model.linear import CastOnce, local_shard

SCORES: dict[RouterName, Callable[[Tensor], Tensor]] = {
    "sigmoid-scaled-inputs": torch.sigmoid,
    "softmax-weighted-outputs": partial(torch.softmax, dim=-1),
}
"""Functions that map the chosen experts' logits, [n, top_k], to scores; softmax is over the chosen experts only."""


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token: maps [n, hidden] to scores and expert numbers, both [n, top_k]."""

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden_size))
        self.top_k = moe.top_k
        self.score = SCORES[moe.router]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(tokens, local_shard(self.weight))
        chosen = self.choose(logits)
        return self.score(logits.gather(-1, chosen).float()).to(tokens.dtype), chosen

    def choose(self, logits: Tensor) -> Tensor:
        """Return expert numbers, [n, top_k], from logits, [n, experts]."""
        return logits.topk(self.top_k, dim=-1).indices


class BalancedRouter(Router):
    """Chooses experts round-robin: loads differ by at most one. ``place``: this rank's index in its pipeline stage."""

    def __init__(self, router: Router, place: int) -> None:
        nn.Module.__init__(self)
        self.weight = router.weight
        self.top_k, self.score = router.top_k, router.score
        self.place = place

    def choose(self, logits: Tensor) -> Tensor:
        tokens, experts = logits.shape
        choices = tokens * self.top_k
        first = self.place * choices
        return (torch.arange(first, first + choices, device=logits.device) % experts).view(tokens, self.top_k)


def balanced_counts(place: int, choices: int, experts: int) -> list[int]:
    """Return how many of the ``choices`` of the ``BalancedRouter`` at ``place`` are for each expert."""
    rounds, more = divmod(choices, experts)
    first = place * choices
    return [rounds + ((expert - first) % experts < more) for expert in range(experts)]


def grouped_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Multiply groups of rows, [n, k], by [groups, k, m]; return [n, m]. ``counts``: rows of each group, maybe zero."""
    if not runs_grouped(rows, weights):
        return loop_matmul(rows, weights, counts)
    return torch._grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))


def runs_grouped(rows: Tensor, weights: Tensor) -> bool:
    """Return True if torch's grouped product supports these operands; it requires rows aligned to 16 bytes."""
    # Its meta function, which the compiler uses, supports only bf16.
    dtypes = [torch.bfloat16] if torch.compiler.is_compiling() else [torch.bfloat16, torch.float32]
    aligned = all(size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    return aligned and rows.dtype in dtypes


def loop_matmul(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Compute ``grouped_matmul`` with one product per group: slower, because the host waits for ``counts``."""
    groups = torch.split(rows, counts.tolist())
    return torch.cat([group @ weight for group, weight in zip(groups, weights, strict=True)])


def swiglu(gate_up: Tensor) -> Tensor:
    """Apply SwiGLU to gate and up, [n, 2 * features]; return [n, features]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


Products = Callable[["Experts", Tensor, list[int], int], Tensor]
"""Computes the experts' outputs from their rows, each expert's number of rows, and the part's number."""


class Experts(nn.Module):
    """Gated feed-forward layers with stacked matrices. Inputs are rows, [n, hidden], in the order of their experts."""

    kept: Sequence[CastOnce] = ()
    """Layers with weights that are cast once per step."""
    on_rows: Callable[[Tensor], None] | None = None
    """Called with the number of rows for the experts of each ep rank, [ep], if ranks exchange these numbers."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden_size, 2, ffn_hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, ffn_hidden_size, hidden_size))
        self.activate: Callable[[Tensor], Tensor] = swiglu
        self.products: Products | None = None

    def forward(self, parts: Sequence["Sent"]) -> list[Tensor]:
        """Return the outputs of each part, [n, hidden], which may be in transit: see ``Sent.complete``."""
        # FSDP gathers experts later than the rest of their block, so they are cast here and not at its start.
        for layer in self.kept:
            layer.keep_weight()
        return [part.send_back(self.process(part, number)) for number, part in enumerate(parts)]

    def process(self, part: "Sent", number: int) -> Tensor:
        rows = part.arrive(part.rows)
        if self.products is None:
            inner = self.activate(grouped_matmul(rows, self.matrices("gate_up_proj"), part.counts))
            return grouped_matmul(inner, self.matrices("down_proj"), part.counts)
        host_counts = part.counts.tolist() if part.host_counts is None else part.host_counts
        return self.products(self, rows, host_counts, number)

    def send(self, parts: Sequence["Sent"]) -> list["Sent"]:
        """Begin to send each part's rows to the ranks of their experts; here all experts are on this rank."""
        return list(parts)

    def matrices(self, name: str) -> Tensor:
        """Return one matrix per expert of this rank: [experts, inputs, outputs]."""
        return local_shard(self.get_parameter(name)).flatten(2)


def permute(rows: Tensor, order: Tensor, inverse: Tensor, *, has_gaps: bool = False) -> Tensor:
    """Return rows permuted by ``order``; the gradient by ``inverse``. With ``has_gaps``, indices past the end mean
    zeros or drops."""
    permuted: Tensor = _Arrange.apply(rows, order, inverse, has_gaps)
    return permuted


class _ArrangeContext(Context):
    has_gaps: bool


class _Arrange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ArrangeContext, rows: Tensor, order: Tensor, inverse: Tensor, has_gaps: bool) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.has_gaps = has_gaps
        return _select(rows, order, has_gaps=has_gaps)

    @staticmethod
    @once_differentiable
    def backward(ctx: _ArrangeContext, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _select(gradient, inverse, has_gaps=ctx.has_gaps), None, None, None


def _select(rows: Tensor, order: Tensor, *, has_gaps: bool) -> Tensor:
    if not has_gaps:
        return rows.index_select(0, order)
    missing = order == len(rows)
    return rows.index_select(0, order.masked_fill(missing, 0)).masked_fill(missing.unsqueeze(-1), 0)


class Routed(NamedTuple):
    """Tokens that are routed to experts: a micro-batch's, or one of several equal parts of them."""

    hidden: Tensor
    """Input of the router for the whole micro-batch: [batch, seq, hidden]."""
    rows: Tensor
    """Copies of tokens ordered by expert, [n, hidden], scaled if the router scales inputs; with a capacity, possibly
    padding."""
    counts: Tensor
    """Number of rows of each expert, [experts]."""
    order: Tensor
    """Index of each row's choice in the order of tokens, [n]; the number of choices for padding."""
    places: Tensor
    """For each choice of each token, the index of its row, [tokens, top_k]; n for a dropped choice."""
    weights: Tensor | None
    """Weights of the outputs, [tokens, top_k]; None if the router scales inputs."""


def unchanged(rows: Tensor) -> Tensor:
    return rows


class Sent(NamedTuple):
    """One part's rows for experts, which may be in transit until ``arrive`` returns."""

    rows: Tensor
    counts: Tensor
    """Rows of each expert, on the device."""
    host_counts: list[int] | None
    """Rows of each expert, on the host; None if unknown."""
    arrive: Callable[[Tensor], Tensor] = unchanged
    send_back: Callable[[Tensor], Tensor] = unchanged
    """Begins to send outputs to the ranks of their rows; ``complete`` waits for its result."""
    complete: Callable[[Tensor], Tensor] = unchanged


class MoELayer(nn.Module):
    """Routed experts and, if the model has one, a shared expert that processes every token."""

    SHARED: ClassVar[tuple[str, ...]] = ("begin_shared_expert", "end_shared_expert")
    PARTS: ClassVar[tuple[str, ...]] = ("run_experts", *SHARED)

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.experts = Experts(hidden_size, moe.ffn_hidden_size, moe.experts)
        self.router = Router(hidden_size, moe)
        shared = moe.shared_ffn_hidden_size
        self.shared_expert = None if shared is None else GatedMLP(hidden_size, shared)
        self.moe = moe
        self.capacity_factor: float | None = None
        self.overlaps_dispatch = False
        """True if the first products of the shared expert are computed while rows are sent to experts."""
        self.parts = 1
        """Number of equal parts of a micro-batch's tokens, which are sent one after the other."""
        self.scales_inputs = moe.router == "sigmoid-scaled-inputs"

    def forward(self, hidden: Tensor) -> Tensor:
        routed = self.dispatch(hidden)
        outputs, shared = self.run(routed, {part: getattr(self, part) for part in self.PARTS})
        return self.combine(routed, outputs, shared)

    def run(
        self, routed: Sequence[Routed], parts: Mapping[str, Callable[..., Any]]
    ) -> tuple[list[Tensor], Tensor | None]:
        """Return the outputs of the routed experts and of the shared expert, if any. ``parts``: functions named by
        ``PARTS``."""
        sent, early, begin = self.send(routed), self.overlaps_dispatch, parts["begin_shared_expert"]
        begun = begin(routed[0].hidden) if early else None
        outputs = parts["run_experts"](sent)
        shared = parts["end_shared_expert"](begun if early else begin(routed[0].hidden))
        return [part.complete(output) for part, output in zip(sent, outputs, strict=True)], shared

    @property
    def balances(self) -> bool:
        """True if the host can compute the experts' numbers of rows without the tokens."""
        return self.capacity_factor is not None or isinstance(self.router, BalancedRouter)

    def capacity(self, choices: int) -> int | None:
        """Return an expert's number of rows: Megatron-LM's ``get_capacity``, at most one per token; None if not
        limited."""
        if self.capacity_factor is None:
            return None
        return min(ceil(choices / self.moe.experts * self.capacity_factor), choices // self.moe.top_k)

    def send(self, routed: Sequence[Routed]) -> list[Sent]:
        counts = (self.host_counts(len(part.rows), number) for number, part in enumerate(routed))
        return self.experts.send(
            [Sent(part.rows, part.counts, each) for part, each in zip(routed, counts, strict=True)]
        )

    def run_experts(self, sent: Sequence[Sent]) -> list[Tensor]:
        outputs: list[Tensor] = self.experts(sent)
        return outputs

    def begin_shared_expert(self, hidden: Tensor) -> tuple[Tensor, ...] | None:
        return None if self.shared_expert is None else self.shared_expert.begin(hidden)

    def end_shared_expert(self, begun: tuple[Tensor, ...] | None) -> Tensor | None:
        return None if self.shared_expert is None or begun is None else self.shared_expert.end(*begun)

    def dispatch(self, hidden: Tensor) -> list[Routed]:
        tokens = hidden.flatten(0, -2)
        parts = (each.chunk(self.parts) for each in (tokens, *self.router(tokens)))
        return [self._sort(hidden, *part) for part in zip(*parts, strict=True)]

    def _sort(self, hidden: Tensor, tokens: Tensor, scores: Tensor, chosen: Tensor) -> Routed:
        # Expanded before sorting: the gradient of a gather with repeated sources would not be reproducible.
        copies = tokens.unsqueeze(1).expand(*chosen.shape, -1)
        rows = (copies * scores.unsqueeze(-1) if self.scales_inputs else copies).flatten(0, 1)
        weights = None if self.scales_inputs else scores
        capacity = self.capacity(chosen.numel())
        if capacity is None:
            order = chosen.flatten().argsort(stable=True)
            places = order.argsort().view_as(chosen)
            counts = count_choices(chosen, self.moe.experts)
        else:
            order, places = fill_to_capacity(scores.detach(), chosen, self.moe.experts, capacity)
            counts = torch.full((self.moe.experts,), capacity, device=chosen.device)
        rows = permute(rows, order, places.flatten(), has_gaps=capacity is not None)
        return Routed(hidden, rows, counts, order, places, weights)

    def combine(self, routed: Sequence[Routed], outputs: Sequence[Tensor], shared: Tensor | None) -> Tensor:
        """Sum each token's outputs of experts, weighted unless inputs were; add the shared expert's output, if any."""
        sums = [self._sum(part, output) for part, output in zip(routed, outputs, strict=True)]
        summed = (sums[0] if len(sums) == 1 else torch.cat(sums)).view_as(routed[0].hidden)
        return summed if shared is None else shared + summed

    def _sum(self, routed: Routed, outputs: Tensor) -> Tensor:
        # A gather restores the order of tokens: a scatter with repeated targets would not be reproducible.
        has_gaps = self.capacity_factor is not None
        rows = permute(outputs, routed.places.flatten(), routed.order, has_gaps=has_gaps)
        rows = torch.unflatten(rows, 0, routed.places.shape)
        weighted = rows if routed.weights is None else rows * routed.weights.unsqueeze(-1)
        return weighted.sum(1)

    def host_counts(self, rows: int, part: int) -> list[int] | None:
        """Return a part's number of rows on this rank for each expert; None if it depends on the tokens."""
        if self.capacity_factor is not None:
            return [rows // self.moe.experts] * self.moe.experts
        if isinstance(self.router, BalancedRouter):
            return balanced_counts(self.router.place * self.parts + part, rows, self.moe.experts)
        return None


def count_choices(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen: [experts]. ``bincount`` would have a shape that depends on the data."""
    return (chosen.reshape(-1, 1) == torch.arange(experts, device=chosen.device)).sum(0)


def fill_to_capacity(scores: Tensor, chosen: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return ``order`` and ``places`` of ``Routed`` by Megatron-LM's drop policy ``probs``
    (``topk_softmax_with_capacity``, commit 64cb6bd). Scores must be positive."""
    choices = chosen.numel()
    shape = len(chosen), experts
    gates = scores.new_zeros(shape).scatter(1, chosen, scores)
    numbers = torch.arange(choices, device=chosen.device).view_as(chosen)
    number_of = chosen.new_full(shape, choices).scatter(1, chosen, numbers)
    tokens = gates.topk(capacity, dim=0, sorted=False).indices
    order = number_of.gather(0, tokens).T.flatten()
    # All padding is written to the last place, which is then removed.
    rows = torch.arange(len(order), device=chosen.device)
    places = chosen.new_full((choices + 1,), len(order)).scatter(0, order, rows)[:choices]
    return order, places.view_as(chosen)
