# SPDX-License-Identifier: Apache-2.0
"""Descriptive statistics of a small sample."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of a sample. Spread and interval are None for a single value."""

    count: int
    mean: float
    median: float
    std: float | None
    """Sample standard deviation (n - 1)."""
    cv: float | None
    """Coefficient of variation, std / mean."""
    ci95: tuple[float, float] | None
    """95 % confidence interval of the mean by Student's t."""
    min: float
    max: float


def describe(values: Sequence[float]) -> Statistics:
    """Statistics of finite values; raises ValueError for an empty sample or a value that is not finite."""
    count = len(values)
    if not count:
        raise ValueError("statistics of an empty sample")
    mean = math.fsum(values) / count
    if not math.isfinite(mean):
        raise ValueError("statistics of values that are not finite")
    ordered = sorted(values)
    middle = count // 2
    median = ordered[middle] if count % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1)) if count > 1 else None
    return Statistics(
        count=count,
        mean=mean,
        median=median,
        std=std,
        cv=std / mean if std is not None and mean else None,
        ci95=_ci95(mean, std, count) if std is not None else None,
        min=ordered[0],
        max=ordered[-1],
    )


def _ci95(mean: float, std: float, count: int) -> tuple[float, float]:
    from scipy.special import stdtrit  # takes longer to load than most commands take to run

    half_width = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return mean - half_width, mean + half_width
