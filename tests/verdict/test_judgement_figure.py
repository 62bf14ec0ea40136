# SPDX-License-Identifier: Apache-2.0
"""One run against one figure."""

from collections.abc import Sequence
from functools import partial

import pytest
from recorded_runs import times_around
from verdict_samples import run_with_times

from llmb.catalogue.records import Window
from llmb.runs.result import Condition, Reference, Verdict
from llmb.verdict.judgement import Tolerance, default_tolerance, headline, judge_against_figure

FIGURE = Reference(kind="published", step_time_s=10.0, source="a document line 54")
EXPECTED = FIGURE.model_copy(update={"kind": "expectation"})
TOLERANCE = Tolerance(5.0, "--tolerance")
around = partial(times_around, spread_s=0.01, steps=10)


def judged(
    times: Sequence[float], *conditions: Condition, flaw: str | None = None, reference: Reference = FIGURE
) -> Verdict:
    return judge_against_figure([run_with_times(times, flaw)], reference, conditions, TOLERANCE)


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (10.0, "pass"),
        (10.48, "pass"),
        (10.52, "regressed"),
        (9.0, "improved"),
        (9.52, "pass"),
        (10.495, "inconclusive"),
    ],
)
def test_the_interval_decides(mean: float, verdict: str) -> None:
    found = judged(around(mean))
    assert found.verdict == verdict
    assert found.delta_pct == pytest.approx(10 * mean - 100)
    assert found.ci95_pct and found.ci95_pct[0] < found.delta_pct < found.ci95_pct[1]
    assert (found.tolerance_pct, found.tolerance_source) == (5.0, "--tolerance")


def test_a_run_ten_times_as_fast_has_another_unit() -> None:
    assert judged(around(1.1)).verdict == "improved"
    found = judged(around(0.9), reference=EXPECTED)
    assert (found.verdict, found.soft) == ("not comparable", False)
    assert found.sentence.endswith(
        "more than 10 times as fast: a unit or the work differs (91.0 % faster than expected (90.9 to 91.1 %))"
    )


STEP = FIGURE.model_copy(update={"window": Window(first=49, last=49, rule="last")})


def test_a_single_step_decides_nothing() -> None:
    """Beside a figure of other steps, or of steps that are not known."""
    other = Condition(key="window", own="last", reference="35-44", effect="weakens")
    for found in (judged([10.0]), judged([10.0], other, reference=STEP), judged([10.0], reference=EXPECTED)):
        assert (found.verdict, found.ci95_pct, found.reason) == ("inconclusive", None, "a single value has no interval")


@pytest.mark.parametrize(("time_s", "verdict"), [(10.2, "pass"), (10.4, "inconclusive"), (10.6, "regressed")])
def test_a_single_step_decides_beside_a_figure_of_the_same_step(time_s: float, verdict: str) -> None:
    """With the spread that is allowed for on both sides, 2.8 % together."""
    found = judged([time_s], reference=STEP)
    assert (found.verdict, found.soft) == (verdict, True)
    assert found.ci95_pct == pytest.approx((10 * time_s - 100 - 2.772, 10 * time_s - 100 + 2.772), abs=0.001)
    assert found.reason and "one time each" in found.reason


@pytest.mark.parametrize(("spread", "verdict"), [(0.2, "pass"), (0.4, "inconclusive")])
def test_a_noisy_run_as_fast_as_its_figure_passes_only_if_a_slow_down_would_have_shown(
    spread: float, verdict: str
) -> None:
    found = judged(around(9.995, spread_s=spread), reference=EXPECTED)
    assert found.ci95_pct and found.smallest_visible_change_pct
    half = (found.ci95_pct[1] - found.ci95_pct[0]) / 2
    assert found.smallest_visible_change_pct == pytest.approx(half * 1.4294, rel=1e-4)
    assert (found.verdict, found.ci95_pct[1] < 5) == (verdict, True)
    assert (found.reason or "").startswith("a change below") == (verdict == "inconclusive")


