# SPDX-License-Identifier: Apache-2.0
"""How often something happened in a run that spoils its numbers, or may. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from llmb.runs.steps import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Over all steps of a run. A count that nobody took is null, never 0."""

    non_finite_steps: int
    """Steps whose loss or gradient norm is not finite. The first of them ends a run."""
    skipped_steps: int
    """Steps that did not update the parameters."""


def count(steps: Sequence[Step]) -> Counters | None:
    """Null for a run without a step."""
    if not steps:
        return None
    return Counters(
        non_finite_steps=sum(not step.finite for step in steps), skipped_steps=sum(not step.updated for step in steps)
    )
