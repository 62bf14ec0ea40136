# SPDX-License-Identifier: Apache-2.0
"""Repeats among parsed runs: the same program, recipe, layout, data and software, whatever their names. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from llmb.analysis.parsed_run import ParsedRun
from llmb.metrics.statistics import Statistics, describe
from llmb.runs.identity import Value, value_text

MOST_DIFFERENCES = 3


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Successful runs of one configuration, by the time they began."""

    runs: tuple[ParsedRun, ...]
    run_means_s: Statistics
    """Statistics of the mean step times of the runs."""
    differs: tuple[str, ...] = ()
    """What distinguishes it from groups that look the same otherwise, such as ``software.torch 2.9``."""

    @property
    def first(self) -> ParsedRun:
        return self.runs[0]

    @property
    def spread_pct(self) -> float | None:
        """From the fastest to the slowest run, in percent of the median; None for one run."""
        means = self.run_means_s
        return 100 * (means.max - means.min) / means.median if means.count > 1 and means.median else None


def group_runs(runs: Iterable[ParsedRun]) -> tuple[RunGroup, ...]:
    """By recipe and number of GPUs, each run once. A run of which nothing is known is a group of its own."""
    by_key: dict[str, list[ParsedRun]] = defaultdict(list)
    for run in runs:
        if run.outcome.status == "success" and run.copy_of is None:
            by_key[run.key or run.id].append(run)
    groups = [_group(repeats) for repeats in by_key.values()]
    by_look: dict[tuple[object, ...], list[RunGroup]] = defaultdict(list)
    for group in groups:
        by_look[_look(group.first)].append(group)
    told = [one for alike in by_look.values() for one in _distinguished(alike)]
    return tuple(sorted(told, key=_order))


def _group(runs: Sequence[ParsedRun]) -> RunGroup:
    ordered = sorted(runs, key=lambda run: (run.time_s or 0.0, str(run.file.path)))
    means = [run.outcome.step_time_s.mean for run in ordered if run.outcome.step_time_s]
    return RunGroup(tuple(ordered), describe(means))


def _look(run: ParsedRun) -> tuple[object, ...]:
    return run.recipe_text, run.text("gpu_type"), run.gpus, run.layout_text


def _distinguished(groups: Sequence[RunGroup]) -> list[RunGroup]:
    if len(groups) == 1:
        return list(groups)
    known: list[Mapping[str, Value]] = [{**one.first.configuration, **one.first.software} for one in groups]
    keys = sorted({key for one in known for key in one})
    different = [key for key in keys if len({one.get(key) for one in known}) > 1][:MOST_DIFFERENCES]
    return [
        RunGroup(group.runs, group.run_means_s, tuple(_told(key, one.get(key)) for key in different))
        for group, one in zip(groups, known, strict=True)
    ]


def _told(key: str, value: Value) -> str:
    return f"{key} {'unknown' if value is None else value_text(value)}"


def _order(group: RunGroup) -> tuple[object, ...]:
    run = group.first
    return run.recipe_text, run.text("gpu_type") or "", run.gpus or 0, run.layout_text, group.differs, run.id
