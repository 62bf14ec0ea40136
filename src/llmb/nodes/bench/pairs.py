# SPDX-License-Identifier: Apache-2.0
"""Plans measurements of nodes alone, in pairs and as a group, and decides which nodes are unfit.

A bad pair does not show which of its nodes is bad, but their other pairs do. A node is unfit if its own results are
bad or if, without pairs with worse nodes, at least two and more than half of its pairs are bad: all of them, or two
whose other nodes are good in most of their other pairs. If many nodes are bad, they are undecided instead."""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.nodes.bench.device_bench import SQUARE
from llmb.nodes.bench.measurements import JOB as PRODUCT_JOB
from llmb.nodes.bench.measurements import PartReport
from llmb.nodes.bench.protocol import COLLECTIVES_JOB, CollectiveJob, CollectiveResult, algorithm_gb_per_s, bus_factor
from llmb.nodes.bench.slow_gpus import gpus_job
from llmb.readers.samples.host import Device

JOB = "pairs_job.json"
"""Name of the file with the request, in the folder of the job."""
LEAST_NODES = 3
PRODUCT_S = 2.0
MIB = 2**20
SIZES: Mapping[Device, tuple[int, ...]] = {"cuda": (1024, 32 * MIB, 256 * MIB), "cpu": (1024, MIB // 4, 4 * MIB)}
"""Message sizes in bytes: the smallest shows latency, the largest bandwidth."""

ALONE_S, PAIR_S, GROUP_S, GROUP_PER_NODE_S = 120.0, 90.0, 90.0, 0.5
"""Time limits in seconds. Starting processes, loading torch and connecting take most of the time."""
STEP_S = 20.0
"""Additional seconds that the scheduler may take to start and end a step."""
END_S = 60.0
"""Additional seconds for writing the result."""
USUAL_S: Mapping[str, float] = {"begin": 15.0, "phase": 18.0, "node": 0.1}


class PairJob(Record):
    """The request for a job that measures nodes alone, in pairs, and all together."""

    device: Device
    nodes: int
    per_node: int
    """The number of processes per node."""


class PairFigures(Record):
    """The rate of a matrix product in the slowest process, and the bus bandwidth and latency of all-reduce."""

    tflops: float | None = None
    gb_per_s: float | None = None
    latency_s: float | None = None


class NodeReading(Record):
    """The measurements of a node alone, and what went wrong, if anything."""

    node: int
    figures: PairFigures = PairFigures()
    problem: str | None = None


class PairReading(Record):
    """The measurements of a pair of nodes in a round; ``far`` is True if they are half the list apart."""

    first: int
    second: int
    round: int
    far: bool
    figures: PairFigures
    problem: str | None

    def has(self, nodes: Container[int]) -> bool:
        """Return whether the pair contains any of ``nodes``."""
        return self.first in nodes or self.second in nodes

    def other(self, node: int) -> int:
        return self.first + self.second - node


class NodeVerdict(Record):
    """The verdict on a node, with evidence; ``fit`` is None if it is undecided."""

    node: str
    fit: bool | None
    evidence: tuple[str, ...] = ()


class PairwiseResult(Record):
    """The verdicts of a job, and the measurements on which they are based."""

    schema_version: Literal[1] = 1
    started_at: str
    nodes: tuple[NodeVerdict, ...]
    notes: tuple[str, ...] = ()
    expected_s: float
    limit_s: float
    took_s: float
    group: PairFigures | None = None
    """The measurement of all fit nodes as a group; None if it was not made or failed."""
    alone: tuple[NodeReading, ...] = ()
    pairs: tuple[PairReading, ...] = ()

    def names(self, *, fit: bool | None) -> list[str]:
        return [one.node for one in self.nodes if one.fit is fit]


@dataclass(frozen=True, slots=True)
class Round:
    """Pairs that are measured concurrently; each node is in at most one of them."""

    pairs: tuple[tuple[int, int], ...]
    far: bool

    def partner(self, node: int) -> int | None:
        """Return the node's partner, or None if the node is in no pair."""
        return next((sum(pair) - node for pair in self.pairs if node in pair), None)


def rounds(nodes: int) -> list[Round]:
    """Return rounds in which every node has at least three partners; with fewer than four nodes, all pairs.

    Neighbors in the list are paired first, then nodes half the list apart, which different switches may connect. If the
    number of nodes is odd, each round omits a different node.
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
    pairs = (sorted(walk[place : place + 2]) for place in range(0, len(walk) - 1, 2))
    return tuple((first, second) for first, second in pairs)


def pair_files(device: Device, nodes: int, per_node: int) -> dict[str, str]:
    """Return the contents of the job's input files, by file name."""
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
    """Return the bandwidth and latency of all-reduce, and the problem with the result, if any."""
    timed = [(row.size_bytes, row.in_place) for row in result.rows if row.in_place]
    wrong = sum(way.wrong or 0 for _, way in timed)
    if not timed:
        return PairFigures(), "no collective could be timed"
    (_, small), (size, large) = timed[0], timed[-1]
    bandwidth = algorithm_gb_per_s(size, large.time_s) * bus_factor("all_reduce", len(result.ranks))
    figures = PairFigures(gb_per_s=bandwidth, latency_s=small.time_s)
    return figures, f"{wrong:,} elements with wrong values" if wrong else None


def product_figures(parts: Sequence[PartReport], device: Device) -> tuple[PairFigures, str | None]:
    """Return the rate of the slowest process, and the problems of processes that failed, if any."""
    failed = [f"local rank {part.local_rank}: {part.timing.reason}" for part in parts if part.timing.seconds is None]
    slowest = max((part.timing.seconds for part in parts if part.timing.seconds), default=None)
    tflops = None if slowest is None else 2 * SQUARE[device] ** 3 / slowest / 1e12
    return PairFigures(tflops=tflops), "; ".join(failed) or None


DATA = Path(__file__).with_name("pairs.yaml")
HALF_NORMAL = 2.5
"""Standard deviation of a normal distribution, divided by its upper half's median distance from that half's median."""
MANY = 16
"""With at least this number of nodes, neighboring and distant pairs are compared separately."""
LEAST_PAIRS = 2
MOST_NOTES = 5


class PairRule(Record):
    """The content of ``pairs.yaml``: the limits for verdicts on nodes."""

    sigmas: float
    below_pct: float
    most_pct: float
    latency_below_pct: float
    latency_most_pct: float
    cpu_below_pct: float
    least_nodes: int
    most_share: float
    most_failed_share: float
    group_below_pct: float


@cache
def pair_rule(device: Device) -> PairRule:
    rule = read_file(DATA, PairRule)
    limits = ("below_pct", "most_pct", "latency_below_pct", "latency_most_pct")
    return rule.model_copy(update=dict.fromkeys(limits, rule.cpu_below_pct)) if device == "cpu" else rule


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of measurement: ``speed`` returns it as a speed, where higher is better, and ``text`` formats a speed."""

    speed: Callable[[PairFigures], float | None]
    text: Callable[[float], str]
    is_latency: bool = False


PRODUCT = Kind(lambda figures: figures.tflops, lambda speed: f"{speed:.3g} TFLOPS")
BANDWIDTH = Kind(lambda figures: figures.gb_per_s, lambda speed: f"{speed:.3g} GB/s")
LATENCY = Kind(
    lambda figures: 1 / figures.latency_s if figures.latency_s else None,
    lambda speed: f"{1e6 / speed:.3g} us",
    is_latency=True,
)


@dataclass(frozen=True, slots=True)
class Usual:
    """The typical speed of good nodes, and the percentage below this speed beyond which a node is slow."""

    middle: float
    limit_pct: float

    def below_pct(self, speed: float) -> float:
        return 100 * (1 - speed / self.middle)

    def is_slow(self, speed: float) -> bool:
        return self.below_pct(speed) > self.limit_pct

    def evidence(self, kind: Kind, speed: float) -> str:
        usual = kind.text(self.middle)
        if kind.is_latency:
            return f"{kind.text(speed)}, {self.middle / speed:.2g} times {usual}"
        return f"{kind.text(speed)}, {self.below_pct(speed):.0f} % below {usual}"


def usual(speeds: Sequence[float], kind: Kind, rule: PairRule) -> Usual | None:
    """Compute the typical speed and the limit from the faster half of ``speeds``; return None if there are too few."""
    if len(speeds) < rule.least_nodes:
        return None
    faster = sorted(speeds, reverse=True)[: (len(speeds) + 1) // 2]
    middle = median(faster)
    spread_pct = 100 * HALF_NORMAL * median(abs(speed - middle) for speed in faster) / middle
    least, most = (
        (rule.latency_below_pct, rule.latency_most_pct) if kind.is_latency else (rule.below_pct, rule.most_pct)
    )
    return Usual(middle, min(most, max(least, rule.sigmas * spread_pct)))


@dataclass(frozen=True, slots=True)
class Readings:
    """All measurements of a job; ``names`` are the job's nodes, to which other fields refer by index."""

    names: Sequence[str]
    alone: Mapping[int, NodeReading]
    pairs: Sequence[PairReading]
    group: tuple[PairFigures, str | None] | None = None
    """The measurement of all fit nodes as a group, and the problem, if any; None if it was not made."""


@dataclass
class Suspicion:
    """Evidence, by node index, against failed nodes, and against nodes that are slow compared with others."""

    failed: dict[int, list[str]] = field(default_factory=dict)
    slow: dict[int, list[str]] = field(default_factory=dict)
    pairs: list[PairReading] = field(default_factory=list)
    """The pairs that can be judged."""
    bad: dict[PairReading, str] = field(default_factory=dict)
    """The problem of each slow or failed pair."""
    notes: list[str] = field(default_factory=list)

    def cleared(self) -> set[int]:
        """Return the nodes without evidence against them that are in a good pair with another such node."""
        good = (pair for pair in self.pairs if pair not in self.bad)
        free = (pair for pair in good if not (pair.has(self.failed) or pair.has(self.slow)))
        return {node for pair in free for node in (pair.first, pair.second)}


def decide(readings: Readings, rule: PairRule) -> tuple[list[NodeVerdict], list[str]]:
    """Return the verdicts in the order of the nodes, and notes for the user."""
    state = Suspicion(failed=dict(_failures(readings)))
    for kind in (PRODUCT, BANDWIDTH):
        well = [reading for reading in readings.alone.values() if reading.node not in state.failed]
        speeds = {reading.node: speed for reading in well if (speed := kind.speed(reading.figures))}
        typical = usual([*speeds.values()], kind, rule)
        for node, speed in speeds.items():
            if typical and typical.is_slow(speed):
                state.slow.setdefault(node, []).append(f"alone: {typical.evidence(kind, speed)}")
    state.pairs = [pair for pair in readings.pairs if not pair.has(state.failed)]
    _judge_pairs(state, rule)
    _blame(readings, state)
    return list(_verdicts(readings, state, rule)), [*state.notes, *_paths(readings, state)]


def _failures(readings: Readings) -> Iterator[tuple[int, list[str]]]:
    for node in range(len(readings.names)):
        alone = readings.alone.get(node)
        if alone is None:
            yield node, ["alone: no result"]
        elif alone.problem:
            yield node, [f"alone: {alone.problem}"]


def _judge_pairs(state: Suspicion, rule: PairRule) -> None:
    state.bad = {pair: pair.problem for pair in state.pairs if pair.problem}
    alike = [state.pairs]
    if len(best_of_nodes(state.pairs, BANDWIDTH)) >= MANY:
        _leave_out_slow_distance(state, rule)
        alike = [[pair for pair in state.pairs if pair.far is far] for far in (False, True)]
    for same in alike:
        for kind in (BANDWIDTH, LATENCY):
            typical = usual([*best_of_nodes(same, kind).values()], kind, rule)
            for pair in same:
                speed = None if pair.problem else kind.speed(pair.figures)
                if typical and speed and typical.is_slow(speed):
                    state.bad.setdefault(pair, typical.evidence(kind, speed))


def _leave_out_slow_distance(state: Suspicion, rule: PairRule) -> None:
    """Drop the pairs at one distance as evidence if they are typically slower than those at the other distance."""
    alike = {far: [pair for pair in state.pairs if pair.far is far] for far in (False, True)}
    usual_of = {far: usual([*best_of_nodes(alike[far], BANDWIDTH).values()], BANDWIDTH, rule) for far in alike}
    for far, names in {True: ("far apart", "of neighbors"), False: ("of neighbors", "far apart")}.items():
        slower, faster = usual_of[far], usual_of[not far]
        if slower and faster and faster.is_slow(slower.middle):
            what = faster.evidence(BANDWIDTH, slower.middle)
            state.notes.append(f"pairs {names[0]} in the node list: {what} of pairs {names[1]}; check the network")
            state.pairs = alike[not far]
            state.bad = {pair: text for pair, text in state.bad.items() if pair.far is not far}


def best_of_nodes(pairs: Iterable[PairReading], kind: Kind) -> dict[int, float]:
    """Return each node's best speed among its pairs, on which a single bad partner has no effect."""
    best: dict[int, float] = {}
    for pair in pairs:
        speed = None if pair.problem else kind.speed(pair.figures)
        for node in (pair.first, pair.second):
            if speed:
                best[node] = max(speed, best.get(node, speed))
    return best


def _blame(readings: Readings, state: Suspicion) -> None:
    remaining = [pair for pair in state.pairs if not pair.has(state.slow)]
    while (worst := _worst(remaining, state.bad)) is not None:
        remaining = [pair for pair in remaining if not pair.has((worst,))]
        state.slow[worst] = []
    for node, evidence in state.slow.items():
        of_it = [pair for pair in state.bad if pair.has((node,))]
        evidence += [f"with {readings.names[pair.other(node)]}: {state.bad[pair]}" for pair in of_it]


def _worst(pairs: Sequence[PairReading], bad: Container[PairReading]) -> int | None:
    by_node: dict[int, list[PairReading]] = {}
    for pair in pairs:
        for node in (pair.first, pair.second):
            by_node.setdefault(node, []).append(pair)
    shares = {node: sum(pair in bad for pair in of_it) / len(of_it) for node, of_it in by_node.items()}
    slow = [node for node in by_node if _is_slow(node, by_node, bad)]
    return max(slow, key=lambda node: (shares[node], len(by_node[node])), default=None)


def _is_slow(node: int, by_node: Mapping[int, Sequence[PairReading]], bad: Container[PairReading]) -> bool:
    partners = [pair.other(node) for pair in by_node[node] if pair in bad]
    if len(partners) < LEAST_PAIRS or 2 * len(partners) <= len(by_node[node]):
        return False
    others = [[pair in bad for pair in by_node[partner] if not pair.has((node,))] for partner in partners]
    return len(partners) == len(by_node[node]) or sum(2 * sum(each) < len(each) for each in others) >= LEAST_PAIRS


def _verdicts(readings: Readings, state: Suspicion, rule: PairRule) -> Iterator[NodeVerdict]:
    total, compared = len(readings.names), len(readings.names) - len(state.failed)
    unclear = {*range(total)} - state.failed.keys() - state.cleared()
    suspects = unclear | state.slow.keys()
    many_failed = len(state.failed) > rule.most_failed_share * total
    many_slow = len(suspects) > rule.most_share * compared and compared >= rule.least_nodes
    if many_failed:
        state.notes.append(f"{len(state.failed)} of {total} nodes failed; the software or settings may be the cause")
    if many_slow:
        what = f"{len(suspects)} of {compared} nodes are slow, or their pairs fail"
        state.notes.append(f"{what}; the network, such as a switch, or its settings may be the cause, not the nodes")
    for node, name in enumerate(readings.names):
        if node in state.failed:
            yield NodeVerdict(node=name, fit=None if many_failed else False, evidence=tuple(state.failed[node]))
        elif compared < rule.least_nodes:
            yield NodeVerdict(node=name, fit=None, evidence=("there are too few other nodes to compare it with",))
        elif node in state.slow:
            yield NodeVerdict(node=name, fit=None if many_slow else False, evidence=tuple(state.slow[node]))
        elif node in unclear:
            yield NodeVerdict(node=name, fit=None, evidence=("it has no good pair with a fit node",))
        else:
            yield NodeVerdict(node=name, fit=True)


def _paths(readings: Readings, state: Suspicion) -> Iterator[str]:
    cleared = state.cleared()
    paths = [pair for pair in state.bad if {pair.first, pair.second} <= cleared]
    for pair in paths[:MOST_NOTES]:
        names = f"{readings.names[pair.first]} with {readings.names[pair.second]}"
        yield f"{names}: {state.bad[pair]}; both are fine with others, so the path between them may be slow"
    if len(paths) > MOST_NOTES:
        yield f"{len(paths) - MOST_NOTES} more such pairs; the network, such as a switch, may be the cause"


def members(verdicts: Sequence[NodeVerdict]) -> tuple[int, ...]:
    """Return the indexes of the fit nodes; empty if there are fewer than two."""
    fit = tuple(node for node, verdict in enumerate(verdicts) if verdict.fit)
    return fit if len(fit) > 1 else ()


def group_notes(readings: Readings, group: Sequence[int], rule: PairRule) -> Iterator[str]:
    """Yield a note on the measurement of all fit nodes together if it is missing, failed or was slow."""
    if not group:
        return
    figures, problem = readings.group or (PairFigures(), "the group was not measured")
    if problem:
        yield f"the {len(group)} fit nodes have no result together, although each is fine in pairs: {problem}"
        return
    inside = [pair for pair in readings.pairs if {pair.first, pair.second} <= {*group}]
    speeds = [speed for pair in inside if not pair.problem and (speed := pair.figures.gb_per_s)]
    speed = figures.gb_per_s
    if speed and speeds and 100 * (1 - speed / median(speeds)) > rule.group_below_pct:
        slower = f"{speed:.3g} GB/s, but {median(speeds):.3g} GB/s in pairs"
        yield f"the {len(group)} fit nodes are slower together than in pairs: {slower}; no single node is the cause"
