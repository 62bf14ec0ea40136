# SPDX-License-Identifier: Apache-2.0
"""Causes of slowness: finders return a cause, None if the evidence excludes it, or Missing with the reason."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from llmb.base.missing import Missing
from llmb.base.record import Record, Threshold
from llmb.catalogue.data_files import read_file
from llmb.readers.anomalies import FEWEST_STEPS, find_anomalies
from llmb.readers.profiles.breakdown import StepBreakdown
from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.rank_times import Excess, Straggler
from llmb.runs.result import MACHINE_FAULT, NETWORK_FAULT, OTHER_WORK, UNLIKE_NODES, Condition, Reference
from llmb.runs.steps import Step

DATA = Path(__file__).with_name("causes.yaml")
CauseName = Literal[
    "network",
    "machine_fault",
    "other_work",
    "unlike_nodes",
    "settings",
    "slow_rank",
    "expert_imbalance",
    "exposed_communication",
    "data_bound",
    "host_bound",
    "checkpoint",
    "logging",
    "stalls",
    "recomputation",
    "throttled_clocks",
    "window",
    "work",
    "precision",
    "layout",
    "implementation",
    "recording",
    "data",
    "convention",
    "machine",
    "software",
]


class CauseRule(Record):
    """A cause of slowness, also if run and reference differ in a key that matches a pattern in ``keys``."""

    name: CauseName
    title: str
    confirm: str
    """A command that confirms the cause, with advice; ``{run}`` is the run's folder or log, ``{command}`` reruns it."""
    keys: tuple[str, ...] = ()
    times_steps: bool = True
    """True if a difference in a key that matches ``keys`` changes the step time."""
    first: bool = False
    """True if the cause is listed first, because it may have caused others."""


class CauseFile(Record):
    """The content of ``causes.yaml``. A difference belongs to the first cause with a pattern that matches its key."""

    least_share_pct: Threshold
    same_rank_pct: Threshold
    slower_layer_pct: Threshold
    host_ahead_pct: Threshold
    idle_reasons: tuple[str, ...]
    """Reasons for low clocks that only mean that a GPU is idle."""
    causes: tuple[CauseRule, ...]

    def rule(self, name: CauseName) -> CauseRule:
        return next(rule for rule in self.causes if rule.name == name)

    def rule_of_key(self, key: str) -> CauseRule | None:
        """Return the first rule with a pattern that matches ``key``; None if no pattern matches."""
        fitting = (rule for rule in self.causes if any(fnmatchcase(key, pattern) for pattern in rule.keys))
        return next(fitting, None)


@cache
def cause_rules() -> CauseFile:
    return read_file(DATA, CauseFile)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWork:
    """The work of routed experts on several ranks, which exchange tokens."""

    flops_share: float
    """The experts' fraction of the FLOPs of all layers."""
    rows: float
    """Mean number of rows, one per token and selected expert, that a rank computes per micro-batch and layer."""
    exchanged_bytes: float
    """Bytes that a row adds to the exchanges of a layer, forward and backward."""
    passes: int
    """Time of a layer's forward and backward passes of one micro-batch, as a multiple of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    ranks: int
    on_gpu: bool
    layer_passes: float
    """Number of forward passes of layers per step: layers of a rank times micro-batches."""
    shared_by: int = 1
    """Number of ranks that compute each layer together, and so wait for each other within a layer."""
    recompute: str | None = None
    saves: bool = False
    """True if the run saves checkpoints while it trains."""
    experts: ExpertWork | None = None
    """None if no rank waits for the experts of another rank."""


@dataclass(frozen=True, slots=True)
class Throttle:
    """A GPU with lowered clocks during a run; ``seconds`` is the duration, or None if it was not counted."""

    gpu: str
    reason: str
    seconds: float | None
    share: float | None = None
    """Fraction of the window's samples in which ``reason`` lowered the clocks; None if clocks were not sampled."""
    clock_mhz: float | None = None
    """Mean clock of the samples."""
    max_clock_mhz: float | None = None

    @property
    def lost_share(self) -> float:
        """Return the largest fraction of a step that the GPU can lose, from its mean clock or else from ``share``."""
        if self.clock_mhz is None or self.max_clock_mhz is None:
            return self.share or 0.0
        return max(0.0, 1 - self.clock_mhz / self.max_clock_mhz)


