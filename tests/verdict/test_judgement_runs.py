# SPDX-License-Identifier: Apache-2.0
"""Runs against a baseline of runs."""

from dataclasses import replace

import pytest
from recorded_runs import times_around
from verdict_samples import run_with_times

from llmb.runs.analyzed_run import AnalyzedRun
from llmb.runs.conditions import RunIdentity
from llmb.runs.result import Reference, Verdict
from llmb.verdict.group_difference import SINGLE_RUNS
from llmb.verdict.judgement import Tolerance, default_tolerance, judge_against_runs

BASELINE = Reference(kind="baseline", step_time_s=10.0, source="before", runs=3)


def run(mean_s: float, node: str = "a", flaw: str | None = None, **conditions: str) -> AnalyzedRun:
    return run_with_times(times_around(mean_s, 0.01, 10), flaw, conditions=conditions, nodes=(node,))


def judged(own: list[AnalyzedRun], baseline: list[AnalyzedRun], tolerance: Tolerance | None = None) -> Verdict:
    return judge_against_runs(own, baseline, BASELINE, tolerance)


def group(mean_s: float, **options: str) -> list[AnalyzedRun]:
    return [run(mean_s + shift, **options) for shift in (-0.01, 0.0, 0.01)]


@pytest.mark.parametrize(("mean_s", "verdict"), [(10.0, "pass"), (10.5, "regressed"), (9.5, "improved")])
def test_groups_are_compared(mean_s: float, verdict: str) -> None:
    found = judged(group(mean_s), group(10.0))
    assert found.verdict == verdict
    assert found.delta_pct == pytest.approx(10 * mean_s - 100)
    assert not found.soft
    assert found.sentence


def test_the_default_tolerance_depends_on_the_nodes() -> None:
    same = judged(group(10.0), group(10.0))
    other = judged(group(10.0), group(10.0, node="b"))
    assert same.tolerance_pct == default_tolerance("baseline", same_nodes=True).pct
    assert other.tolerance_pct == default_tolerance("baseline").pct
    assert {one.key: one.effect for one in other.conditions} == {"nodes": "weakens"}
    assert other.soft
    assert judged(group(10.0), group(10.0), Tolerance(7.0, "--tolerance")).tolerance_pct == 7.0


def test_runs_on_an_unknown_number_of_gpus_allow_only_a_soft_verdict() -> None:
    sides = [[replace(one, identity=RunIdentity(configuration={})) for one in group(mean_s)] for mean_s in (10.0, 5.0)]
    found = judged(*sides)
    assert (found.verdict, found.soft, found.reason) == ("regressed", True, "neither side reports its number of GPUs")


def test_single_runs_allow_only_a_soft_verdict() -> None:
    found = judged([run(10.4)], [run(10.0)])
    assert (found.verdict, found.soft) == ("regressed", True)
    assert found.sentence.endswith(f"; {SINGLE_RUNS}")
    noise = judged([run(10.15)], [run(10.0)])
    assert (noise.verdict, noise.soft) == ("inconclusive", True)


def test_other_work_beside_any_run_of_either_side_makes_a_verdict_soft() -> None:
    """Also the same on both sides: it does not take the same from each run. What several runs had is one clause."""
    busy = [
        replace(run(10.0), faults={"other_work": (f"other processes used {cores} of 2 cores",)}) for cores in (1.8, 1.5)
    ]
    both = "other processes used 1.5 to 1.8 of 2 cores during 2 of 5 runs"
    once = "other processes used 1.8 of 2 cores during 1 of 4 runs"
    for own, other, values in (
        ([*group(10.0), *busy], group(10.0), (both, None)),
        (group(10.0), [*group(10.0), busy[0]], (None, once)),
        ([*group(10.0), busy[0]], [*group(10.0), *busy], (once, both)),
        ([busy[0]], group(10.0), ("other processes used 1.8 of 2 cores", None)),
    ):
        found = judged(own, other)
        assert found.soft
        assert [(one.own, one.reference) for one in found.conditions if one.key == "other_work"] == [values]


def test_an_undecided_difference_says_how_many_more_runs_would_tell() -> None:
    before, after = ([run(mean_s) for mean_s in group] for group in ((9.9, 10.1), (10.3, 10.5)))
    found = judged(after, before)
    assert (found.verdict, found.soft, found.reason) == ("inconclusive", False, "the interval contains the tolerance")
    assert found.more_runs and f"; {found.more_runs} more runs would settle it; only a change above" in found.sentence
    noisy = judged([run(10.0), run(10.25)], [run(9.9), run(10.1)])
    assert (noisy.verdict, noisy.more_runs) == ("inconclusive", None)
    assert "; more than 40 more runs would be needed" in noisy.sentence


def test_no_difference_is_no_pass_if_a_change_of_the_tolerance_would_not_have_shown() -> None:
    before, after = ([run(10 + shift) for shift in (-0.035, 0.0, 0.035)] for _ in range(2))
    found = judged(after, before, Tolerance(1.0, "--tolerance"))
    assert found.ci95_pct and -1 < found.ci95_pct[0] < 0 < found.ci95_pct[1] < 1, "the interval alone would pass"
    why = "a change below 1.2 % would not have shown; the tolerance is 1 %"
    assert (found.verdict, found.reason, found.more_runs) == ("inconclusive", why, 6)
    assert found.sentence.endswith("; 6 more runs would settle it; only a change above 1.2 % would have shown")
    passed = judged(after, before, Tolerance(1.5, "--tolerance"))
    assert (passed.verdict, passed.sentence.rpartition("; ")[2]) == ("pass", "a change of 1.2 % would have shown")


def test_runs_that_are_no_measurement_are_not_counted() -> None:
    found = judged([*group(10.5), run(99.0, flaw="loss is nan")], group(10.0))
    assert found.delta_pct == pytest.approx(5)
    failed = run(99.0, node="b", flaw="it failed", driver="1")
    (condition,) = judged([*group(10.5, driver="2"), failed], group(10.0, driver="1")).conditions
    assert (condition.key, condition.own, condition.reference) == ("driver", "2", "1"), "nor is what they differ in"
    none = judged([run(10.0, flaw="loss is nan"), run(10.0, flaw="loss is nan")], group(10.0))
    assert (none.verdict, none.reason) == ("invalid", "loss is nan")


def test_another_recipe_is_not_comparable_and_another_driver_is_noted() -> None:
    found = judged(group(10.5, dtype="fp8"), group(10.0, dtype="bf16"))
    assert (found.verdict, found.reason) == ("not comparable", "dtype differs")
    drivers = judged([run(10.5, driver="2"), run(10.5, driver="1")] * 2, group(10.0, driver="1"))
    (condition,) = drivers.conditions
    assert (condition.own, condition.reference, condition.effect) == ("1, 2", "1", "noted")
    assert drivers.verdict == "regressed"


def test_a_fault_of_the_network_of_either_side_comes_first() -> None:
    slow = [replace(one, faults={"network_fault": ("NCCL used TCP sockets",)}) for one in group(12.0)]
    fault = "NCCL used TCP sockets (see 'llmb judge 1 --explain')"
    own = judged(slow, group(10.0))
    assert own.soft
    assert own.sentence.startswith(f"{fault}; 20.0 % slower than the baseline")
    theirs = judged(group(10.0), slow)
    assert theirs.sentence.startswith(f"the baseline: {fault}; 16.7 % faster than the baseline")
    assert judged(slow, slow).soft
    other = judged(group(10.0, fabric="TCP sockets"), group(10.0, fabric="InfiniBand"))
    assert "network between nodes differs" in other.sentence
