# SPDX-License-Identifier: Apache-2.0
"""What single ranks of a run take: memory, FLOPs and collectives of one step."""

from llmb.catalogue.records import Record
from llmb.runs.plan import EnginePlan

PROGRAM = "llmb.engine.account.one_rank"
OWNERS = ("weights", "gradients", "optimizer", "activations", "other")
"""Owners of memory. Weights are parameters in all their precisions and copies."""


class AccountJob(Record):
    """What the program that counts is asked for."""

    plan: EnginePlan
    rank: int


class CollectiveCount(Record):
    """Collectives of one kind in one group: their number in a step, and the bytes of their messages together.

    A message is the whole of what is gathered, reduced, exchanged or sent, as it is on one rank.
    """

    kind: str
    group: str
    count: int
    bytes: int


class RankAccount(Record):
    """What one rank takes in one step: live bytes of tensors, without what allocator and libraries take beside them."""

    rank: int
    pp_stage: int
    peak_bytes: int
    bytes_by_owner: dict[str, int]
    """At the peak, for each of ``OWNERS``."""
    flops: int
    collectives: tuple[CollectiveCount, ...]
