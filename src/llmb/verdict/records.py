# SPDX-License-Identifier: Apache-2.0
"""A verdict, and all that it rests on."""

from collections.abc import Iterable
from typing import Literal

from llmb.catalogue.records import Record, Window

VerdictName = Literal["pass", "regressed", "improved", "inconclusive", "invalid", "not comparable"]
ReferenceKind = Literal["published", "baseline", "expectation"]
Effect = Literal["prevents", "weakens", "noted"]
Interval = tuple[float, float]


class Reference(Record):
    """The step time that a run is judged against."""

    kind: ReferenceKind
    step_time_s: float
    step_time_s_ci95: Interval | None = None
    """None for a single figure whose spread is not published."""
    window: Window | None = None
    """None if the source does not tell which steps its figure is of."""
    window_text: str = ""
    """The window as the source words it."""
    convention: str | None = None
    """How the source counts FLOPs; None if it has only a step time."""
    source: str
    """Document and line, folder of the baseline, or the user's file and entry."""
    runs: int | None = None
    """Number of runs of a baseline; None for a single figure."""


class Condition(Record):
    """Something that differs between a run and its reference. A value is None if that side does not tell."""

    key: str
    """Dotted, such as ``software.driver``."""
    own: str | None
    reference: str | None
    effect: Effect
    """Whether it prevents a verdict, makes it soft, or is only reported."""
    slower_pct: Interval | None = None
    """By how much the run's steps are slower for it, in percent: from, to; None if it is not known."""
    why: str | None = None
    """What it is, with its source, where the reference tells that."""


class Verdict(Record):
    """The keys are a contract."""

    verdict: VerdictName
    soft: bool
    """The reference, or a condition that differs, allows only a rough statement."""
    delta_pct: float | None = None
    """Step time relative to the reference, in percent of it; above 0 is slower. None without two figures."""
    ci95_pct: Interval | None = None
    """95 % confidence interval of ``delta_pct``."""
    smallest_visible_change_pct: float | None = None
    """The smallest slow-down that the data would have shown, in 80 of 100 cases; None where there is no interval."""
    tolerance_pct: float | None = None
    tolerance_source: str | None = None
    reference: Reference | None = None
    conditions: tuple[Condition, ...] = ()
    more_runs: int | None = None
    """How many more runs are expected to decide an inconclusive verdict; None if runs would not."""
    reason: str | None = None
    """Why there is no clear verdict, or why runs allow only a soft one."""
    sentence: str = ""
    """One line for a person, formed from the rest."""


WORST: tuple[VerdictName, ...] = ("regressed", "invalid", "inconclusive", "not comparable", "pass", "improved")
"""The worst first."""
BETTER: tuple[VerdictName, ...] = ("pass", "improved")
"""What is better than an open question."""


def worst(verdicts: Iterable[Verdict]) -> VerdictName:
    """The worst of at least one verdict."""
    return min((verdict.verdict for verdict in verdicts), key=WORST.index)
