# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run according to its log: its status, the reason for it, and the step time."""

import hashlib
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from llmb.base.errors import UsageError
from llmb.base.shown_text import counted
from llmb.base.statistics import Statistics, are_between, describe, describe_means
from llmb.catalogue.records import Window
from llmb.readers.contradictions import CLOCK_ERROR_S, LONGEST_STEP_S, SHORTEST_STEP_S, clock_contradiction
from llmb.readers.logs.error_text import describe_content, error_at_end, fault_at_end, find_recorder, last_error
from llmb.readers.logs.formats import format_called
from llmb.readers.logs.formats.format import Value
from llmb.readers.logs.logged_attempt import GBS, GPUS, MOST_APART, LoggedAttempt
from llmb.readers.logs.reader import RunLog
from llmb.readers.logs.step_line import find_invalid_line

MOST_GAPS = 20
LOG_WARNING = "log_warning"
"""Key of ``warnings`` among the faults of a run."""
LONGEST_PAUSE_S, MOST_PAUSE = 60.0, 10
"""A pause between two lines is suspicious if it exceeds both this time and this multiple of their steps' time."""
DISTINCT_TIMES = 5
"""Minimum number of different step times that identify a run."""
WIDEST_CLOCK_ERROR = 0.05
"""Maximum relative error with which a step time from a clock of whole seconds is reported."""
MOST_TFLOPS = 1e30
"""Larger numbers are considered damaged."""
_BELOW_0 = math.nextafter(0.0, -1.0)
Status = Literal[
    "success",
    "too_few_steps",
    "resumed",
    "incomplete",
    "no_data",
    "invalid",
    "profiled",
    "traced",
    "not_training_log",
    "unreadable",
]
FINISHED: tuple[Status, ...] = ("success", "too_few_steps", "resumed", "profiled", "traced")
"""Statuses of runs that completed their steps with valid values, as far as their logs were read."""


@dataclass(frozen=True, slots=True)
class LogOutcome:
    """The outcome of the run in one log file. Unknown values are None."""

    status: Status
    reason: str
    window: Window | None = None
    steps: int | None = None
    """Number of steps that the last attempt logged."""
    attempts: int | None = None
    max_step: int | None = None
    step_time_s: Statistics | None = None
    tflops_per_gpu: Statistics | None = None
    clock_error_s: float | None = None
    """Maximum error of the step time, because the log's clock is coarse."""
    left_out: str | None = None
    """Description of the time excluded from the step times, such as evaluations."""
    warnings: tuple[str, ...] = ()
    """Suspicious facts about the window, and logged values that contradict the step times, which remain valid."""
    loss_first: float | None = None
    loss_last: float | None = None
    step_times_s: Sequence[float] = ()
    """The step times behind ``step_time_s``, in the order of the steps; empty if the log's clock is coarse."""
    logged_s: Sequence[float] = ()
    """The timestamps of the window's lines; empty if a line has none, or if a line covers several steps."""
    logged_last_s: float | None = None
    """The timestamp of the last step line."""
    format: str | None = None
    """Name of the log's format; None if it has no step line."""
    configuration: Mapping[str, Value] = field(default_factory=dict)
    """The configuration of the run from the log and its path; see ``llmb.readers.logs.configuration``."""
    error_at_end: str | None = None
    """The error in the log after the last step of a measurement; the scheduler's time limit does not count."""
    digest: str | None = None
    """Digest of the logged values, equal for copies of a log; None if the log has no steps."""

    @property
    def gpus(self) -> int | None:
        """Number of GPUs, from the log or its name; None if unknown."""
        gpus = self.configuration.get(GPUS)
        return gpus if isinstance(gpus, int) else None

    @property
    def gbs(self) -> int | None:
        """Global batch size, from the log or its name; None if unknown."""
        gbs = self.configuration.get(GBS)
        return gbs if isinstance(gbs, int) else None


def judge_log(log: RunLog) -> LogOutcome:
    """Return the outcome of a log."""
    if log.attempt.last is None:
        return replace(_without_steps(log), format=log.format, configuration=log.configuration)
    return _judged(log, log.attempt.last)


def _digest(log: RunLog) -> str:
    """Hash the steps alone if they identify the run, so that recompressed and reprinted logs have the same digest."""
    attempt = log.attempt
    times = attempt.step_time_s
    ends = (attempt.number, attempt.steps, attempt.max_step, attempt.loss_first, attempt.loss_last)
    varies = len(set(times[: 10 * DISTINCT_TIMES])) >= DISTINCT_TIMES
    columns = [hashlib.sha256(column).digest() for column in (attempt.step, times)]
    facts = (ends, *columns, () if varies else (log.size, log.head, log.tail))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _judged(log: RunLog, last: int) -> LogOutcome:
    attempt = log.attempt
    window, unfit = _window(attempt, last)
    unfinished = _why_unfinished(log, last, window)
    bad = _why_invalid(log, window)
    if bad or unfinished:
        status: Status = "invalid" if bad else "incomplete"
        return _outcome(log, status, "; ".join(filter(None, (bad, unfinished))), window)
    if window and (why := _profiled_text(attempt, window)):
        times = log.attempt.step_time_s
        return _outcome(log, "profiled", why, window, describe(times) if times else None)
    if window and not len(attempt.step):
        every = (
            f"only one step in {attempt.interval}" if attempt.mean_of == 1 else f"the mean of {attempt.mean_of} steps"
        )
        return _outcome(log, "too_few_steps", f"{steps_span(window.first, window.last)}: {every} is logged", window)
    if last == attempt.first_step:
        if log.attempt.continued:
            reason = "resumed for one step, which includes warm-up; it shows that the checkpoint loads"
            return _outcome(log, "resumed", reason, window)
        return _outcome(log, "too_few_steps", "the only step is the first one, which includes warm-up", window)
    if window is None:
        return _outcome(log, "too_few_steps", unfit, None)
    return _measured(log, last, window)