NO_RANKS = Missing("the times of single ranks were not recorded")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All facts about one run. ``steps`` are the steps of its window in order, except profiled steps."""

    run: AnalyzedRun
    """A run with step time statistics."""
    steps: Sequence[Step] = ()
    work: Work | None = None
    """None for a run with only a log."""
    ranks: Excess | Missing = NO_RANKS
    """The times by which ranks exceed the median one in these steps; Missing also if they cannot be compared."""
    trace: StepBreakdown | None = None
    node_of: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""
    throttled: tuple[Throttle, ...] | None = None
    trained_s: float | None = None
    """Seconds of all steps of the run and of the pauses between them; None without steps."""

    @property
    def mean_s(self) -> float:
        """Return the mean step time of the run."""
        assert self.run.step_time_s, "it has statistics"
        return self.run.step_time_s.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceEvidence:
    """All facts about the reference. A baseline's step time is scaled to the run's sequences per GPU, if known."""

    reference: Reference
    differing: tuple[Condition, ...] = ()
    """Configuration and conditions that differ from the run's."""
    evidence: Evidence | None = None
    """Evidence of a baseline run."""
    window_mean_s: float | None = None
    """Mean of the run's own steps in the window of the reference, if the windows differ."""


Bound = Literal["about", "at least", "at most"]
MS, MB = 1000, 1e6
SMALLEST_IMBALANCE = 0.001
"""Smaller imbalances may be rounding errors of the recorded numbers."""
MOST_STEPS = 5
"""Maximum number of slow steps to list."""
NO_STEPS = "the run has no metrics.jsonl with steps of its window"


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseShare:
    """The cost of a cause in seconds per step (None: unknown); ``in_step`` is False if it is between steps."""

    share_s: float | None
    bound: Bound = "about"
    in_step: bool = True
    evidence: tuple[str, ...]


Finder = Callable[[Evidence], CauseShare | Missing | None]


def _fault(run: Evidence, key: str) -> CauseShare | None:
    texts = run.run.faults.get(key)
    return CauseShare(share_s=None, evidence=texts) if texts else None


PARTS = ("input", "copies to the GPU", "compute", "other waits")
"""Display names of the fields of ``RankExcess``."""
SMALLEST_PART = 0.01


def _straggler(run: Evidence) -> Straggler | None:
    rules = cause_rules()
    shares = rules.same_rank_pct.value / 100, rules.slower_layer_pct.value / 100
    return None if isinstance(run.ranks, Missing) else run.ranks.straggler(*shares)


def slow_rank(run: Evidence) -> CauseShare | Missing | None:
    """Find the rank that all others wait for, and what takes longer there than on the median rank."""
    work = run.work
    if work and work.ranks == 1:
        return None
    if not work:
        return Missing(NO_STEPS)
    if isinstance(run.ranks, Missing):
        return run.ranks
    found = _straggler(run)
    if found is None:
        return None
    node = f" on {run.node_of[found.rank]}" if found.rank in run.node_of else ""
    together = f"{work.shared_by} ranks compute its layers together: any of them may be the slow one"
    total_s = sum(found.excess)
    parts = [(name, value) for name, value in zip(PARTS, found.excess, strict=True) if value >= SMALLEST_PART * total_s]
    longer = ", ".join(f"{name} {_ms(value)}" for name, value in parts)
    return CauseShare(
        share_s=total_s,
        bound="at least",
        evidence=(
            f"rank {found.rank}{node} is the slowest in {found.lines} of {len(run.ranks.parts_s)} steps; beyond the "
            f"median rank: {longer}",
            *([together] if work.shared_by > 1 else []),
            "of compute, only forward passes are timed; backward passes of a slow rank are also slower",
        ),
    )


