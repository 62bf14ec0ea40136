# SPDX-License-Identifier: Apache-2.0
"""``rank_times.jsonl``: how long each rank computed, step by step; as large as it may be, whatever the run's length."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TextIO

from pydantic import FiniteFloat, TypeAdapter

from llmb.runs.steps import read_lines

MOST_VALUES = 1 << 20
"""About 8 MB; with up to 20,000 ranks, each of 50 steps has a line of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """The forward pass of a layer on each rank, in microseconds, as in ``Step.layer_s_max``."""

    first_step: int
    last_step: int
    """A later step where a run is long: then each value is the longest of these steps."""
    layer_us: tuple[FiniteFloat, ...]


class RankTimesFile:
    """Writes the times of a run of ``steps`` steps, after those that earlier attempts at it wrote."""

    def __init__(self, path: Path, steps: int, ranks: int) -> None:
        self.steps_a_line = max(1, math.ceil(steps * ranks / MOST_VALUES))
        self.stream: TextIO = path.open("a", buffering=1)
        self.pending: RankTimes | None = None

    def close(self) -> None:
        self._write()
        self.stream.close()

    def add(self, step: int, layer_s: Sequence[float]) -> None:
        """The seconds of every rank in the next step."""
        layer_us = tuple(round(1e6 * seconds, 1) for seconds in layer_s)
        if self.pending:
            layer_us = tuple(map(max, self.pending.layer_us, layer_us))
        first = self.pending.first_step if self.pending else step
        self.pending = RankTimes(first_step=first, last_step=step, layer_us=layer_us)
        if (step + 1) % self.steps_a_line == 0:
            self._write()

    def _write(self) -> None:
        if self.pending:
            self.stream.write(json.dumps(asdict(self.pending), separators=(",", ":")) + "\n")
        self.pending = None


def read_rank_times(path: Path) -> list[RankTimes]:
    """In order of the steps, each step once: by the last attempt that did it. Empty without a file.

    Raises BrokenRecord as ``read_steps`` does, OSError if the file cannot be read.
    """
    kept: list[RankTimes] = []
    for line in read_lines(path, _adapter().validate_json):
        while kept and kept[-1].last_step >= line.first_step:
            kept.pop()
        kept.append(line)
    return kept


@cache
def _adapter() -> TypeAdapter[RankTimes]:
    return TypeAdapter(RankTimes)
