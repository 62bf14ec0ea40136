# SPDX-License-Identifier: Apache-2.0
"""Runs against a baseline of runs. The unit is the run: steps of one run say little about the next. Pure."""

from collections.abc import Sequence

from llmb.metrics.group_difference import (
    MOST_MORE_RUNS,
    NO_INTERVAL,
    KnownSpread,
    RunMean,
    decide,
    group_difference,
    spread_note,
)
from llmb.verdict.conditions import find_conditions, merged, other_work
from llmb.verdict.judgement import UNDECIDED, Finding, Measured, judgement
from llmb.verdict.records import Reference, Verdict
from llmb.verdict.tolerance import Tolerance, default_tolerance

TOO_MANY_RUNS = f"more than {MOST_MORE_RUNS} more runs would be needed"


def judge(
    runs: Sequence[Measured],
    baseline: Sequence[Measured],
    reference: Reference,
    tolerance: Tolerance | None = None,
    known: KnownSpread | None = None,
) -> Verdict:
    """Whether ``runs``, repeats of each other, are as fast as those of ``baseline``, which is not empty.

    ``reference`` describes the baseline. Without ``tolerance``, the default for these nodes holds. ``known``: how much
    earlier repeats differed, for a single run on each side.
    """
    counted = [run for run in runs if run.step_time_s and not run.flaw] or runs
    nodes = {node for run in counted for node in run.nodes}
    same_nodes = bool(nodes) and nodes == {node for run in baseline for node in run.nodes}
    limit = tolerance or default_tolerance("baseline", same_nodes=same_nodes)
    disturbed = other_work((run.disturbed for run in counted), (run.disturbed for run in baseline))
    conditions = (*disturbed, *find_conditions(_side(counted), _side(baseline), reference.kind))
    return judgement(_finding(runs, baseline, limit, known), reference, conditions, limit)


def _side(runs: Sequence[Measured]) -> dict[str, str]:
    nodes = sorted({node for run in runs for node in run.nodes})
    return merged(run.conditions for run in runs) | ({"nodes": ", ".join(nodes)} if nodes else {})


def _finding(
    runs: Sequence[Measured], baseline: Sequence[Measured], tolerance: Tolerance, known: KnownSpread | None
) -> Finding:
    valid = [run for run in runs if run.step_time_s and not run.flaw]
    if not valid:
        flaws = dict.fromkeys(run.flaw or "it has no statistics" for run in runs)
        return Finding(verdict="invalid", reason="; ".join(flaws))
    difference = group_difference(_means(baseline), _means(valid), known)
    decision = decide(difference, tolerance.pct)
    no_interval = NO_INTERVAL if difference.ci95_pct is None else None
    notes = [no_interval or spread_note(difference), difference.node_effect]
    undecided = UNDECIDED if decision.more_runs else TOO_MANY_RUNS
    return Finding(
        verdict=decision.verdict,
        delta_pct=difference.delta_pct,
        ci95_pct=difference.ci95_pct,
        soft=difference.noise_pct is None,
        more_runs=decision.more_runs,
        reason="; ".join(filter(None, notes)) or (undecided if decision.verdict == "inconclusive" else None),
    )


def _means(runs: Sequence[Measured]) -> list[RunMean]:
    return [
        RunMean(mean_s=run.step_time_s.mean, ci95_s=run.step_time_s.ci95, nodes=run.nodes)
        for run in runs
        if run.step_time_s
    ]
