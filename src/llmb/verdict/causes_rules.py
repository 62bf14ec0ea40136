# SPDX-License-Identifier: Apache-2.0
"""The causes that a run can be slow for, as data: their titles, thresholds, and the commands that confirm them."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from llmb.catalogue.data_files import read_file
from llmb.catalogue.record import Record, Threshold

DATA = Path(__file__).with_name("causes.yaml")
CauseName = Literal[
    "other_work",
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
    """Whether it is named before all others, whatever they cost: it may be behind each of them."""


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
