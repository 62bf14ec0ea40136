# SPDX-License-Identifier: Apache-2.0
"""Summarizes the samples of single GPUs. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import TypeVar

from llmb.resources.records import EnergySource, GpuUse
from llmb.resources.sample import GpuSamples, Sample, SampledGpu
from llmb.resources.series import Point, TimeSpan, integral, rise

GIB = 2**30
Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


def summarize_gpu(
    node: str,
    gpu: SampledGpu,
    place: int,
    samples: Sequence[Sample],
    inside: Sequence[Sample],
    spans: Sequence[TimeSpan],
) -> GpuUse:
    """``place`` is its place in the samples, ``inside`` are those of ``samples`` that were taken in the spans."""

    def values(column: Callable[[GpuSamples], Sequence[Value | None]]) -> list[Value]:
        return known(_at(column(sample.gpus), place) for sample in inside if sample.gpus)

    powers, clocks = values(lambda gpus: gpus.power_w), values(lambda gpus: gpus.sm_clock_mhz)
    reasons = values(lambda gpus: gpus.throttle_reasons)
    energy_j, source = _energy(samples, place, spans)
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
    """Of several GPUs, the most frequent reason first; None if no GPU told."""
    totals: Counter[str] = Counter()
    for one in shares:
        totals.update(one)
    return {name: total / len(shares) for name, total in totals.most_common()} if shares else None


def points(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> list[Point]:
    """The values that are known, over time."""
    return [(sample.time_s, found) for sample in samples if (found := value(sample)) is not None]


def known(values: Iterable[Value | None]) -> list[Value]:
    return [value for value in values if value is not None]


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def most_gib(values: Sequence[int]) -> float | None:
    return max(values) / GIB if values else None


def _energy(
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
