# SPDX-License-Identifier: Apache-2.0
"""Reads the samples of a run: values over time, what of them belongs to spans of time, and what its samplers found of
their nodes."""

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from llmb.input_files import MOST_TEXT_BYTES, MOST_VALUES_IN_LINE, check_values, read_regular
from llmb.missing import Missing
from llmb.resources.node_settings import FILE_ENDING, NodeSettings, NodesSettings, together
from llmb.resources.sample import CounterReading, Line, Sample, SamplerStart
from llmb.shown_text import printable

MOST_BYTES = 1 << 28
"""The largest file of samples that is read: those of a GPU node for weeks are smaller."""
LAST_COUNTERS_S, RECENT_S = 1.0, 5.0
"""How long the last counters of a node are waited for, if its file is still written."""


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


def samples_of_ended(folder: Path) -> tuple[Sampled, ...] | Missing:
    """Samples of a run that ended. The last ones of ranks that died are written after them."""
    until = time.monotonic() + LAST_COUNTERS_S
    try:
        found = read_samples(folder)
        while time.monotonic() < until and any(not one.ended for one in found) and _is_written(folder):
            time.sleep(0.05)
            found = read_samples(folder)
        return found
    except OSError as error:  # it does not spoil a result
        return Missing(f"the samples cannot be read: {error.strerror}")


def settings_of_nodes(folder: Path, nodes: Iterable[str]) -> NodesSettings | None:
    """What samplers found on ``nodes``, and on others that they ran on. None if they left nothing."""
    files = {node: folder / f"{node}{FILE_ENDING}" for node in nodes}
    files |= {printable(file.name.removesuffix(FILE_ENDING)): file for file in sorted(folder.glob(f"*{FILE_ENDING}"))}
    read = {node: _settings_in(file) for node, file in files.items()}
    settings = {node: item for node, item in read.items() if not isinstance(item, Missing)}
    unread = {node: item.reason for node, item in read.items() if isinstance(item, Missing)}
    return together(settings).model_copy(update={"unread": unread}) if settings else None


def discard_settings(folder: Path) -> None:
    """Removes what the record has, or is of an earlier start on other nodes."""
    for file in folder.glob(f"*{FILE_ENDING}"):
        with suppress(OSError):
            file.unlink()


def _settings_in(file: Path) -> NodeSettings | Missing:
    try:
        return NodeSettings.model_validate_json(read_regular(file, MOST_TEXT_BYTES))
    except FileNotFoundError:
        return Missing("no sampler has read them")
    except OSError as error:
        return Missing(f"they cannot be read: {error.strerror}")
    except ValidationError:
        return Missing("what the sampler wrote is damaged")


def _is_written(folder: Path) -> bool:
    return any(time.time() - file.stat().st_mtime < RECENT_S for file in folder.glob("*.jsonl"))


def _read_file(path: Path) -> Iterator[Sampled]:
    start: SamplerStart | None = None
    samples: list[Sample] = []
    readings: list[CounterReading] = []
    for line in read_regular(path, MOST_BYTES).splitlines():
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
        check_values(line, MOST_VALUES_IN_LINE)
        found: Line = _adapter().validate_json(line)
    except ValueError:  # pydantic's is one
        return None
    return found


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Line)


class TimeSpan(NamedTuple):
    """From ``begin_s`` to ``end_s``, in Unix time."""

    begin_s: float
    end_s: float


Point = tuple[float, float]
"""Time and value."""


def merged(spans: Iterable[TimeSpan]) -> tuple[TimeSpan, ...]:
    """In order, those that touch or overlap as one."""
    found: list[TimeSpan] = []
    for span in sorted(spans):
        if found and span.begin_s <= found[-1].end_s:
            found[-1] = TimeSpan(found[-1].begin_s, max(found[-1].end_s, span.end_s))
        else:
            found.append(span)
    return tuple(found)


def length(spans: Iterable[TimeSpan]) -> float:
    """Seconds of all spans."""
    return sum(span.end_s - span.begin_s for span in spans)


def places_inside(times: Sequence[float], spans: Sequence[TimeSpan]) -> list[int]:
    """Which of ``times``, which are in order, lie in the spans."""
    return [
        place for span in spans for place in range(bisect_left(times, span.begin_s), bisect_right(times, span.end_s))
    ]


def rise(points: Sequence[Point], spans: Sequence[TimeSpan]) -> float | None:
    """How much a counter rose in the spans, linear between its points; None if the points do not cover them."""
    if not points or not spans or spans[0].begin_s < points[0][0] or spans[-1].end_s > points[-1][0]:
        return None
    times = [at for at, _ in points]
    return sum(_value(points, times, span.end_s) - _value(points, times, span.begin_s) for span in spans)


def integral(points: Sequence[Point]) -> list[Point]:
    """The counter whose slope is linear between ``points``."""
    total, found = 0.0, []
    for number, (at, value) in enumerate(points):
        if number:
            before, earlier = points[number - 1]
            total += (at - before) * (value + earlier) / 2
        found.append((at, total))
    return found


def _value(points: Sequence[Point], times: Sequence[float], time: float) -> float:
    after = bisect_left(times, time)
    if times[after] == time:
        return points[after][1]
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + (high - low) * (time - begin) / (end - begin)