def expert_imbalance(run: Evidence) -> CauseShare | Missing | None:
    """Estimate how long ranks wait for the rank whose experts have the most rows, if time is proportional to FLOPs."""
    experts = run.work and run.work.experts
    if not run.work or not experts:
        return None
    loads = [step.expert_load.layers_rank_max_over_mean for step in run.steps if step.expert_load]
    layers = [fmean(layer) for layer in zip(*loads, strict=False)]
    if not layers:
        return Missing("the rows of experts that each rank computes were not recorded")
    fullest = fmean(layers)
    if fullest - 1 < SMALLEST_IMBALANCE:
        return None
    longer = experts.flops_share * (fullest - 1)
    forward_s = median([step.layer_s_median for step in run.steps]) * run.work.layer_passes
    rows = experts.rows * (fullest - 1)
    return CauseShare(
        share_s=forward_s * experts.passes * longer / (1 + longer),
        evidence=(
            f"the fullest rank computes {fullest:.3g} times as many rows of experts as the mean, up to "
            f"{max(layers):.3g} times in a layer",
            f"that is {rows:,.0f} rows more in each layer and micro-batch, and "
            f"{rows * experts.exchanged_bytes / MB:,.3g} MB more to receive and to send back",
            f"routed experts have {100 * experts.flops_share:.0f} % of the FLOPs of the layers; their time is assumed "
            "to be proportional",
        ),
    )


def exposed_communication(run: Evidence) -> CauseShare | Missing | None:
    """Find exposed communication in a trace or, without one, as the time between layers for gathering parameters."""
    if run.work and run.work.ranks == 1:
        return None
    if run.trace:
        return _traced_communication(run)
    outside = [step.outside_layers_s for step in run.steps]
    if not outside:
        return Missing("no step was traced")
    if host_is_late(run):
        return Missing("no step was traced, and the GPU also waits for the host")
    slow = _straggler(run)
    if slow and slow.excess.wait_s == max(slow.excess):
        return Missing(f"no step was traced, and between layers other ranks may wait for rank {slow.rank}")
    return CauseShare(
        share_s=median(outside),
        bound="at least",
        evidence=(
            f"{_ms(median(outside))} before and between the layers of a step's first forward pass, where parameters "
            "are gathered; on the rank that waits least",
        ),
    )


def _traced_communication(run: Evidence) -> CauseShare | None:
    trace = run.trace
    assert trace
    part = trace.communication_exposed_s / trace.duration_s
    slow = _straggler(run)
    waited_s = sum(slow.excess) if slow and trace.rank != slow.rank else 0.0
    longest = sorted(trace.collectives, key=lambda item: -item.exposed_s)[:2]
    kinds = ", ".join(
        f"{item.kind.replace('_', '-')}{f' of {item.group}' if item.group else ''} {_ms(item.exposed_s)}"
        for item in longest
    )
    rank = "" if trace.rank is None else f" on rank {trace.rank}"
    return CauseShare(
        share_s=max(0.0, part * run.mean_s - waited_s),
        evidence=(
            f"step {trace.step} was traced{rank}: in {100 * part:.0f} % of it nothing but communication runs",
            *([f"longest: {kinds}"] if kinds else []),
            *(["without the time that this rank waits for the slow rank"] if waited_s else []),
        ),
    )


def host_is_late(run: Evidence) -> bool:
    """Return whether the host is less than ``host_ahead_pct`` of the step time ahead of the GPU in the median step."""
    ahead = _host_ahead(run)
    return bool(ahead) and median(ahead) < run.mean_s * cause_rules().host_ahead_pct.value / 100


