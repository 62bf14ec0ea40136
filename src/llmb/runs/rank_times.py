# SPDX-License-Identifier: Apache-2.0
"""``rank_times.jsonl``: parts of each rank's step times, per step or group of steps; finds the slowest rank."""

import json
import math
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray
from pydantic import FiniteFloat, TypeAdapter

from llmb.base.missing import Missing
from llmb.catalogue.records import Layout, Recipe
from llmb.runs.folder import BrokenRecord, read_or_missing
from llmb.runs.steps import read_lines

MOST_VALUES = 1 << 20
"""Maximum number of values of an attempt, about 8 MB."""


class RankTime(NamedTuple):
    """The parts of a rank's step, in seconds."""

    input_s: float
    """The time for which the device waited for the loader of the data."""
    copy_s: float
    """The time for which the device waited for copies of micro-batches from the host."""
    layer_s: float
    """The mean forward time of a layer in the first micro-batch."""
    wait_s: float
    """The other time before and between these forward passes: waits for collectives, and for the rank's own host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The parts of each rank's step, in microseconds, as in ``RankTime``."""

    first_step: int
    last_step: int
    """The last step of a group of several steps, or ``first_step``; each value is the longest of the group."""
    input_us: tuple[FiniteFloat, ...]
    copy_us: tuple[FiniteFloat, ...]
    layer_us: tuple[FiniteFloat, ...]
    wait_us: tuple[FiniteFloat, ...]


class RankTimesFile:
    """Writes the rank times of a run of ``steps`` steps, after the lines of earlier attempts."""

    def __init__(self, path: Path, steps: int, ranks: int) -> None:
        self.steps_a_line = max(1, math.ceil(steps * ranks * len(RankTime._fields) / MOST_VALUES))
        self.stream: TextIO = path.open("a", buffering=1)
        self.pending: list[tuple[float, ...]] = []

    def close(self) -> None:
        self._write()
        self.stream.close()

    def add(self, step: int, ranks: Sequence[RankTime]) -> None:
        parts = list(zip(*ranks, strict=True))
        if self.pending:
            parts = [tuple(map(max, *both)) for both in zip(self.pending, parts, strict=True)]
        else:
            self.first_step = step
        self.pending, self.last_step = parts, step
        if (step + 1) % self.steps_a_line == 0:
            self._write()

    def _write(self) -> None:
        if self.pending:
            parts = [tuple(round(1e6 * value, 1) for value in part) for part in self.pending]
            line = RankTimes(
                first_step=self.first_step,
                last_step=self.last_step,
                input_us=parts[0],
                copy_us=parts[1],
                layer_us=parts[2],
                wait_us=parts[3],
            )
            self.stream.write(json.dumps(asdict(line), separators=(",", ":")) + "\n")
        self.pending = []


def read_rank_times(path: Path) -> list[RankTimes]:
    """Return the rank times of each step's last attempt, in order.

    Raise BrokenRecord or OSError if the file is unusable.
    """
    times: list[RankTimes] = []
    for line in read_lines(path, _adapter().validate_json):
        ranks = {len(values) for values in (line.input_us, line.copy_us, line.layer_us, line.wait_us)}
        if len(ranks) != 1 or 0 in ranks:
            raise BrokenRecord("a line does not have the same number of ranks for all parts", where=str(path))
        while times and times[-1].last_step >= line.first_step:
            times.pop()
        times.append(line)
    return times


@cache
def _adapter() -> TypeAdapter[RankTimes]:
    return TypeAdapter(RankTimes)


class RankExcess(NamedTuple):
    """The median seconds per step that a rank takes longer than the median rank; 0 if it takes less."""

    input_s: float
    copy_s: float
    compute_s: float
    """The excess of the forward passes of all micro-batches."""
    wait_s: float
    """The excess of waits in the first micro-batch."""


class Straggler(NamedTuple):
    """The rank that all others wait for, and the number of lines in which it is the slowest."""

    rank: int
    lines: int
    excess: RankExcess


