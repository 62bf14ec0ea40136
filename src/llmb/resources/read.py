# SPDX-License-Identifier: Apache-2.0
"""Reads the samples of a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from llmb.input_files import open_regular
from llmb.resources.sample import CounterReading, Line, Sample, SamplerStart


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one sampler wrote, in order of time."""

    start: SamplerStart
    samples: tuple[Sample, ...]
    readings: tuple[CounterReading, ...] = ()
    """At its start and its end; one if it was killed."""

    @property
    def ended(self) -> bool:
        return len(self.readings) > 1


def read_samples(folder: Path) -> tuple[Sampled, ...]:
    """All samplers of a run's nodes; a restarted run has several of a node. Empty without a folder.

    Lines that were truncated by a crash or a full disk are left out. Raises OSError if a file cannot be read.
    """
    return tuple(sampled for file in sorted(folder.glob("*.jsonl")) for sampled in _read_file(file))


def _read_file(path: Path) -> Iterator[Sampled]:
    start: SamplerStart | None = None
    samples: list[Sample] = []
    readings: list[CounterReading] = []
    with open_regular(path) as stream:
        lines = stream.read().splitlines()
    for line in lines:
        item = _parsed(line)
        if isinstance(item, SamplerStart):
            if start:
                yield _in_order(start, samples, readings)
            start, samples, readings = item, [], []
        elif isinstance(item, CounterReading):
            readings.append(item)
        elif item:
            samples.append(item)
    if start:
        yield _in_order(start, samples, readings)


def _in_order(start: SamplerStart, samples: list[Sample], readings: list[CounterReading]) -> Sampled:
    """The clock of a node may have been set back."""
    return Sampled(start, tuple(sorted(samples, key=lambda sample: sample.time_s)), tuple(readings))


def _parsed(line: bytes) -> Line | None:
    try:
        found: Line = _adapter().validate_json(line)
    except ValidationError:
        return None
    return found


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Line)
