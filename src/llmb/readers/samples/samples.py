# SPDX-License-Identifier: Apache-2.0
"""Reads the samples and node settings of a run, and summarizes the samples taken during its steps."""

import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from llmb.base.input_files import MOST_TEXT_BYTES, MOST_VALUES_IN_LINE, check_values, read_regular
from llmb.base.missing import Missing
from llmb.base.shown_text import printable
from llmb.readers.samples.node_settings import FILE_ENDING, NodeSettings, NodesSettings, together
from llmb.readers.samples.sample_records import (
    CounterReading,
    EnergySource,
    GpuSamples,
    GpuUse,
    HostSample,
    HostUse,
    Line,
    ResourceUse,
    Sample,
    SampledGpu,
    SamplerStart,
)

MOST_BYTES = 1 << 28
"""Maximum size in bytes of a file of samples."""
LAST_COUNTERS_S, RECENT_S = 1.0, 5.0
"""Maximum wait for last counters, and the time after a write for which a file counts as still being written."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The output of one sampler, in order of time."""

    start: SamplerStart
    samples: tuple[Sample, ...]
    readings: tuple[CounterReading, ...] = ()
    """The readings at the sampler's start and end; only the first while it runs, or if it was killed."""

    @property
    def ended(self) -> bool:
        return len(self.readings) > 1


def read_samples(folder: Path) -> tuple[Sampled, ...]:
    """Return the output of a run's samplers, without truncated lines; empty without a folder.

    Raise OSError for unreadable files.
    """
    return tuple(sampled for file in sorted(folder.glob("*.jsonl")) for sampled in _read_file(file))


def samples_of_ended(folder: Path) -> tuple[Sampled, ...] | Missing:
    """Return the samples of an ended run; Missing if unreadable. Wait briefly for samplers that are still writing."""
    until = time.monotonic() + LAST_COUNTERS_S
    try:
        samples = read_samples(folder)
        while time.monotonic() < until and any(not one.ended for one in samples) and _is_written(folder):
            time.sleep(0.05)
            samples = read_samples(folder)
        return samples
    except OSError as error:  # it does not spoil a result
        return Missing(f"the samples cannot be read: {error.strerror}")


def settings_of_nodes(folder: Path, nodes: Iterable[str]) -> NodesSettings | None:
    """Return the settings that samplers recorded, for ``nodes`` and others with a file; None if none can be read."""
    files = {node: folder / f"{node}{FILE_ENDING}" for node in nodes}
    files |= {printable(file.name.removesuffix(FILE_ENDING)): file for file in sorted(folder.glob(f"*{FILE_ENDING}"))}
    read = {node: _settings_in(file) for node, file in files.items()}
    settings = {node: item for node, item in read.items() if not isinstance(item, Missing)}
    unread = {node: item.reason for node, item in read.items() if isinstance(item, Missing)}
    return together(settings).model_copy(update={"unread": unread}) if settings else None


def discard_settings(folder: Path) -> None:
    """Remove the settings files."""
    for file in folder.glob(f"*{FILE_ENDING}"):
        with suppress(OSError):
            file.unlink()


def _settings_in(file: Path) -> NodeSettings | Missing:
    try:
        return NodeSettings.model_validate_json(read_regular(file, MOST_TEXT_BYTES))
    except FileNotFoundError:
        return Missing("no sampler recorded the settings")
    except OSError as error:
        return Missing(f"the settings cannot be read: {error.strerror}")
    except ValidationError:
        return Missing("the sampler's output is damaged")


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
    """Return the samples in order of time: the clock of a node may have been set back."""
    return Sampled(start, tuple(sorted(samples, key=lambda sample: sample.time_s)), tuple(readings))


def _parsed(line: bytes) -> Line | None:
    try:
        check_values(line, MOST_VALUES_IN_LINE)
        record: Line = _adapter().validate_json(line)
    except ValueError:  # pydantic's is one
        return None
    return record


@cache
def _adapter() -> TypeAdapter[Any]:
    return TypeAdapter(Line)


class TimeSpan(NamedTuple):
    """A span from ``begin_s`` to ``end_s``, in Unix time."""

    begin_s: float
    end_s: float


Point = tuple[float, float]
"""Time and value."""


