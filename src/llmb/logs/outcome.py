# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run according to its log: did it finish, are its values valid, how long did a step take."""

import math
from array import array
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from llmb.catalogue.records import Window
from llmb.errors import UsageError
from llmb.logs.error_text import describe_content, last_error
from llmb.logs.logged_attempt import LoggedAttempt
from llmb.logs.reader import RunLog
from llmb.logs.step_line import find_invalid_line
from llmb.metrics.statistics import Statistics, describe
from llmb.metrics.window import resolve_window

MOST_GAPS = 20
Status = Literal["success", "failed", "invalid", "no_steps", "skipped", "unreadable"]


@dataclass(frozen=True, slots=True)
class LogOutcome:
    """The outcome of the run that one file logs. Only a success has statistics; unknown values are None."""

    status: Status
    reason: str
    window: Window | None = None
    steps: int | None = None
    """Steps logged by the last attempt."""
    attempts: int | None = None
    max_step: int | None = None
    step_time_s: Statistics | None = None
    tflops_per_gpu: Statistics | None = None
    loss_first: float | None = None
    loss_last: float | None = None


def judge_log(log: RunLog) -> LogOutcome:
    """The outcome of a log, with statistics over the window that it was read with."""
    attempt = log.attempt
    if attempt.last is None:
        return LogOutcome("no_steps", _why_no_steps(log), steps=0, attempts=0)
    try:
        window = resolve_window(attempt.rule, attempt.last + 1 - attempt.first_step, attempt.first_step)
    except UsageError as error:
        return _outcome(attempt, "failed", error.what, None)
    unfinished = _why_unfinished(log, attempt.last, window)
    bad = _why_invalid(log, window)
    if bad or unfinished:
        status: Status = "invalid" if bad else "failed"
        return _outcome(attempt, status, "; ".join(filter(None, (bad, unfinished))), window)
    known = np.isfinite(attempt.tflops_per_gpu).all()
    tflops = _describe(attempt.tflops_per_gpu) if known else None
    reason = f"{_steps_text(window.first, window.last)} of {attempt.last + 1}" + _attempts_text(attempt)
    return _outcome(attempt, "success", reason, window, _describe(attempt.step_time_s), tflops)


def _describe(values: "array[float]") -> Statistics:
    return describe(np.sort(values).tolist())  # there may be a million values, which NumPy sorts faster than Python


def _outcome(
    attempt: LoggedAttempt,
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
        steps=attempt.steps,
        attempts=attempt.number,
        max_step=attempt.max_step,
        step_time_s=step_time_s,
        tflops_per_gpu=tflops_per_gpu,
        loss_first=_finite(attempt.loss_first),
        loss_last=_finite(attempt.loss_last),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _why_no_steps(log: RunLog) -> str:
    if not log.size:
        return "empty file"
    if log.truncated_line:
        return "the file ends in its first step line"
    return _quoting(f"no step line: {describe_content(log.head, log.tail)}", log.tail)


def _why_unfinished(log: RunLog, last: int, window: Window) -> str | None:
    attempt = log.attempt
    if attempt.max_step < last:
        where = ", while logging the next" if log.truncated_line else ""
        return _quoting(f"died after step {attempt.max_step} of {last + 1}{where}{_attempts_text(attempt)}", log.tail)
    if len(attempt.step) < window.last - window.first + 1:
        seen = (window.first - 1, *attempt.step, window.last + 1)
        gaps = [range(before + 1, after) for before, after in pairwise(seen) if after > before + 1]
        word = "step" if sum(map(len, gaps)) == 1 else "steps"
        more = f" and {len(gaps) - MOST_GAPS:,} more ranges" if len(gaps) > MOST_GAPS else ""
        return f"{word} {', '.join(map(_range_text, gaps[:MOST_GAPS]))}{more} missing{_attempts_text(attempt)}"
    return None


def _why_invalid(log: RunLog, window: Window) -> str | None:
    attempt = log.attempt
    if attempt.bad_loss_step is not None:
        return f"loss is {attempt.bad_loss} from step {attempt.bad_loss_step}"
    if attempt.bad_grad_norm_step is not None:
        return f"the gradient norm is not finite from step {attempt.bad_grad_norm_step}"
    if not np.isfinite(attempt.step_time_s).all():
        return f"a step time in {_steps_text(window.first, window.last)} is not finite"
    return find_invalid_line(log.tail)


def _quoting(reason: str, tail: bytes) -> str:
    words = last_error(tail)
    return f"{reason}; {words}" if words else reason


def _attempts_text(attempt: LoggedAttempt) -> str:
    return f" (attempt {attempt.number})" if attempt.number > 1 else ""


def _steps_text(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _range_text(steps: range) -> str:
    return f"{steps[0]}-{steps[-1]}" if len(steps) > 2 else ", ".join(map(str, steps))