def _measured(log: RunLog, last: int, window: Window) -> LogOutcome:
    attempt, weights = log.attempt, log.attempt.weights
    if attempt.mean_of > 1 or weights:
        before = weights[0] - 1 if weights else 0
        window = Window(first=attempt.step[0] - before, last=attempt.step[-1], rule=window.rule)
    error_s = attempt.clock_s / sum(weights or (len(attempt.step),)) if attempt.clock_s else None
    times = _statistics(attempt.step_time_s, weights, error_s)
    if error_s and error_s > WIDEST_CLOCK_ERROR * times.mean:
        return _outcome(log, "too_few_steps", _coarse_text(attempt, times), window)
    rates = attempt.tflops_per_gpu
    tflops = _statistics(rates, weights) if are_between(_BELOW_0, rates, MOST_TFLOPS) else None
    steps = f"{steps_span(window.first, window.last)} of {last + 1 - attempt.first_number}"
    steps += f"{_interval_text(log)}{_attempts_text(attempt)}"
    steps += f"; the clock shows whole seconds: ±{error_s:.2g} s, spread unknown" if error_s else ""
    steps += f"; {attempt.left_out}" if attempt.left_out else ""
    steps += f"; after its last step: {error}" if (error := error_at_end(log.tail)) else ""
    status, reason = find_recorder(log.head, log.tail) or ("success", steps)
    outcome = _outcome(log, status, reason, window, times, tflops)
    outcome = replace(outcome, warnings=tuple(_warnings(attempt)), error_at_end=fault_at_end(log.tail) or None)
    return replace(outcome, clock_error_s=error_s, step_times_s=()) if error_s else outcome


def _warnings(attempt: LoggedAttempt) -> Iterator[str]:
    if attempt.contradiction:
        yield attempt.contradiction
    if any(lap.clock_s < -CLOCK_ERROR_S for lap in attempt.laps):
        yield "the clock of the log's lines goes back in the window"
        return
    pause = max(attempt.laps, key=lambda lap: lap.clock_s - lap.steps_s - lap.between_s, default=None)
    if pause and pause.clock_s - pause.between_s > max(LONGEST_PAUSE_S, MOST_PAUSE * pause.steps_s):
        yield f"between two lines of the window {pause.clock_s:.4g} s passed, of which steps took {pause.steps_s:.4g} s"


def _profiled_text(attempt: LoggedAttempt, window: Window) -> str | None:
    first, last = attempt.profiled or (0, -1)
    inside = range(max(first, window.first), min(last, window.last) + 1)
    if not inside:
        return None
    hidden = f", and {counted(len(attempt.untimed), 'step')} without a time" if attempt.untimed else ""
    return f"a profiler ran in {steps_span(inside[0], inside[-1])} of the window{hidden}; profiling slows a run down"


def _statistics(values: "array[float]", weights: Sequence[int] | None, error: float | None = None) -> Statistics:
    if error or weights:
        return describe_means(values, weights or (1,) * len(values), error or 0.0)
    return describe(values)


def _coarse_text(attempt: LoggedAttempt, times: Statistics) -> str:
    steps = "1 step" if times.count == 1 else f"{times.count} steps"
    seconds = times.mean * times.count
    precision = f"±{100 * attempt.clock_s / seconds:.0f} %" if seconds else "of unknown precision"
    most = f"{100 * WIDEST_CLOCK_ERROR:.0f} %"
    return f"the log's clock shows whole seconds: {steps} in {seconds:.0f} s, {precision}; the limit is ±{most}"


def _window(attempt: LoggedAttempt, last: int) -> tuple[Window | None, str]:
    if attempt.window and last == attempt.window_last:
        return attempt.window, ""
    try:
        return attempt.resolve_window(last), ""
    except UsageError as error:
        return None, error.what


