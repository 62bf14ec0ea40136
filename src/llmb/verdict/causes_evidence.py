# SPDX-License-Identifier: Apache-2.0
"""Rules for causes of slowness, and what is known of a run to which they are applied; unknown figures are None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from llmb.catalogue.data_files import read_file
from llmb.catalogue.record import Record, Threshold
from llmb.traces.breakdown import StepBreakdown
from llmb.verdict.conditions import Faults

DATA = Path(__file__).with_name("causes.yaml")
CauseName = Literal[
    "network",
    "machine_fault",
    "other_work",
    "unlike_nodes",
    "settings",
    "slow_rank",
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
    """A cause. ``keys``: patterns of the keys whose difference from the reference makes it one."""

    name: CauseName
    title: str
    confirm: str
    """A command that shows it; ``{run}`` is the run's folder, ``{command}`` what runs the recipe."""
    keys: tuple[str, ...] = ()
    times_steps: bool = True
    """Whether a difference changes the time of a step."""
    first: bool = False
    """Whether it is named before others, whatever they cost: it may be behind each of them."""


class CauseFile(Record):
    """``causes.yaml``. A difference belongs to the first cause whose patterns fit its key."""

    least_share_pct: Threshold
    same_rank_pct: Threshold
    slower_layer_pct: Threshold
    host_ahead_pct: Threshold
    idle_reasons: tuple[str, ...]
    """For which a GPU's clocks are low while it computes nothing."""
    causes: tuple[CauseRule, ...]

    def rule(self, name: CauseName) -> CauseRule:
        return next(rule for rule in self.causes if rule.name == name)

    def rule_of_key(self, key: str) -> CauseRule | None:
        """None for what does not make a run slow."""
        fitting = (rule for rule in self.causes if any(fnmatchcase(key, pattern) for pattern in rule.keys))
        return next(fitting, None)


@cache
def cause_rules() -> CauseFile:
    return read_file(DATA, CauseFile)


class TimedStep(Protocol):
    """A training step; times are in seconds, as in ``metrics.jsonl``."""

    @property
    def step(self) -> int: ...
    @property
    def step_time_s(self) -> float: ...
    @property
    def saving(self) -> bool: ...
    @property
    def data_wait_s(self) -> float: ...
    @property
    def pause_s(self) -> float: ...
    @property
    def host_ahead_s(self) -> float | None: ...
    @property
    def layer_s_median(self) -> float: ...
    @property
    def layer_s_max(self) -> float: ...
    @property
    def slowest_layer_rank(self) -> int: ...
    @property
    def outside_layers_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    ranks: int
    on_gpu: bool
    layer_passes: float
    """Forward passes of a layer: layers of a rank times micro-batches."""
    comparable_layers: bool
    """Whether layers of one rank take as long as those of another."""
    shared_by: int = 1
    """Ranks that compute the same layers together, and so wait for each other within a layer."""
    recompute: str | None = None
    saves: bool = False
    """Whether it saves checkpoints while it trains."""


@dataclass(frozen=True, slots=True)
class Throttle:
    """A GPU whose clocks were lowered during a run. seconds: for how long; None if that was not counted."""

    gpu: str
    reason: str
    seconds: float | None
    share: float | None = None
    """Share of the samples taken in the window's steps; None if its clocks were not sampled."""
    clock_mhz: float | None = None
    """Mean of these samples."""
    max_clock_mhz: float | None = None

    @property
    def lost_share(self) -> float:
        """Share of a step that a sampled GPU loses at most, if all of it depends on the clock."""
        if self.clock_mhz is None or self.max_clock_mhz is None:
            return self.share or 0.0
        return max(0.0, 1 - self.clock_mhz / self.max_clock_mhz)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one run. ``steps`` are those of its window, in order, without profiled ones."""

    step_time_s: float
    step_times_s: Sequence[float] = ()
    """Step times of its window, in order; also of a run that is known by its log alone."""
    steps: Sequence[TimedStep] = ()
    work: Work | None = None
    """None for a run that is known by its log alone."""
    trace: StepBreakdown | None = None
    node_of: Mapping[int, str] = field(default_factory=dict)
    """By rank."""
    throttled: tuple[Throttle, ...] | None = None
    faults: Faults = field(default_factory=dict)
    """What is known to have disturbed it."""
    trained_s: float | None = None
    """All steps of the run."""


@dataclass(frozen=True, slots=True)
class Differing:
    """A key of configuration or conditions with two values, as text; None is not known."""

    key: str
    own: str | None
    reference: str | None
    slower_pct: tuple[float, float] | None = None
    """By how much the run is slower for it, in percent, where the reference tells that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceTime:
    """The step time that a run is compared with, for the run's own number of sequences."""

    step_time_s: float
    source: str
    differing: tuple[Differing, ...] = ()
    evidence: Evidence | None = None
    """Evidence of a baseline run."""
    window_mean_s: float | None = None
    """Mean of the run's own steps in the window of the reference, if that is another one."""
    window_text: str = ""
