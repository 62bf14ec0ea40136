# SPDX-License-Identifier: Apache-2.0
"""Slow ones of devices that did the same work at the same time. Pure but for its data file."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record

DATA = Path(__file__).with_name("outliers.yaml")
NORMAL = 1.4826
"""Standard deviation of a normal distribution, over its median absolute deviation."""


class OutlierRule(Record):
    """``outliers.yaml``."""

    sigmas: float
    below_pct: float
    least_devices: int


@cache
def outlier_rule() -> OutlierRule:
    return read_file(DATA, OutlierRule)


def below_median_pct(speeds: Sequence[float]) -> list[float]:
    """How far each speed is below the median; negative above it."""
    middle = median(speeds)
    return [100 * (1 - speed / middle) for speed in speeds]


def slow_ones(speeds: Sequence[float], rule: OutlierRule) -> list[int]:
    """Indices of those that are slow. The fast ones are not named: nothing is wrong with them."""
    if len(speeds) < rule.least_devices:
        return []
    below = below_median_pct(speeds)
    spread = NORMAL * median(abs(pct) for pct in below)
    return [number for number, pct in enumerate(below) if pct > rule.below_pct and pct > rule.sigmas * spread]