def test_a_run_that_is_no_measurement_is_invalid() -> None:
    found = judged(around(10.0), flaw="the window includes the first step, which includes warm-up")
    assert found.verdict == "invalid"
    assert found.sentence == "invalid: the window includes the first step, which includes warm-up"
    failed = judge_against_figure([run_with_times([], "killed by signal 9")], FIGURE, (), TOLERANCE)
    assert (failed.verdict, failed.delta_pct, failed.reason) == ("invalid", None, "killed by signal 9")


def test_a_published_figure_is_soft_and_an_expectation_only_with_what_weakens() -> None:
    weakens = Condition(key="program", own="a", reference="b", effect="weakens")
    noted = Condition(key="errata", own=None, reference="b", effect="noted")
    assert judged(around(10.0)).soft
    assert not judged(around(10.0), noted, reference=EXPECTED).soft
    assert judged(around(10.0), weakens, reference=EXPECTED).soft


def test_other_work_makes_a_verdict_soft_and_is_named() -> None:
    busy = run_with_times(around(12.0), faults={"other_work": ("other processes used 3.1 of 8 cores",)})
    found = judge_against_figure([busy], EXPECTED, (), TOLERANCE)
    assert (found.verdict, found.soft) == ("regressed", True)
    assert found.conditions[0].own == "other processes used 3.1 of 8 cores"
    assert "; during yours: other processes used 3.1 of 8 cores" in found.sentence
    several = [run_with_times(around(12.0), faults={"unlike_nodes": (name,)}) for name in "abc"]
    found = judge_against_figure(several, EXPECTED, (), TOLERANCE)
    assert found.conditions[0].own == "a | b | c"
    assert "nodes unlike each other in yours: a (and 2 more like it)" in found.sentence


def test_a_condition_that_prevents_a_verdict_leaves_the_difference() -> None:
    other = Condition(key="hardware.device", own="NVIDIA H100 PCIe", reference="NVIDIA H100 SXM", effect="prevents")
    found = judged(around(12.0), other)
    assert found.verdict == "not comparable"
    assert found.delta_pct == pytest.approx(20)
    assert found.reason == "GPU variant differs"
    assert found.conditions == (other,)
    assert judged(around(12.0), other, flaw="loss is nan").verdict == "invalid"


def test_defaults_of_the_tolerance_say_where_they_come_from() -> None:
    published = default_tolerance("published")
    assert 10 * (1 + published.pct / 100) == pytest.approx(10 / 0.95, rel=1e-5)
    assert "95 %" in published.source
    assert default_tolerance("baseline", same_nodes=True).pct < default_tolerance("baseline").pct
    assert default_tolerance("expectation").source


FAULT = "NCCL used TCP sockets on node1"
SHOWN_FAULT = f"{FAULT} (see 'llmb judge 1 --explain')"


def test_a_fault_of_the_network_makes_a_verdict_soft_and_comes_first() -> None:
    measured = run_with_times(around(12.0), faults={"network_fault": (FAULT,), "other_work": ("other work",)})
    found = judge_against_figure([measured], EXPECTED, (), TOLERANCE)
    assert (found.verdict, found.soft) == ("regressed", True)
    assert [condition.key for condition in found.conditions] == ["network_fault", "other_work"]
    assert found.sentence.startswith(f"{SHOWN_FAULT}; 20.0 % slower than expected")
    assert headline(found).startswith(f"REGRESSED (soft): {SHOWN_FAULT}; ")


def test_a_fault_of_the_network_is_also_in_sentences_without_a_decision() -> None:
    wide = run_with_times([9.0, 12.0, 10.0, 11.0], faults={"network_fault": (FAULT,)})
    undecided = judge_against_figure([wide], EXPECTED, (), TOLERANCE)
    assert undecided.sentence.startswith(f"inconclusive: {SHOWN_FAULT}; ")
    other = Condition(key="hardware.device", own="a", reference="b", effect="prevents")
    prevented = judge_against_figure([wide], EXPECTED, (other,), TOLERANCE)
    assert prevented.sentence.startswith(f"not comparable with the expected figure: {SHOWN_FAULT}; GPU ")