def merged(spans: Iterable[TimeSpan]) -> tuple[TimeSpan, ...]:
    """Return the spans sorted, with touching or overlapping spans joined."""
    joined: list[TimeSpan] = []
    for span in sorted(spans):
        if joined and span.begin_s <= joined[-1].end_s:
            joined[-1] = TimeSpan(joined[-1].begin_s, max(joined[-1].end_s, span.end_s))
        else:
            joined.append(span)
    return tuple(joined)


def length(spans: Iterable[TimeSpan]) -> float:
    """Return the total length of the spans in seconds."""
    return sum(span.end_s - span.begin_s for span in spans)


def places_inside(times: Sequence[float], spans: Sequence[TimeSpan]) -> list[int]:
    """Return the indices of the sorted ``times`` that are in the spans."""
    return [
        place for span in spans for place in range(bisect_left(times, span.begin_s), bisect_right(times, span.end_s))
    ]


def rise(points: Sequence[Point], spans: Sequence[TimeSpan]) -> float | None:
    """Return a counter's rise in the spans, interpolated linearly; None if the points do not cover the spans."""
    if not points or not spans or spans[0].begin_s < points[0][0] or spans[-1].end_s > points[-1][0]:
        return None
    times = [at for at, _ in points]
    return sum(_value(points, times, span.end_s) - _value(points, times, span.begin_s) for span in spans)


def integral(points: Sequence[Point]) -> list[Point]:
    """Return the integral of the piecewise linear curve through ``points``, at each point."""
    total, ends = 0.0, []
    for number, (at, value) in enumerate(points):
        if number:
            before, earlier = points[number - 1]
            total += (at - before) * (value + earlier) / 2
        ends.append((at, total))
    return ends


def _value(points: Sequence[Point], times: Sequence[float], time: float) -> float:
    after = bisect_left(times, time)
    if times[after] == time:
        return points[after][1]
    (begin, low), (end, high) = points[after - 1], points[after]
    return low + (high - low) * (time - begin) / (end - begin)


GIB = 2**30
OF_GPUS = (
    *("power_w_mean", "power_w_max", "sm_clock_mhz_mean", "sm_clock_mhz_min"),
    *("temperature_c_max", "memory_used_gib_max", "throttled", "gpus"),
)
OF_ENERGY = ("total_power_w_mean", "energy_j", "energy_j_per_token", "energy_source")
NOT_REPORTED = "the GPUs do not report it"
NOT_COVERED = "the samples do not cover the window"
UNREADABLE = "the kernel does not report it"
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledWork:
    """The steps to summarize: their times and tokens, and the expected nodes and GPUs."""

    spans: tuple[TimeSpan, ...]
    tokens: int
    device: Literal["cpu", "cuda"]
    nodes: tuple[str, ...] = ()
    """The nodes that must have samples for sums to be complete; empty if they are unknown."""
    gpus: Mapping[str, Collection[str]] | None = None
    """The ids of the training GPUs by node; None for all sampled GPUs."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One sampler of a node, with its samples in the spans."""

    sampled: Sampled
    inside: tuple[Sample, ...]

    @property
    def name(self) -> str:
        return self.sampled.start.node


def summarize(sampled: Sequence[Sampled], work: SampledWork) -> ResourceUse | Missing:
    """Summarize the use of resources; Missing if no sample was taken during the steps."""
    spans = merged(work.spans)
    nodes = _nodes(sampled, spans)
    if not nodes:
        return Missing(_no_sample(sampled, spans))
    hosts = tuple(_host(node, spans) for node in nodes)
    gpus = tuple(gpu for node in nodes for gpu in _gpus(node, spans, work.gpus))
    silent = _silent(nodes, gpus, work)
    energy_j, source = (None, None) if silent else _energy(hosts, gpus, work.device)
    values: dict[str, Any] = {
        "samples": min(len(node.inside) for node in nodes),
        "power_w_mean": mean(present(gpu.power_w_mean for gpu in gpus)),
        "power_w_max": max(present(gpu.power_w_max for gpu in gpus), default=None),
        "total_power_w_mean": None if energy_j is None else energy_j / length(spans),
        "energy_j": energy_j,
        "energy_j_per_token": None if energy_j is None else energy_j / work.tokens,
        "energy_source": source,
        "sm_clock_mhz_mean": mean(present(gpu.sm_clock_mhz_mean for gpu in gpus)),
        "sm_clock_mhz_min": min(present(gpu.sm_clock_mhz_min for gpu in gpus), default=None),
        "temperature_c_max": max(present(gpu.temperature_c_max for gpu in gpus), default=None),
        "memory_used_gib_max": max(present(gpu.memory_used_gib_max for gpu in gpus), default=None),
        "throttled": mean_shares([gpu.throttled for gpu in gpus if gpu.throttled is not None]),
        "gpus": gpus or None,
        "hosts": hosts,
    }
    return ResourceUse(**values, reasons=dict(_reasons(values, nodes, silent, work.device)))