COMPUTE, WAIT = (RankExcess._fields.index(name) for name in ("compute_s", "wait_s"))


@dataclass(frozen=True, slots=True)
class Excess:
    """The times by which ranks exceed the median rank, at least 0."""

    lines: Sequence[RankTimes]
    parts_s: NDArray[np.float64]
    """Seconds per step by which each part exceeds the median rank's, [lines, 4, ranks]."""
    forward_s: float
    """Seconds of the median rank's forward passes in a step."""
    rivals: int
    """The number of ranks of a pipeline stage, which are compared with each other."""

    @property
    def alone_s(self) -> NDArray[np.float64]:
        """Return the sums of all parts but waits, [lines, ranks]."""
        alone: NDArray[np.float64] = self.parts_s[:, :WAIT].sum(axis=1)
        return alone

    @property
    def alone_pct(self) -> NDArray[np.float64]:
        """Return ``alone_s`` in percent of the forward passes of the median rank."""
        return 100 * self.alone_s / max(self.forward_s, SMALLEST_S)

    def of_rank(self, rank: int) -> RankExcess:
        return RankExcess(*np.median(self.parts_s[:, :, rank], axis=0).tolist())

    def straggler(self, same_rank: float, slower: float) -> Straggler | None:
        """Return the rank slowest in at least ``same_rank`` of lines, by ``slower`` of the forward time; or None."""
        for times in (self.alone_s, *([self.parts_s[:, WAIT]] if self.rivals >= FEWEST_FOR_WAITS else [])):
            slowest = np.bincount(times.argmax(axis=-1))
            rank = int(slowest.argmax())
            often = slowest[rank] >= same_rank * len(times)
            if often and np.median(times[:, rank]) >= max(slower * self.forward_s, SMALLEST_S):
                return Straggler(rank, int(slowest[rank]), self.of_rank(rank))
        return None


FEWEST_FOR_WAITS = 3
SMALLEST_S = 1e-6


def read_excess(path: Path, recipe: Recipe, steps: Container[int] | None = None) -> Excess | Missing:
    """Return ``rank_excess`` of the lines with any of ``steps`` (None: all); Missing if times are unavailable."""
    lines = read_or_missing("the times of its ranks", lambda: read_rank_times(path))
    if isinstance(lines, Missing):
        return lines
    if steps is not None:
        lines = [line for line in lines if any(step in steps for step in range(line.first_step, line.last_step + 1))]
    return rank_excess(lines, recipe.layout, same_layers=recipe.model.moe is None)


def rank_excess(lines: Sequence[RankTimes], layout: Layout, *, same_layers: bool) -> Excess | Missing:
    """Return the times by which ranks exceed the median rank of their stage; Missing if they cannot be compared."""
    if not lines:
        return Missing("the times of single ranks were not recorded")
    if {len(line.layer_us) for line in lines} != {layout.gpus}:
        return Missing(f"the recorded times do not match the run's {layout.gpus} ranks")
    rivals = layout.gpus // layout.pp
    if rivals == 1 and not same_layers:
        return Missing("each pipeline stage has a single rank, and stages have different layers")
    parts = np.array([[line.input_us, line.copy_us, line.layer_us, line.wait_us] for line in lines]) / 1e6
    in_stages = parts.reshape(*parts.shape[:2], layout.pp, rivals)  # consecutive ranks
    beyond = (in_stages - _median(in_stages)).reshape(parts.shape)
    middle = _median(parts[:, COMPUTE])
    if same_layers:
        beyond[:, COMPUTE] = parts[:, COMPUTE] - middle
    layer_passes = layout.layers / layout.pp * layout.ga
    beyond[:, COMPUTE] *= layer_passes
    return Excess(lines, beyond.clip(min=0.0), float(np.median(middle)) * layer_passes, rivals)


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the lower median over the last axis: the time of one rank, not the mean of two."""
    middle: NDArray[np.float64] = np.quantile(values, 0.5, axis=-1, keepdims=True, method="lower")
    return middle
