# SPDX-License-Identifier: Apache-2.0
"""Writes and finds the line that a run logs after each step."""

import math
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

STEP_LINE_HEAD = b"Training epoch "
MAX_BODY_BYTES = 4000
MAX_LINE_BYTES = 4096
"""The longest step line: the head takes at most 57 bytes, the fields ``MAX_BODY_BYTES``."""

# Every repetition is bounded and the body possessive, so that text without line ends takes no quadratic time.
_LINE = re.compile(
    rb"Training epoch \d{1,9}, iteration (\d{1,9})/(\d{1,9}) \|([^\r\n]{0,%d}+)(?:[\r\n]|\Z)" % MAX_BODY_BYTES
)
STEP_TIME_FIELD = b" train_step_timing in s: "
LOSS_FIELD = b" reduced_train_loss: "
TFLOPS_FIELD = b" TFLOPS_per_GPU: "
_NAMES_READ = tuple(field.strip(b": ") for field in (STEP_TIME_FIELD, LOSS_FIELD, TFLOPS_FIELD))
_VALUE = rb"([^ |\r\n]+)"
_STEP_TIME = re.compile(STEP_TIME_FIELD + _VALUE)
_LOSS = re.compile(LOSS_FIELD + _VALUE)
_TFLOPS = re.compile(TFLOPS_FIELD + _VALUE)

INVALID_HEAD = "llmb: the run is invalid: "
_INVALID = re.compile(rb"^%s([^\r\n]*)" % INVALID_HEAD.encode(), re.MULTILINE)


class StepLine(NamedTuple):
    """The content of a step line. A field that the line does not have is None."""

    step: int
    last: int
    """Number of the run's last step, as declared by the line."""
    step_time_s: float
    loss: float | None
    tflops_per_gpu: float | None
    grad_norm: float | None = None


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
    """The line of step ``step`` (from 0) of ``steps``, without line end. None values are left out."""
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
    """At least four significant digits, and no exponent: scripts that read these logs would truncate it."""
    digits = 3 - math.floor(math.log10(value)) if 0 < value < math.inf else 3
    return f"{value:.{max(3, digits)}f}"


def format_invalid_line(why: str) -> str:
    """The last line of a run whose loss or gradient norm is not finite; the step line has no gradient norm."""
    return f"{INVALID_HEAD}{why}"


def find_invalid_line(text: bytes) -> str | None:
    """The reason for which the run that logged ``text`` declared itself invalid, if it did."""
    match = _INVALID.search(text)
    return match[1].decode("utf-8", "replace").strip() if match else None


def find_steps(text: bytes, start: int = 0, end: int = sys.maxsize) -> Iterator[StepLine]:
    """The step lines in ``text[start:end]``, which consists of complete lines."""
    for match in _LINE.finditer(text, start, end):
        number, last, body = match.groups()
        if STEP_LINE_HEAD in body:
            yield from filter(None, _split(match[0], ended=True))
        elif step := _read(number, last, body):
            yield step


def find_unended_steps(text: bytes) -> tuple[list[StepLine], bool]:
    """The steps in a file's last line, which has no line end, and whether a step line was truncated there."""
    found = list(_split(text, ended=False))
    return [step for step in found if step], bool(found) and found[-1] is None


def _split(line: bytes, *, ended: bool) -> Iterator[StepLine | None]:
    """The steps of a line without line end, None for a truncated step: its writer died, or others wrote too."""
    parts = line.split(STEP_LINE_HEAD)[1:]
    for count, part in enumerate(parts, start=1):
        match = _LINE.fullmatch(STEP_LINE_HEAD + part)
        complete = match and ((ended and count == len(parts)) or _is_complete(match[3]))
        yield _read(*match.groups()) if match and complete else None


def _is_complete(body: bytes) -> bool:
    """Whether the values that are read are complete although there is no line end."""
    name, _, value = body.rpartition(b"|")[2].strip().partition(b": ")
    return b" consumed_samples: " in body and value != b"" and name not in _NAMES_READ


def _read(number: bytes, last: bytes, body: bytes) -> StepLine | None:
    """None if the line has no step time, or a value that is not a number."""
    step_time = _STEP_TIME.search(body)
    if not step_time:
        return None
    loss = _LOSS.search(body)
    tflops = _TFLOPS.search(body)
    try:
        return StepLine(
            int(number),
            int(last),
            float(step_time[1]),
            float(loss[1]) if loss else None,
            float(tflops[1]) if tflops else None,
        )
    except ValueError:
        return None