def _nodes(sampled: Sequence[Sampled], spans: Sequence[TimeSpan]) -> list[_Node]:
    best: dict[str, _Node] = {}
    for one in sampled:
        places = places_inside([sample.time_s for sample in one.samples], spans)
        node = _Node(one, tuple(one.samples[place] for place in places))
        if node.inside and (node.name not in best or len(node.inside) > len(best[node.name].inside)):
            best[node.name] = node
    return [best[name] for name in sorted(best)]


def _no_sample(sampled: Sequence[Sampled], spans: Sequence[TimeSpan]) -> str:
    if not sampled:
        return "the run folder has no samples"
    interval_s = sampled[-1].start.interval_s
    if all(not one.samples or one.samples[-1].time_s < spans[-1].end_s for one in sampled):
        return "the samples end before the window's steps"
    return f"no sample in the {length(spans):.2g} s of the window's steps; --resource-interval is {interval_s:g} s"


def _host(node: _Node, spans: Sequence[TimeSpan]) -> HostUse:
    hosts = [sample.host for sample in node.inside]

    def risen(value: Callable[[HostSample], float | None]) -> float | None:
        return rise(points(node.sampled.samples, lambda sample: value(sample.host)), spans)

    total_s = risen(lambda host: host.cpu_total_s)

    def share_pct(value: Callable[[HostSample], float | None]) -> float | None:
        part_s = risen(value)
        return 100 * part_s / total_s if part_s is not None and total_s else None

    return HostUse(
        node=node.name,
        samples=len(hosts),
        cpu_pct_mean=share_pct(lambda host: host.cpu_busy_s),
        iowait_pct_mean=share_pct(lambda host: host.cpu_iowait_s),
        steal_pct_mean=share_pct(lambda host: host.cpu_steal_s),
        load_mean=mean(present(host.load for host in hosts)),
        memory_used_gib_max=most_gib(present(host.memory_used_bytes for host in hosts)),
        worker_memory_gib_max=most_gib(present(host.worker_memory_bytes for host in hosts)),
        cpu_energy_j=risen(lambda host: host.cpu_energy_j),
    )


def _gpus(node: _Node, spans: Sequence[TimeSpan], ids: Mapping[str, Collection[str]] | None) -> Iterator[GpuUse]:
    for place, gpu in enumerate(node.sampled.start.gpus):
        if ids is None or gpu.uuid in ids.get(node.name, ()):
            yield summarize_gpu(node.name, gpu, place, node.sampled.samples, node.inside, spans)


def _silent(nodes: Sequence[_Node], gpus: Sequence[GpuUse], work: SampledWork) -> list[str]:
    names, counts = {node.name for node in nodes}, {node.name: 0 for node in nodes}
    for gpu in gpus:
        counts[gpu.node] += 1
    trained = work.gpus if work.device == "cuda" and work.gpus else {}
    without = [node for node in trained if node in names and counts[node] < len(trained[node])]
    return [*(node for node in work.nodes if node not in names), *without]


def _energy(
    hosts: Sequence[HostUse], gpus: Sequence[GpuUse], device: Literal["cpu", "cuda"]
) -> tuple[float | None, EnergySource | None]:
    measured = [host.cpu_energy_j for host in hosts] if device == "cpu" else [gpu.energy_j for gpu in gpus]
    energies = present(measured)
    if not measured or len(energies) < len(measured):
        return None, None
    if device == "cpu":
        return sum(energies), "cpu_package"
    return sum(energies), "gpu_counter" if all(gpu.energy_source == "gpu_counter" for gpu in gpus) else "gpu_power"


