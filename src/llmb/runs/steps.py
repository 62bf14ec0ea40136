# SPDX-License-Identifier: Apache-2.0
"""``metrics.jsonl``: one JSON object per step, in full precision, readable while it is written."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from io import DEFAULT_BUFFER_SIZE
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter
from pydantic_core import from_json

from llmb.base.input_files import MOST_VALUES_IN_LINE, check_values, open_regular, read_regular
from llmb.runs.folder import BrokenRecord

Line = TypeVar("Line")
MOST_BYTES = 1 << 29
"""Maximum size of the file in bytes, for about half a million steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """The balance of tokens between experts, over all ranks and layers."""

    max_over_mean: float
    """Tokens of the busiest expert divided by the mean of its layer, in the worst layer; 1 is balanced."""
    idle_experts: int
    """Experts without tokens, summed over layers."""
    dropped_share: float = 0.0
    """Fraction of the routed tokens that were dropped, because their experts were full."""
    layers_max_over_mean: tuple[float, ...] = ()
    """``max_over_mean`` of each layer with experts; empty if it was not recorded."""
    layers_rank_max_over_mean: tuple[float, ...] = ()
    """Rows of the fullest rank divided by the mean over ranks that exchange tokens, per layer with experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Counts:
    """Numbers of tensors, over all layers, that were cast to FP8 in a step and had saturated or non-finite values."""

    saturated_tensors: int
    """Tensors with values beyond the range of their scale, which were clamped."""
    not_finite_tensors: int
    """Tensors with infinite values or NaN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: the slowest rank's time (on CPUs, the first rank's), and the largest memory of any rank."""

    step: int
    step_time_s: float
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    """Places that documents fill; all places if a sequence is one document."""
    peak_memory_bytes: int
    peak_memory_rank: int
    rank_step_time_s_min: float
    rank_step_time_s_max: float
    slowest_rank: int
    updated: bool = True
    """True if the parameters were updated."""
    padded_tokens: int
    """Places of all sequences."""
    counted_labels: int
    """Number of labels in the loss."""
    data_wait_s: float
    """The time that the step waited for its data, on the rank that waited longest."""
    pause_s: float
    """The time between the previous step and this one, such as for saving, on the rank where it was longest."""
    layer_s_median: float
    """Median over all ranks of a layer's mean forward time in the first micro-batch."""
    outside_layers_s: float
    """Time before and between layers in the first micro-batch, on the rank with the least; without waits for data."""
    ended_s: float
    """The end of the step as the first rank saw it, in Unix time."""
    saving: bool = False
    """True if a checkpoint was being written during the step."""
    profiled: bool = False
    """True if a profiler or NCCL's log slowed the step down; statistics exclude it."""
    expert_load: ExpertLoad | None = None
    """None for a model without experts, or for a pretended rank."""
    fp8: Fp8Counts | None = None
    """None for a run that does not use FP8, or for a pretended rank."""
    sum_of_squares: int | None = None
    """Sum of the squared lengths of all documents; None if a sequence is one document."""
    chunked_sum_of_squares: int | None = None
    """``sum_of_squares`` with documents split at attention chunks; None if no document is longer than a chunk."""
    host_ahead_s: float | None = None
    """Seconds that the host waited for the GPU, on the rank where it was shortest; None on a CPU."""

    @property
    def finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.loss, self.grad_norm) if value is not None)

    def values_text(self) -> str:
        """Return the number, loss and gradient norm of a step as text, to describe an invalid step."""
        values = {"loss": self.loss, "gradient norm": self.grad_norm}
        texts = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
        return f"step {self.step}: {texts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Numbers of steps that make a run's values invalid, or may do so."""

    non_finite_steps: int
    """Steps whose loss or gradient norm is not finite. The first of them ends a run."""
    skipped_steps: int
    """Steps that did not update the parameters."""


def count_steps(steps: Sequence[Step]) -> Counters | None:
    """Count the invalid and the skipped steps; return None for a run without steps."""
    if not steps:
        return None
    return Counters(
        non_finite_steps=sum(not step.finite for step in steps), skipped_steps=sum(not step.updated for step in steps)
    )


def step_to_json(step: Step) -> str:
    """Format a step as one line; numbers that are not finite are null, with texts in ``not_finite``."""
    values: dict[str, Any] = asdict(step)
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    spoiled = {name: str(value) for name, value in numbers.items() if not math.isfinite(value)}
    values.update(dict.fromkeys(spoiled, None))
    if spoiled:
        values["not_finite"] = spoiled
    return json.dumps(values, allow_nan=False)


def step_from_json(line: str | bytes) -> Step:
    """Parse a step. Raise ValueError if the line is not a complete step."""
    if (b"not_finite" if isinstance(line, bytes) else "not_finite") not in line:  # type: ignore[operator]
        return _adapter().validate_json(line)  # twice as fast as the general case
    values = from_json(line)
    if isinstance(values, dict) and isinstance(spoiled := values.pop("not_finite", None), dict):
        values.update({name: float(text) for name, text in spoiled.items() if isinstance(text, str)})
    return _adapter().validate_python(values)


@cache
def _adapter() -> TypeAdapter[Step]:
    return TypeAdapter(Step)


def read_steps(path: Path) -> list[Step]:
    """Return the file's steps, perhaps none.

    Raise BrokenRecord if any but the last line is invalid, OSError if unreadable.
    """
    return read_lines(path, step_from_json)


def read_lines(path: Path, read: Callable[[bytes], Line]) -> list[Line]:
    """Parse each line of a file, if it exists; omit an invalid last line. Raise errors as ``read_steps`` does."""
    if not path.exists():
        return []
    records: list[Line] = []
    lines = read_regular(path, MOST_BYTES).rstrip(b"\n").split(b"\n")
    for number, line in enumerate(lines, start=1):
        try:
            check_values(line, MOST_VALUES_IN_LINE)
            records.append(read(line))
        except ValueError as error:
            if number < len(lines):
                raise BrokenRecord("the line is damaged or incomplete", where=f"{path}:{number}") from error
    return records


class StepNews(NamedTuple):
    """A completed step. Values that the program does not report are None."""

    step: int
    step_time_s: float
    loss: float | None
    grad_norm: float | None = None
    tflops_per_gpu: float | None = None
    """The value that the program logs, in its own convention."""
    profiled: bool = False
    """True if recording slowed the step down."""


class StepFollower:
    """Reads lines added to ``metrics.jsonl`` since the last call of ``new``; a replaced file is read again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.inode: int | None = None

    def new(self) -> Iterator[StepNews]:
        try:
            stream = open_regular(self.path, buffering=DEFAULT_BUFFER_SIZE)
        except FileNotFoundError:
            return
        except OSError as error:
            raise BrokenRecord(f"the steps cannot be read: {error.strerror}", where=str(self.path)) from error
        with stream:
            inode = os.fstat(stream.fileno()).st_ino
            if inode != self.inode:
                self.inode, self.offset = inode, 0
            stream.seek(self.offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self.offset += len(line)
                try:
                    step = step_from_json(line)
                except ValueError as error:
                    where = f"{self.path}, byte {self.offset - len(line)}"
                    raise BrokenRecord("the line is damaged or incomplete", where=where) from error
                yield StepNews(step.step, step.step_time_s, step.loss, step.grad_norm, profiled=step.profiled)
