# SPDX-License-Identifier: Apache-2.0
"""The outcome of a run by the steps of its window alone, as the reference suite's ``parse_train_timing.sh`` counts it.

It is a success that has the whole window, even if it ends before its last step. Statistics are of the population, or of
a sample (n - 1) as its script for Megatron-Bridge has them.
"""

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.errors import UsageError
from llmb.input_files import open_file
from llmb.logs.error_text import describe_content, find_recorder
from llmb.logs.reader import RunLog, read_log


@dataclass(frozen=True, slots=True)
class WindowSamples:
    """``kind`` is ``left out`` for what is not a run, or slowed down by what is recorded. None for unknown figures."""

    path: Path
    kind: Literal["success", "failed", "left out"]
    last_step: int | None = None
    """The last step that was logged, at most the window's last one."""
    time_mean_s: float | None = None
    time_std_s: float | None = None
    tflops_mean: float | None = None
    tflops_std: float | None = None


def read_samples(path: Path, rule: str, *, sample: bool = False) -> WindowSamples:
    """A file that cannot be read is a failed run."""
    try:
        with open_file(path) as stream:
            log = read_log(stream, rule)
    except (UsageError, OSError):
        return WindowSamples(path, "failed")
    return _judged(path, log, fewer=int(sample))


def _judged(path: Path, log: RunLog, fewer: int) -> WindowSamples:
    attempt = log.attempt
    if attempt.last is None:
        is_run = not log.size or log.truncated_line or describe_content(log.head, log.tail).is_log
        return WindowSamples(path, "failed" if is_run else "left out")
    if find_recorder(log.head, log.tail):
        return WindowSamples(path, "left out")
    window, bad = attempt.window, attempt.bad_loss_step is not None or attempt.bad_grad_norm_step is not None
    times = attempt.step_time_s
    if bad or window is None or not times or attempt.missing(window) or not all(map(math.isfinite, times)):
        last = attempt.max_step if window is None else min(attempt.max_step, window.last)
        return WindowSamples(path, "failed", last)
    tflops = array("d", filter(math.isfinite, attempt.tflops_per_gpu))
    figures = (*_mean_and_std(times, fewer), *_mean_and_std(tflops, fewer))
    return WindowSamples(path, "success", attempt.max_step, *figures)


def _mean_and_std(values: "array[float]", fewer: int) -> tuple[float | None, float | None]:
    """Arithmetic mean, and standard deviation by n, or by n - 1 if ``fewer`` is 1."""
    if not values:
        return None, None
    mean = _sum(values) / len(values)
    return mean, math.sqrt(_sum((value - mean) * (value - mean) for value in values) / max(1, len(values) - fewer))


def _sum(values: Iterable[float]) -> float:
    """Added in order, as awk does, so that the last printed digit is the same."""
    total = 0.0
    for value in values:
        total += value
    return total