def _outcome(
    log: RunLog,
    status: Status,
    reason: str,
    window: Window | None,
    step_time_s: Statistics | None = None,
    tflops_per_gpu: Statistics | None = None,
) -> LogOutcome:
    attempt = log.attempt
    return LogOutcome(
        status=status,
        reason=reason,
        window=window,
        steps=attempt.steps,
        attempts=attempt.number,
        max_step=attempt.max_step,
        step_time_s=step_time_s,
        tflops_per_gpu=tflops_per_gpu,
        left_out=attempt.left_out,
        loss_first=_finite(attempt.loss_first),
        loss_last=_finite(attempt.loss_last),
        step_times_s=attempt.step_time_s if step_time_s else (),
        logged_s=attempt.logged_s if _tells_when(attempt) else (),
        logged_last_s=attempt.logged_last_s,
        format=log.format,
        configuration=_configured(log),
        digest=_digest(log),
    )


def _configured(log: RunLog) -> Mapping[str, Value]:
    gbs = log.attempt.work.gbs
    return {GBS: gbs, **log.configuration} if gbs else log.configuration


def _tells_when(attempt: LoggedAttempt) -> bool:
    return len(attempt.logged_s) == len(attempt.step) and all(attempt.logged_s) and not attempt.weights


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _without_steps(log: RunLog) -> LogOutcome:
    if not log.size:
        return LogOutcome("no_data", "empty file", steps=0, attempts=0)
    if log.truncated_line:
        return LogOutcome("no_data", "the file ends within its first step line", steps=0, attempts=0)
    content = describe_content(log.head, log.tail)
    reason = _quoting(f"no step line: {content.text}", log.tail)
    return LogOutcome("no_data" if content.is_log else "not_training_log", reason, steps=0, attempts=0)


def _why_unfinished(log: RunLog, last: int, window: Window | None) -> str | None:
    attempt = log.attempt
    if not attempt.finished:
        where = ", while logging the next" if log.truncated_line else ""
        steps = last + 1 - attempt.first_number
        return _quoting(f"died after step {attempt.max_step} of {steps}{where}{_attempts_text(attempt)}", log.tail)
    if window and (gaps := attempt.missing(window)):
        word = "step" if sum(map(len, gaps)) == 1 else "steps"
        more = f" and {len(gaps) - MOST_GAPS:,} more ranges" if len(gaps) > MOST_GAPS else ""
        return f"{word} {', '.join(map(_range_text, gaps[:MOST_GAPS]))}{more} missing{_attempts_text(attempt)}"
    return None


def _why_invalid(log: RunLog, window: Window | None) -> str | None:
    attempt = log.attempt
    if attempt.bad_loss_step is not None:
        return f"loss is {attempt.bad_loss} from step {attempt.bad_loss_step}"
    if attempt.bad_grad_norm_step is not None:
        return f"the gradient norm is not finite from step {attempt.bad_grad_norm_step}"
    if window and not attempt.clock_s and not are_between(SHORTEST_STEP_S, attempt.step_time_s, LONGEST_STEP_S):
        bad = next(filter(_is_no_time, attempt.step_time_s))
        return f"a step time in {steps_span(window.first, window.last)} is {_bad_time_text(bad)}"
    if flaw := attempt.work.flaw(log.configuration) or _other_layout(log):
        return flaw
    if max(attempt.repeated_s) > MOST_APART * min(attempt.repeated_s):
        first, again = attempt.repeated_s
        return f"steps are logged twice with different times, which sum to {first:.4g} s, and then to {again:.4g} s"
    if attempt.skipped_in_window:
        steps = "1 step" if attempt.skipped_in_window == 1 else f"{attempt.skipped_in_window} steps"
        return f"{steps} of the window skipped the update of the parameters"
    return (clock_contradiction(attempt.laps) if window else None) or find_invalid_line(log.tail)


def _other_layout(log: RunLog) -> str | None:
    for key, size in log.sizes_later.items():
        if (before := log.configuration.get(key, size)) != size:
            return f"{key.removeprefix('layout.')} is {before} at first, but {size} in arguments between steps"
    return None


def _is_no_time(seconds: float) -> bool:
    return not SHORTEST_STEP_S < seconds < LONGEST_STEP_S


def _bad_time_text(seconds: float) -> str:
    if seconds <= SHORTEST_STEP_S:
        return f"{seconds:g} s"
    return f"{seconds:.4g} s, which is impossible" if math.isfinite(seconds) else "not finite"


def _quoting(reason: str, tail: bytes) -> str:
    words = last_error(tail)
    return f"{reason}; {words}" if words else reason


def _interval_text(log: RunLog) -> str:
    interval = max(log.attempt.interval, log.attempt.mean_of)
    if interval == 1 or log.format is None:
        return ""
    means = format_called(log.format).mean_of_interval
    most = "up to " if len(set(log.attempt.weights or ())) > 1 else ""
    return f", by means of {most}{interval} steps" if means else f", of which one in {interval} is logged"


def _attempts_text(attempt: LoggedAttempt) -> str:
    return f" (attempt {attempt.number})" if attempt.number > 1 else ""


def steps_span(first: int, last: int) -> str:
    """Return a string such as ``steps 35-44``."""
    return f"step {first}" if first == last else f"steps {first}-{last}"


def _range_text(steps: range) -> str:
    return f"{steps[0]}-{steps[-1]}" if len(steps) > 2 else ", ".join(map(str, steps))