def host_bound(run: Evidence) -> CauseShare | Missing | None:
    if run.work and not run.work.on_gpu:
        return None
    late = host_is_late(run)
    ahead = "the host is not ahead of the GPU: the queue is empty when a step ends"
    if run.trace:
        idle_s = run.trace.idle_s / run.trace.duration_s * run.mean_s
        evidence = f"in step {run.trace.step}, which was traced, the GPU is idle {_ms(run.trace.idle_s)}"
        return CauseShare(share_s=idle_s, evidence=(evidence, *([ahead] if late else [])))
    if not _host_ahead(run):
        return Missing("no step was traced")
    return CauseShare(share_s=None, evidence=(ahead,)) if late else None


def data_bound(run: Evidence) -> CauseShare | Missing | None:
    waits = [step.data_wait_s for step in run.steps]
    if not waits:
        return Missing(NO_STEPS)
    on_gpu = run.work is not None and run.work.on_gpu
    if on_gpu and not host_is_late(run):
        return None  # the host waits for data while the GPU still has work
    slow = _straggler(run)
    alone_s = max(0.0, slow.excess.input_s) if slow else 0.0
    return CauseShare(
        share_s=max(0.0, fmean(waits) - alone_s),
        bound="at most" if on_gpu else "about",
        evidence=(
            f"a step waits {_ms(fmean(waits))} for its data, on the rank that waits longest",
            *([f"{_ms(alone_s)} of this, which only the slow rank waits, are not counted here"] if alone_s else []),
        ),
    )


def checkpoint(run: Evidence) -> CauseShare | Missing | None:
    """Find steps that are slower while a checkpoint is written, and pauses for checkpoints between steps."""
    if run.work and not run.work.saves:
        return None
    pauses = [step.pause_s for step in run.steps]
    saving = [step.step_time_s for step in run.steps if step.saving]
    others = [step.step_time_s for step in run.steps if not step.saving]
    if not run.steps or not run.work:
        return Missing(NO_STEPS)
    slower_s = max(0.0, median(saving) - median(others)) if saving and others else 0.0
    within_s, between_s = slower_s * len(saving) / len(run.steps), fmean(pauses)
    if saving and others:
        how = f"which take {_ms(slower_s)} longer than the others"
    else:
        how = "so none shows the speed without it" if saving else ""
    return CauseShare(
        share_s=within_s + between_s,
        in_step=within_s >= between_s,
        bound="about" if others else "at least",
        evidence=(
            f"a checkpoint is written during {len(saving)} of {len(run.steps)} steps{', ' if how else ''}{how}",
            f"training waits {_ms(between_s)} per step between steps",
        ),
    )


def logging(run: Evidence) -> CauseShare | Missing | None:
    pauses = [step.pause_s for step in run.steps]
    if run.work and run.work.saves:
        return None  # the pauses are those for checkpoints
    if not pauses or not run.work:
        return Missing(NO_STEPS)
    said = f"{_ms(fmean(pauses))} between two steps, on the rank where it is longest"
    return CauseShare(share_s=fmean(pauses), in_step=False, evidence=(said,))


def stalls(run: Evidence) -> CauseShare | Missing | None:
    """Find steps much slower than their neighbors, not counting saves and waits for data."""
    times = run.run.step_times_s
    if len(times) < FEWEST_STEPS:
        return Missing(f"the run's window has fewer than {FEWEST_STEPS} steps, too few to identify unusual ones")
    known = run.steps if len(run.steps) == len(times) else ()
    anomalies = find_anomalies(times, known[0].step if known else 0)
    explained = {step.step: math.inf if step.saving else step.data_wait_s or 0.0 for step in known}
    excess = {item.step: item.excess_s - explained.get(item.step, 0.0) for item in anomalies.outliers}
    slow = {number: own for number, own in excess.items() if own > 0}
    if not slow:
        return None
    shown = ", ".join(map(str, list(slow)[:MOST_STEPS])) + (", ..." if len(slow) > MOST_STEPS else "")
    named = f"slow steps: {shown if known else f'{len(slow)} of {len(times)}'}"
    period = f"every {anomalies.period_steps} steps"
    return CauseShare(
        share_s=sum(slow.values()) / len(times),
        evidence=(
            f"{named}; up to {_ms(max(slow.values()))} slower than neighboring steps",
            *([period] if anomalies.period_steps else []),
        ),
    )


