# SPDX-License-Identifier: Apache-2.0
"""The content of a step line of any format, and the lines that ``llmb`` itself logs."""

import math
import re
from typing import NamedTuple

STEP_LINE_HEAD = b"Training epoch "

INVALID_HEAD = "llmb: the run is invalid: "
_INVALID_HEAD = INVALID_HEAD.encode()
_INVALID = re.compile(rb"^%s([^\r\n]*)" % _INVALID_HEAD, re.MULTILINE)


class StepLine(NamedTuple):
    """The content of a step line."""

    step: int
    """The step's number in the log, which counts from 0 or from 1."""
    last: int
    """Number of the run's last step, as declared so far; ``step`` if the log does not declare it."""
    step_time_s: float
    loss: float | None
    tflops_per_gpu: float | None
    grad_norm: float | None = None
    skipped: int = 0
    """Number of updates skipped since the previous line because of a non-finite loss or gradient."""
    mean_of: int = 1
    """Number of steps over which the step time is averaged, if the log shows it; else 1."""
    rank: int | None = None
    """The rank in the line's prefix."""
    clock_s: float = 0.0
    """Resolution of a coarse clock from which the time of all steps since the previous line is derived; else 0."""
    after: int | None = None
    """The step after which the run began or resumed; only in its first line, if the log shows it."""
    logged_s: float | None = None
    """The line's timestamp in Unix time."""
    left_out: str | None = None
    """Description of the time excluded from the step times so far."""
    contradiction: str | None = None
    """Description of a logged value that contradicts the step times so far."""
    interrupted: bool = False
    """True after an evaluation or a checkpoint since the previous line, which the step time excludes."""
    gbs: int | None = None
    """Sequences per step; None, like the next two fields, if the log lacks or rounds the number."""
    samples: int | None = None
    """Sequences of all steps so far."""
    tokens: int | None = None
    """Tokens of the step, without padding."""
    tokens_per_s_per_gpu: float | None = None
    """The printed value if it is independent of the step time; else None."""
    ramped_up: bool = False
    """True if the log shows that the batch size is still growing."""
    profiled: bool = False
    """True if a profiler starts or ends in the step."""


def format_step_line(
    *,
    step: int,
    steps: int,
    lr: float,
    global_batch_size: int,
    peak_memory_bytes: int | None,
    memory_allocated_bytes: int | None,
    loss: float,
    step_time_s: float,
    tflops_per_gpu: float | None,
    consumed_samples: int,
    epoch: int = 0,
) -> str:
    """Return the line of step ``step`` (from 0) of ``steps``, without a newline; None values are omitted."""
    fields = {
        "lr": f"{lr:.4g}",
        "global_batch_size": global_batch_size,
        "global_step": step,
        "peak_memory_usage": peak_memory_bytes,
        "memory_allocated": memory_allocated_bytes,
        "reduced_train_loss": f"{loss:.4g}" if math.isfinite(loss) else "nan",
        "train_step_timing in s": _plain_decimal(step_time_s),
        "TFLOPS_per_GPU": None if tflops_per_gpu is None else f"{tflops_per_gpu:.4g}",
        "consumed_samples": consumed_samples,
    }
    written = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return " | ".join([f"Training epoch {epoch}, iteration {step}/{steps - 1}", *written])


def _plain_decimal(value: float) -> str:
    """Format a number with at least four significant digits and no exponent, which scripts would drop."""
    digits = 3 - math.floor(math.log10(value)) if 0 < value < math.inf else 3
    return f"{value:.{max(3, digits)}f}"


def format_invalid_line(why: str) -> str:
    """Return the line that declares a run invalid."""
    return f"{INVALID_HEAD}{why}"


def find_invalid_line(text: bytes) -> str | None:
    """Return why the run that logged ``text`` declared itself invalid; None if it did not."""
    match = _INVALID.search(text) if text.rfind(_INVALID_HEAD) >= 0 else None  # which is faster
    return match[1].decode("utf-8", "replace").strip() if match else None


SAVE_HEAD = b"Global Checkpoint Save :"
LOAD_HEAD = b"Global Checkpoint Load :"


class SaveLine(NamedTuple):
    """A save of a checkpoint after ``iteration`` steps; ``start_s`` is in Unix time."""

    rank: int
    iteration: int
    start_s: float
    duration_s: float


class LoadLine(NamedTuple):
    """A load of a checkpoint; ``start_s`` is in Unix time."""

    rank: int
    start_s: float
    duration_s: float


def format_save_line(line: SaveLine) -> str:
    """Return the line of a save without a newline, with times in seconds to three decimals."""
    return (
        f"{SAVE_HEAD.decode()} Rank: {line.rank} : Iteration: {line.iteration}"
        f" : Start time: {line.start_s:.3f}s : Save duration: {line.duration_s:.3f}s"
    )


def format_load_line(line: LoadLine) -> str:
    """Return the line of a load without a newline, with times in seconds to three decimals."""
    return (
        f"{LOAD_HEAD.decode()} Rank : {line.rank} : Start time : {line.start_s:.3f}s"
        f" : Time spent in load_checkpoint: {line.duration_s:.3f}s"
    )
