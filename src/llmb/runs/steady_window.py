# SPDX-License-Identifier: Apache-2.0
"""The window of a run whose rule is ``auto``: the steps in which it turned out to be steady."""

from collections.abc import Sequence

from llmb.catalogue.records import Window
from llmb.metrics.steady_state import NO_STEADY_STATE, steady_window
from llmb.metrics.window import STEADY
from llmb.runs.record import RunRecord
from llmb.runs.steps import Step


def with_steady_window(record: RunRecord, steps: Sequence[Step]) -> tuple[RunRecord, str | None]:
    """The record with the window that statistics are of, and why there is none."""
    plan = record.plan
    if plan.window.rule != STEADY:
        return record, None
    found = _steady(max(_attempts(record, steps), key=len)[1:])  # the first step of an attempt includes warm-up
    if found is None:
        return record, NO_STEADY_STATE
    return record.model_copy(update={"plan": plan.model_copy(update={"window": found})}), None


def _attempts(record: RunRecord, steps: Sequence[Step]) -> list[list[Step]]:
    """The steps by the attempt that trained them last, without profiled ones."""
    rest = [step for step in steps if not step.profiled]
    parts = []
    for attempt in reversed(record.attempts):
        parts.append([step for step in rest if step.step >= attempt.first_step])
        rest = [step for step in rest if step.step < attempt.first_step]
    return [*parts, rest]


def _steady(steps: Sequence[Step]) -> Window | None:
    """Steps that are left out of ``steps`` may lie inside of the window."""
    found = steady_window([step.step_time_s for step in steps], 0)
    if found is None:
        return None
    return Window(first=steps[found.first].step, last=steps[found.last].step, rule=STEADY)