def recomputation(run: Evidence) -> CauseShare | Missing | None:
    """Find recomputation: if full, it takes as long as the layers' forward passes, otherwise at most as long."""
    work = run.work
    if work is None or work.recompute is None:
        return Missing("only the plans of llmb's own engine show what is recomputed")
    if work.recompute == "none":
        return None
    layers = [step.layer_s_median for step in run.steps]
    said = f"--recompute {work.recompute}: the backward pass repeats " + (
        "the forward passes of all layers" if work.recompute == "full" else "parts of the layers' forward passes"
    )
    if not layers:
        return CauseShare(share_s=None, evidence=(said,))
    again_s = median(layers) * work.layer_passes
    bound: Bound = "about" if work.recompute == "full" else "at most"
    return CauseShare(share_s=again_s, bound=bound, evidence=(said, f"all of them take {_ms(again_s)} per step"))


def throttled_clocks(run: Evidence) -> CauseShare | Missing | None:
    """Find throttled GPUs. The share is an upper bound."""
    if run.work and not run.work.on_gpu:
        return None
    if run.throttled is None:
        return Missing("the clocks of the run's GPUs were not recorded")
    throttled = [item for item in run.throttled if item.reason not in cause_rules().idle_reasons]
    if not throttled:
        return None
    sampled = [item for item in throttled if item.share is not None]
    if sampled:
        return _sampled_throttle(run, sampled)
    counted = [item for item in throttled if item.seconds is not None]
    shown = sorted(throttled, key=lambda item: -(item.seconds or 0))[:3]
    evidence = tuple(
        f"{item.gpu}: {item.reason}{'' if item.seconds is None else f' for {item.seconds:.1f} s of the run'}"
        for item in shown
    )
    if not counted or not run.trained_s:
        return CauseShare(share_s=None, evidence=evidence)
    part = min(1.0, max(item.seconds or 0 for item in counted) / run.trained_s)
    return CauseShare(share_s=part * run.mean_s, bound="at most", evidence=evidence)


def _sampled_throttle(run: Evidence, sampled: Sequence[Throttle]) -> CauseShare:
    shown = sorted(sampled, key=lambda item: (-item.lost_share, -(item.share or 0)))[:3]
    evidence = tuple(
        f"{item.gpu}: {item.reason} in {100 * (item.share or 0):.0f} % of the samples"
        + (f", SM clock {item.clock_mhz:.0f} of {item.max_clock_mhz:.0f} MHz" if item.max_clock_mhz else "")
        for item in shown
    )
    return CauseShare(share_s=shown[0].lost_share * run.mean_s, bound="at most", evidence=evidence)


FINDERS: Mapping[CauseName, Finder] = {
    # The cost of the first four is unknown: in every collective, all ranks wait for the ranks that they slow down.
    "network": partial(_fault, key=NETWORK_FAULT),
    "machine_fault": partial(_fault, key=MACHINE_FAULT),
    "other_work": partial(_fault, key=OTHER_WORK),
    "unlike_nodes": partial(_fault, key=UNLIKE_NODES),
    "slow_rank": slow_rank,
    "expert_imbalance": expert_imbalance,
    "exposed_communication": exposed_communication,
    "host_bound": host_bound,
    "data_bound": data_bound,
    "checkpoint": checkpoint,
    "logging": logging,
    "stalls": stalls,
    "recomputation": recomputation,
    "throttled_clocks": throttled_clocks,
}


def _host_ahead(run: Evidence) -> list[float]:
    return [step.host_ahead_s for step in run.steps if step.host_ahead_s is not None]


def _ms(seconds: float) -> str:
    return f"{seconds * MS:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
