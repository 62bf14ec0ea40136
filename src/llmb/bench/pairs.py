# SPDX-License-Identifier: Apache-2.0
"""Nodes measured alone, in pairs and as a group: who meets whom and when, and the records of it. Pure."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from llmb.bench.cases import SQUARE
from llmb.bench.collectives import JOB as COLLECTIVES_JOB
from llmb.bench.collectives import CollectiveJob, CollectiveResult, algorithm_gb_per_s, bus_factor
from llmb.bench.gpus import gpus_job
from llmb.bench.records import JOB as PRODUCT_JOB
from llmb.bench.records import PartReport
from llmb.catalogue.records import Record
from llmb.runs.host import Device

JOB = "pairs_job.json"
"""In the folder of the job."""
LEAST_NODES = 3
PRODUCT_S = 2.0
MIB = 2**20
SIZES: Mapping[Device, tuple[int, ...]] = {"cuda": (1024, 32 * MIB, 256 * MIB), "cpu": (1024, MIB // 4, 4 * MIB)}
"""The smallest shows the latency, the largest the bandwidth; one call of it takes half a second at 1 GB/s."""

ALONE_S, PAIR_S, GROUP_S, GROUP_PER_NODE_S = 120.0, 90.0, 90.0, 0.5
"""Limits. A measurement starts processes that load torch and connect, which takes much longer than it itself."""
STEP_S = 20.0
"""How much longer the scheduler may take for a step."""
END_S = 60.0
"""For the result to be written."""
USUAL_S: Mapping[str, float] = {"begin": 15.0, "phase": 18.0, "node": 0.1}


class PairJob(Record):
    """What is measured."""

    device: Device
    nodes: int
    per_node: int
    """Processes."""


class PairFigures(Record):
    """Product: that of the slowest process. Bandwidth: the bus bandwidth of the largest all-reduce."""

    tflops: float | None = None
    gb_per_s: float | None = None
    latency_s: float | None = None


class NodeReading(Record):
    """What one node measured alone."""

    node: int
    figures: PairFigures = PairFigures()
    problem: str | None = None


class PairReading(Record):
    """One pair in one round. ``far``: not neighbors in the list of nodes."""

    first: int
    second: int
    round: int
    far: bool
    figures: PairFigures
    problem: str | None

    def has(self, nodes: Container[int]) -> bool:
        """Whether one of them is in it."""
        return self.first in nodes or self.second in nodes

    def other(self, node: int) -> int:
        return self.first + self.second - node


class NodeVerdict(Record):
    """Whether a node is fit; None is undecided, with the reason as evidence."""

    node: str
    fit: bool | None
    evidence: tuple[str, ...] = ()


class PairwiseResult(Record):
    """What a job decided."""

    schema_version: Literal[1] = 1
    started_at: str
    nodes: tuple[NodeVerdict, ...]
    notes: tuple[str, ...] = ()
    expected_s: float
    limit_s: float
    took_s: float
    group: PairFigures | None = None
    """None if there was none."""
    alone: tuple[NodeReading, ...] = ()
    pairs: tuple[PairReading, ...] = ()

    def named(self, *, fit: bool | None) -> list[str]:
        return [one.node for one in self.nodes if one.fit is fit]


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs that measure at the same time, each node in one of them at most."""

    pairs: tuple[tuple[int, int], ...]
    far: bool

    def partner(self, node: int) -> int | None:
        """None for a node that pauses."""
        return next((sum(pair) - node for pair in self.pairs if node in pair), None)


def rounds(nodes: int) -> list[Round]:
    """Every node has three partners or more if there are so many; of fewer nodes, all meet.

    Neighbors come first, then nodes at half the length of the list, whom other switches connect, so that their rounds
    are compared each for itself. If the number is odd, one node pauses in each round, none in two of them.
    """
    order = list(range(nodes))
    if nodes < 4:
        return [Round((pair,), far=False) for pair in combinations(order, 2)]
    half = nodes // 2
    if nodes % 2 == 0:
        across = tuple((node, node + half) for node in range(half))
        return [Round(_matched(order), far=False), Round(_matched([*order[1:], 0]), far=False), Round(across, far=True)]
    distant = [(half + 1 + step * half) % nodes for step in range(nodes)]
    return [Round(_matched(walk[first:]), far=walk is distant) for walk in (order, distant) for first in (0, 1)]


def _matched(walk: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The first with the second, the third with the fourth, and so on."""
    pairs = (sorted(walk[place : place + 2]) for place in range(0, len(walk) - 1, 2))
    return tuple((first, second) for first, second in pairs)


def pair_files(device: Device, nodes: int, per_node: int) -> dict[str, str]:
    """What the programs of the steps read, and what is measured, by the names of the files."""
    collectives = CollectiveJob(
        device=device, collectives=("all_reduce",), sizes=SIZES[device], warm_ups=5, iterations=20
    )
    records: dict[str, Record] = {
        PRODUCT_JOB: gpus_job(device, PRODUCT_S),
        COLLECTIVES_JOB: collectives,
        JOB: PairJob(device=device, nodes=nodes, per_node=per_node),
    }
    return {name: record.model_dump_json() for name, record in records.items()}


def collective_figures(result: CollectiveResult) -> tuple[PairFigures, str | None]:
    """Bandwidth and latency, and what is wrong with them."""
    timed = [(row.size_bytes, row.in_place) for row in result.rows if row.in_place]
    wrong = sum(way.wrong or 0 for _, way in timed)
    if not timed:
        return PairFigures(), "nothing could be timed"
    (_, small), (size, large) = timed[0], timed[-1]
    bandwidth = algorithm_gb_per_s(size, large.time_s) * bus_factor("all_reduce", len(result.ranks))
    figures = PairFigures(gb_per_s=bandwidth, latency_s=small.time_s)
    return figures, f"wrong results, in {wrong:,} elements" if wrong else None


def product_figures(parts: Sequence[PartReport], device: Device) -> tuple[PairFigures, str | None]:
    """The rate of the slowest process, and what is wrong with it."""
    failed = [f"local rank {part.local_rank}: {part.timing.reason}" for part in parts if part.timing.seconds is None]
    slowest = max((part.timing.seconds for part in parts if part.timing.seconds), default=None)
    tflops = None if slowest is None else 2 * SQUARE[device] ** 3 / slowest / 1e12
    return PairFigures(tflops=tflops), "; ".join(failed) or None
