# SPDX-License-Identifier: Apache-2.0
"""How two groups of runs differ in what was sampled of their GPUs. Pure."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from llmb.analysis.records import AnalyzedRun
from llmb.runs.identity import Difference

SAMPLED = ("sm_clock_mhz_mean", "power_w_mean")
LEAST_CHANGE_PCT = 2.0
"""Repeats on the same GPUs differ, too: a smaller change is not listed."""


def resource_differences(before: Sequence[AnalyzedRun], after: Sequence[AnalyzedRun]) -> Iterator[Difference]:
    """Mean clock and power of a GPU, if both sides were sampled and differ."""
    for name in SAMPLED:
        old, new = _mean(before, name), _mean(after, name)
        if old and new and abs(new / old - 1) >= LEAST_CHANGE_PCT / 100:
            yield Difference(key=f"resources.{name}", before=round(old), after=round(new))


def _mean(runs: Sequence[AnalyzedRun], name: str) -> float | None:
    """Of the runs that were sampled."""
    results = [run.record.result for run in runs if run.record and run.record.result]
    values = [getattr(result.resources, name) for result in results if result.resources]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
