# SPDX-License-Identifier: Apache-2.0
"""The requirements of single ranks of a run: memory, FLOPs and collectives of one step."""

from typing import Literal, NamedTuple

from llmb.base.errors import UsageError
from llmb.catalogue.layout_check import rank_stages, stage_layers
from llmb.catalogue.records import Layout, Record
from llmb.runs.plan import EnginePlan

GIB = 2**30

PROGRAM = "llmb.engine.account.one_rank"
OWNERS = ("weights", "gradients", "optimizer", "activations", "other")
"""Owners of memory; weights are the parameters in all precisions, and their copies."""


class AccountJob(Record):
    """The request to the program that counts what one rank requires."""

    plan: EnginePlan
    rank: int


class CollectiveCount(Record):
    """Collectives of one kind and group in a step; ``bytes`` are all that one rank gathers, reduces, exchanges or
    sends.
    """

    kind: str
    group: str
    count: int
    bytes: int


class RankMemory(Record):
    """The peak memory of one rank: live bytes of tensors, without the overhead of allocator and libraries."""

    rank: int
    pp_stage: int
    peak_bytes: int
    bytes_by_owner: dict[str, int]
    """The bytes at the peak, for each of ``OWNERS``."""


class RankAccount(RankMemory):
    """The requirements of one rank in one step; ``flops_by_kind`` (products by precision, and attention) sums to
    ``flops``.
    """

    flops: int
    flops_by_kind: dict[str, int]
    collectives: tuple[CollectiveCount, ...]


class Margin(NamedTuple):
    """Memory of a GPU that is unavailable to tensors."""

    gib: float
    what: str


MARGINS = (
    Margin(0.9, "the driver: an H100 of 80 GiB reports 79.2 (85,029,158,912 bytes)"),
    Margin(0.6, "the CUDA context and loaded kernels"),
    Margin(1.5, "NCCL: some ten communicators with channels of 4 MiB buffers (NCCL_BUFFSIZE's default)"),
    Margin(1.0, "the allocator: requests are rounded to 512 bytes, expandable segments to 2 MiB pages"),
)
"""Margins; all except the first are estimates, unconfirmed on a GPU."""
MARGIN_GIB = sum(margin.gib for margin in MARGINS)
OUTSIDE_GIB = MARGINS[1].gib + MARGINS[2].gib
"""The part of the margin that a GPU reports as used, but PyTorch's allocator does not."""
SURE_MARGIN_GIB = MARGINS[0].gib


class MemoryUse(Record):
    """The memory of some ranks of a run; ``capacity_gib`` is a GPU's nominal memory, None if unknown."""

    method: Literal["exact", "estimate"] = "exact"
    capacity_gib: float | None
    assumptions: tuple[str, ...]
    ranks: tuple[RankMemory, ...]

    @property
    def fullest(self) -> RankMemory:
        return max(self.ranks, key=lambda each: each.peak_bytes)

    @property
    def needed_gib(self) -> float:
        """Memory that the fullest rank needs, including the margin."""
        return self.fullest.peak_bytes / GIB + MARGIN_GIB

    @property
    def fits(self) -> bool | None:
        return None if self.capacity_gib is None else self.needed_gib <= self.capacity_gib


def countable(plan: EnginePlan) -> tuple[EnginePlan, tuple[str, ...]]:
    """Return the plan, with tokens routed evenly unless experts have a capacity, and the assumptions about the data."""
    assumptions = []
    changes: dict[str, object] = {}
    if plan.recipe.packing is not None:
        assumptions.append("each sequence is one document")
    if plan.recipe.model.moe and plan.capacity_factor is None:
        changes["force_load_balancing"] = True
        assumptions.append("every expert gets the same number of tokens")
    return plan.model_copy(update=changes), tuple(assumptions)


def ranks_to_count(layout: Layout, rank: int | None, *, all_stages: bool) -> list[int]:
    """Return the ranks to count: ``rank``, one per stage, or the fullest.

    Raise UsageError for both, or an invalid rank.
    """
    if rank is None:
        return stage_ranks(layout) if all_stages else fullest_ranks(layout)
    if all_stages:
        raise UsageError("--rank and --all-stages cannot be combined", do="pass only one")
    if not 0 <= rank < layout.gpus:
        raise UsageError(f"--rank is {rank}; the layout has ranks 0 to {layout.gpus - 1}", do="pass one of these")
    return [rank]


def stage_ranks(layout: Layout) -> list[int]:
    """Return the first rank of each pipeline stage."""
    return [stage * (layout.gpus // layout.pp) for stage in range(layout.pp)]


def fullest_ranks(layout: Layout) -> list[int]:
    """Return the ranks of ``stage_ranks`` that may need the most memory: earlier stages hold more micro-batches."""
    layers = stage_layers(layout)
    counts = [sum(len(layers[number]) for number in rank_stages(layout, stage)) for stage in range(layout.pp)]
    ranks = stage_ranks(layout)
    return [ranks[at] for at in range(layout.pp) if at == layout.pp - 1 or counts[at] > max(counts[:at], default=-1)]
