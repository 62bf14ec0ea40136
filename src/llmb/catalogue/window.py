# SPDX-License-Identifier: Apache-2.0
"""Selects the steps for the statistics of a run."""

from functools import lru_cache

from llmb.base.errors import UsageError
from llmb.base.options import Span, parse_ranges
from llmb.catalogue.records import Window

WINDOW_RULES = ("reference", "auto", "last", "all", "A-B")
DEFAULT_RULE = "reference"
LAST = "last"
STEADY = "auto"
"""The rule for the steps in which the run is steady, which are known only after its end."""
DOCUMENTED_STEPS = 50
"""Number of steps of the reference suite's published runs."""


def check_rule(rule: str) -> None:
    """Raise UsageError if ``rule`` does not select a window."""
    if rule not in WINDOW_RULES[:-1]:
        _literal(rule)


def _literal(rule: str) -> Span:
    try:
        span, *others = parse_ranges(rule)
    except ValueError as error:
        raise _bad_window(f"'{rule}' is not a window: {error}") from error
    if others or span.step != 1 or "-" not in rule:
        raise _bad_window(f"'{rule}' is not a window")
    return span


@lru_cache(maxsize=64)  # many logs have the same number of steps
def resolve_window(rule: str, total_steps: int, first_step: int = 0, documented: str | None = None) -> Window:
    """Return the window of a run's steps, numbered from ``first_step``. Raise UsageError for an invalid rule or
    window."""
    if total_steps < 1:
        raise ValueError("a run has at least one step")
    check_rule(rule)
    last_step = first_step + total_steps - 1
    match rule:
        case "reference" if documented and "-" in documented and total_steps == DOCUMENTED_STEPS:
            first, last, *_ = _literal(documented)
            return Window(first=first_step + first, last=first_step + last, rule=rule)
        case "reference" | "auto":
            first = 7 * total_steps // 10
            last = max(first, 9 * total_steps // 10 - 1)
            return Window(first=first_step + first, last=first_step + last, rule=rule)
        case "last":
            return Window(first=last_step, last=last_step, rule=rule)
        case "all":
            return Window(first=first_step, last=last_step, rule=rule)
    first, last, *_ = _literal(rule)
    if first < first_step or last > last_step:
        steps = f"{first_step}-{last_step}"
        raise _bad_window(f"window {rule} is outside the run, whose {total_steps} steps are numbered {steps}", steps)
    return Window(first=first, last=last, rule=rule)


def rule_of_document(rule: str, documented: str | None) -> str:
    """Return ``last`` for the default rule if the document's program uses the last step; otherwise ``rule``."""
    return LAST if rule == DEFAULT_RULE and documented == LAST else rule


def _bad_window(what: str, example: str = "35-44") -> UsageError:
    do = f"pass the first and the last step, numbered from 0, such as {example}, or one of these"
    return UsageError(what, choices=WINDOW_RULES, do=do)
