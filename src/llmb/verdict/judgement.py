# SPDX-License-Identifier: Apache-2.0
"""A verdict from a difference and the conditions under which it was found. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmb.metrics.statistics import Statistics
from llmb.verdict.conditions import Values, differing
from llmb.verdict.records import Condition, Interval, Reference, Verdict, VerdictName
from llmb.verdict.sentence import UNDECIDED as UNDECIDED
from llmb.verdict.sentence import with_sentence
from llmb.verdict.tolerance import Tolerance


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A run, or a log, that is judged or judged against."""

    step_time_s: Statistics | None
    """Of its window."""
    flaw: str | None = None
    """Why it is no measurement; None if it is one."""
    conditions: Values = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    disturbed: str | None = None
    """By what other work on its nodes; None if by none that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How the step time differs from the reference, in percent of it, and what that would mean by itself."""

    verdict: VerdictName
    delta_pct: float | None = None
    ci95_pct: Interval | None = None
    soft: bool = False
    more_runs: int | None = None
    reason: str | None = None
    """Why it is not clear, or soft."""


def judgement(
    finding: Finding, reference: Reference, conditions: Sequence[Condition], tolerance: Tolerance | None
) -> Verdict:
    """The finding as far as the conditions allow it."""
    verdict, reason = finding.verdict, finding.reason
    prevented = [condition for condition in conditions if condition.effect == "prevents"]
    if prevented and verdict != "invalid":
        verdict, reason = "not comparable", differing(prevented)
    weakened = any(condition.effect == "weakens" for condition in conditions)
    return with_sentence(
        Verdict(
            verdict=verdict,
            soft=finding.soft or weakened or reference.kind == "published",
            delta_pct=finding.delta_pct,
            ci95_pct=finding.ci95_pct,
            tolerance_pct=tolerance.pct if tolerance else None,
            tolerance_source=tolerance.source if tolerance else None,
            reference=reference,
            conditions=tuple(conditions),
            more_runs=finding.more_runs if verdict == "inconclusive" else None,
            reason=reason,
            sentence="",
        )
    )


def without_reference(verdict: VerdictName, reason: str) -> Verdict:
    """Of a run that there is nothing to compare with, or of a recipe without a run."""
    return with_sentence(
        Verdict(
            verdict=verdict,
            soft=False,
            delta_pct=None,
            ci95_pct=None,
            tolerance_pct=None,
            tolerance_source=None,
            reference=None,
            conditions=(),
            reason=reason,
            sentence="",
        )
    )
