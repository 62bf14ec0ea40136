# SPDX-License-Identifier: Apache-2.0
"""Judges a run by its log: did it get through, are its numbers sound, how long did a step take."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.logs.clues import describe_content, last_words
from llmb.logs.reader import RunLog
from llmb.logs.step_line import find_invalid_line
from llmb.metrics.statistics import Statistics, describe
from llmb.metrics.window import resolve_window

Status = Literal["success", "failed", "invalid", "no_steps", "skipped", "unreadable"]


@dataclass(frozen=True, slots=True)
class LogOutcome:
    """What became of the run that one file logs. Statistics are those of a success; what is unknown is None."""

    status: Status
    reason: str
    window: Window | None = None
    steps: int | None = None
    """Steps that the last attempt logged."""
    attempts: int | None = None
    max_step: int | None = None
    step_time_s: Statistics | None = None
    tflops_per_gpu: Statistics | None = None
    loss_first: float | None = None
    loss_last: float | None = None


def judge_log(log: RunLog, rule: str) -> LogOutcome:
    """The outcome of a log, with statistics over the window that ``rule`` gives."""
    if log.last is None:
        return LogOutcome("no_steps", _why_no_steps(log), steps=0, attempts=0)
    try:
        window = resolve_window(rule, log.last + 1)
    except UsageError as error:
        return _outcome(log, "failed", error.what, None)
    at = slice(bisect_left(log.step, window.first), bisect_right(log.step, window.last))
    step_times = log.step_time_s[at]
    unfinished = _why_unfinished(log, log.last, window, log.step[at])
    bad = _why_invalid(log, window, step_times)
    if bad or unfinished:
        status: Status = "invalid" if bad else "failed"
        return _outcome(log, status, "; ".join(filter(None, (bad, unfinished))), window)
    tflops = log.tflops_per_gpu[at]
    known = all(map(math.isfinite, tflops))
    reason = f"{_steps_text(window.first, window.last)} of {log.last + 1}" + _attempts_text(log)
    return _outcome(log, "success", reason, window, describe(step_times), describe(tflops) if known else None)


def _outcome(
    log: RunLog,
    status: Status,
    reason: str,
    window: Window | None,
    step_time_s: Statistics | None = None,
    tflops_per_gpu: Statistics | None = None,
) -> LogOutcome:
    return LogOutcome(
        status=status,
        reason=reason,
        window=window,
        steps=len(log.step),
        attempts=log.attempts,
        max_step=log.step[-1],
        step_time_s=step_time_s,
        tflops_per_gpu=tflops_per_gpu,
        loss_first=_finite(log.loss[0]),
        loss_last=_finite(log.loss[-1]),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _why_no_steps(log: RunLog) -> str:
    if not log.size:
        return "empty file"
    if log.truncated_line:
        return "the file ends within its first step line"
    return _quoting(f"no step line: {describe_content(log.head, log.tail)}", log.tail)


def _why_unfinished(log: RunLog, last: int, window: Window, seen: Sequence[int]) -> str | None:
    if log.step[-1] < last:
        where = ", while it logged the next" if log.truncated_line else ""
        return _quoting(f"died after step {log.step[-1]} of {last + 1}{where}{_attempts_text(log)}", log.tail)
    missing = sorted(set(range(window.first, window.last + 1)).difference(seen))
    if missing:
        word = "step" if len(missing) == 1 else "steps"
        return f"{word} {_ranges(missing)} missing{_attempts_text(log)}"
    return None


def _why_invalid(log: RunLog, window: Window, step_times: Iterable[float]) -> str | None:
    if log.bad_loss_step is not None:
        return f"loss is {log.loss[log.step.index(log.bad_loss_step)]} from step {log.bad_loss_step}"
    if not all(map(math.isfinite, step_times)):
        return f"a step time in {_steps_text(window.first, window.last)} is not finite"
    return find_invalid_line(log.tail)


def _quoting(reason: str, tail: bytes) -> str:
    words = last_words(tail)
    return f"{reason}; {words}" if words else reason


def _attempts_text(log: RunLog) -> str:
    return f" (attempt {log.attempts})" if log.attempts > 1 else ""


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _ranges(numbers: Sequence[int]) -> str:
    """'36, 37, 40-44' for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