def _reasons(
    values: Mapping[str, Any], nodes: Sequence[_Node], silent: Sequence[str], device: Literal["cpu", "cuda"]
) -> Iterator[tuple[str, str]]:
    missing = [node.sampled.start.missing for node in nodes]
    unread = next((each["gpus"] for each in missing if "gpus" in each), None)
    no_gpus = unread or NOT_REPORTED
    no_cpu_energy = next((each["cpu_energy"] for each in missing if "cpu_energy" in each), NOT_COVERED)
    lacking = f"not all GPUs and nodes were sampled: {', '.join(silent)}" if silent else None
    if device == "cuda" and unread and not values["gpus"]:
        lacking = unread  # it says more, and what to do
    no_energy = no_cpu_energy if device == "cpu" else NOT_COVERED if values["gpus"] else no_gpus
    for name in OF_GPUS:
        if values[name] is None:
            yield name, NOT_REPORTED if values["gpus"] else no_gpus
    for name in OF_ENERGY:
        if values[name] is None:
            yield name, lacking or no_energy
    for gpu in values["gpus"] or ():
        untold = dict.fromkeys(("energy_j", "energy_source"), NOT_REPORTED if gpu.power_w_mean is None else NOT_COVERED)
        yield from ((f"gpus.{name}", untold.get(name, NOT_REPORTED)) for name, value in gpu if value is None)
    for host in values["hosts"]:
        for name, value in host:
            if value is None:
                yield f"hosts.{name}", no_cpu_energy if name == "cpu_energy_j" else _no_host(nodes, name)


def _no_host(nodes: Sequence[_Node], name: str) -> str:
    field = {"cpu_pct_mean": "cpu_busy_s", "iowait_pct_mean": "cpu_iowait_s", "steal_pct_mean": "cpu_steal_s"}.get(name)
    counted = field and any(getattr(sample.host, field) is not None for node in nodes for sample in node.inside)
    return NOT_COVERED if counted else UNREADABLE


def summarize_gpu(
    node: str,
    gpu: SampledGpu,
    place: int,
    samples: Sequence[Sample],
    inside: Sequence[Sample],
    spans: Sequence[TimeSpan],
) -> GpuUse:
    """Summarize one GPU. ``place`` is its index in the samples; ``inside`` are the samples in the spans."""

    def values(column: Callable[[GpuSamples], Sequence[Value | None]]) -> list[Value]:
        return present(_at(column(sample.gpus), place) for sample in inside if sample.gpus)

    powers, clocks = values(lambda gpus: gpus.power_w), values(lambda gpus: gpus.sm_clock_mhz)
    reasons = values(lambda gpus: gpus.throttle_reasons)
    energy_j, source = _energy_of_gpu(samples, place, spans)
    return GpuUse(
        node=node,
        index=gpu.index,
        uuid=gpu.uuid,
        power_w_mean=mean(powers),
        power_w_max=max(powers, default=None),
        energy_j=energy_j,
        energy_source=source,
        sm_clock_mhz_mean=mean(clocks),
        sm_clock_mhz_min=min(clocks, default=None),
        temperature_c_max=max(values(lambda gpus: gpus.temperature_c), default=None),
        memory_used_gib_max=most_gib(values(lambda gpus: gpus.memory_used_bytes)),
        throttled=_shares(reasons) if reasons else None,
    )


def mean_shares(shares: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Return the mean over GPUs of the shares by reason, the most frequent reason first; None without GPUs."""
    totals: Counter[str] = Counter()
    for one in shares:
        totals.update(one)
    return {name: total / len(shares) for name, total in totals.most_common()} if shares else None


def points(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> list[Point]:
    """Return the samples' values that are not None, each with the time of its sample."""
    return [(sample.time_s, number) for sample in samples if (number := value(sample)) is not None]


def present(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def most_gib(values: Sequence[int]) -> float | None:
    return max(values) / GIB if values else None


def _energy_of_gpu(
    samples: Sequence[Sample], place: int, spans: Sequence[TimeSpan]
) -> tuple[float | None, EnergySource | None]:
    counted = points(samples, lambda sample: _at(sample.gpus.energy_j, place) if sample.gpus else None)
    if (energy_j := rise(counted, spans)) is not None:
        return energy_j, "gpu_counter"
    powers = points(samples, lambda sample: _at(sample.gpus.power_w, place) if sample.gpus else None)
    energy_j = rise(integral(powers), spans)
    return energy_j, None if energy_j is None else "gpu_power"


def _shares(reasons: Sequence[tuple[str, ...]]) -> dict[str, float]:
    counts = Counter(name for each in reasons for name in each)
    return {name: count / len(reasons) for name, count in counts.most_common()}


def _at(column: Sequence[Value | None], place: int) -> Value | None:
    return column[place] if place < len(column) else None
