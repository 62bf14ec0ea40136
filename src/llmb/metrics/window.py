# SPDX-License-Identifier: Apache-2.0
"""The steps of a run that its statistics are taken over."""

import re

from llmb.catalogue.records import Window
from llmb.errors import UsageError

WINDOW_RULES = ("auto", "last", "all", "A-B")
_LITERAL = re.compile(r"(\d+)-(\d+)", re.ASCII)


def check_rule(rule: str) -> None:
    """Raises UsageError if no run can have the window ``rule``."""
    literal = _LITERAL.fullmatch(rule)
    if rule not in WINDOW_RULES[:-1] and not literal:
        raise _bad_window(f"'{rule}' is not a window")
    if literal and int(literal[1]) > int(literal[2]):
        raise _bad_window(f"window '{rule}' ends before it begins")


def resolve_window(rule: str, total_steps: int, first_step: int = 0) -> Window:
    """The window of a run of ``total_steps`` steps; ``first_step`` is not 0 if it resumes from a checkpoint.

    ``auto`` leaves out the first 70 % (warm-up) and the last 10 % (checkpoint, cleanup): 35-44 of 50 steps.
    """
    if total_steps < 1:
        raise ValueError("a run has at least one step")
    check_rule(rule)
    last_step = first_step + total_steps - 1
    match rule:
        case "auto":
            first = 7 * total_steps // 10
            last = max(first, 9 * total_steps // 10 - 1)
            return Window(first=first_step + first, last=first_step + last, rule=rule)
        case "last":
            return Window(first=last_step, last=last_step, rule=rule)
        case "all":
            return Window(first=first_step, last=last_step, rule=rule)
    first, last = (int(number) for number in rule.split("-"))
    if first < first_step or last > last_step:
        numbered = f"{first_step}-{last_step}"
        raise _bad_window(f"window {rule} is outside the run, whose {total_steps} steps are numbered {numbered}")
    return Window(first=first, last=last, rule=rule)


def _bad_window(what: str) -> UsageError:
    return UsageError(what, choices=WINDOW_RULES, do="give the first and the last step, numbered from 0, such as 35-44")
