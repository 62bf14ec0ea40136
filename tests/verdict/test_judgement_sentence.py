# SPDX-License-Identifier: Apache-2.0
"""Verdicts of every kind as lines for people."""

from typing import Any

import pytest

from llmb.runs.result import Condition, Reference, Verdict
from llmb.verdict.judgement import headline, percent, with_sentence

WINDOW = Condition(key="window", own="35-44", reference="last", effect="weakens")
PROGRAM = Condition(key="program", own="engine", reference="NeMo 25.02.01", effect="weakens")
DATA = Condition(key="data", own="synthetic", reference="SQuAD packed 4096", effect="weakens")
DRIVER = Condition(key="software.driver", own="580.1", reference="570.2", effect="noted")
PUBLISHED = Reference(kind="published", step_time_s=12.27, source="a document line 54", window_text="last")
ONE_RUN = Reference(kind="baseline", step_time_s=12.27, source="runs/before", runs=1)
FIVE_RUNS = ONE_RUN.model_copy(update={"runs": 5})
EXPECTED = Reference(kind="expectation", step_time_s=12.27, source="expected.yaml:3")
SOFT = "; a soft verdict: a single published figure has no spread"


def sentence(reference: Reference, verdict: str, *conditions: Condition, **fields: Any) -> str:
    known = {"delta_pct": None, "ci95_pct": None, "tolerance_pct": 5.2632, "tolerance_source": "a default", **fields}
    return with_sentence(
        Verdict(verdict=verdict, soft=False, reference=reference, conditions=conditions, sentence="", **known)
    ).sentence


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            sentence(PUBLISHED, "regressed", WINDOW, delta_pct=7.13, ci95_pct=(6.94, 7.32)),
            "7.1 % slower than published (6.9 to 7.3 %), more than the tolerance of 5.3 %; the published figure is the"
            " last step's, yours the mean of 35-44" + SOFT,
        ),
        (
            sentence(PUBLISHED, "pass", PROGRAM, DATA, DRIVER, delta_pct=0.31, ci95_pct=(-0.2, 0.82)),
            "0.3 % slower than published (-0.2 to 0.8 %), within the tolerance of 5.3 %; program and data differ"
            + SOFT,
        ),
        (
            sentence(PUBLISHED, "pass", delta_pct=-0.31, ci95_pct=(-0.82, 0.2)),
            "0.3 % faster than published (-0.2 to 0.8 %), within the tolerance of 5.3 %" + SOFT,
        ),
        (
            sentence(EXPECTED, "improved", PROGRAM, delta_pct=-8.0, ci95_pct=(-8.26, -7.74), tolerance_pct=3),
            "8.0 % faster than expected (7.7 to 8.3 %), more than the tolerance of 3.0 %; program differs",
        ),
        (
            sentence(FIVE_RUNS, "pass", delta_pct=0.004, ci95_pct=(-0.06, 0.07), tolerance_pct=1),
            "as fast as the baseline of 5 runs (-0.06 to 0.07 %), within the tolerance of 1.0 %",
        ),
        (
            sentence(FIVE_RUNS, "inconclusive", DRIVER, delta_pct=2.9, ci95_pct=(0.2, 5.6), more_runs=4),
            "inconclusive: 2.9 % slower than the baseline of 5 runs (0.2 to 5.6 %), tolerance 5.3 %; 4 more runs would"
            " settle it",
        ),
        (
            sentence(ONE_RUN, "inconclusive", delta_pct=2.9, more_runs=1),
            "inconclusive: 2.9 % slower than the baseline, tolerance 5.3 %; 1 more run would settle it",
        ),
        (
            sentence(EXPECTED, "inconclusive", delta_pct=2.9, reason="a single value has no interval"),
            "inconclusive: 2.9 % slower than expected, tolerance 5.3 %; a single value has no interval",
        ),
        (sentence(PUBLISHED, "invalid", WINDOW, reason="loss is nan from step 3"), "invalid: loss is nan from step 3"),
        (
            sentence(PUBLISHED, "not comparable", WINDOW, delta_pct=7.13, ci95_pct=(6.9, 7.3), reason="GPU differs"),
            "not comparable with the published figure: GPU differs (7.1 % slower than published (6.9 to 7.3 %))",
        ),
        (
            sentence(ONE_RUN, "not comparable", reason="dtype and layout differ"),
            "not comparable with the baseline: dtype and layout differ",
        ),
    ],
)
def test_a_verdict_is_one_line(written: str, expected: str) -> None:
    assert written == expected


def test_a_window_is_named_by_its_statistic() -> None:
    steps = Condition(key="window", own="49", reference="11-44", effect="weakens")
    written = sentence(EXPECTED, "pass", steps, delta_pct=1.0, ci95_pct=(0.9, 1.1))
    assert written.endswith("; the expected figure is the mean of 11-44, yours step 49's")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.2632, "5.3"),
        (0.1, "0.1"),
        (0.094, "0.09"),
        (-0.04, "-0.04"),
        (0.004, "0.0"),
        (-0.001, "0.0"),
        (12.34, "12.3"),
    ],
)
def test_percentages_are_short(value: float, text: str) -> None:
    assert percent(value) == text


def test_a_headline_begins_with_the_verdict() -> None:
    found = [
        Verdict(
            verdict=verdict,
            soft=False,
            delta_pct=delta,
            ci95_pct=None,
            tolerance_pct=1,
            tolerance_source="",
            reference=EXPECTED,
            conditions=(),
            reason="why",
            sentence="",
        )
        for verdict, delta in (("regressed", 7.0), ("invalid", None))
    ]
    lines = [headline(with_sentence(one)) for one in found]
    assert lines == ["REGRESSED: 7.0 % slower than expected, more than the tolerance of 1.0 %; why", "INVALID: why"]


@pytest.mark.parametrize(
    ("verdict", "delta_pct", "ci95_pct", "difference", "tolerance"),
    [
        (
            "regressed",
            5.28,
            (5.1, 5.46),
            "5.28 % slower than published (5.10 to 5.46 %)",
            "more than the tolerance of 5.26",
        ),
        (
            "regressed",
            5.2641,
            (5.1, 5.5),
            "5.264 % slower than published (5.100 to 5.500 %)",
            "more than the tolerance of 5.263",
        ),
        (
            "pass",
            5.2,
            (5.15, 5.257),
            "5.200 % slower than published (5.150 to 5.257 %)",
            "within the tolerance of 5.263",
        ),
        (
            "improved",
            -5.28,
            (-5.4, -5.1),
            "5.28 % faster than published (5.10 to 5.40 %)",
            "more than the tolerance of 5.26",
        ),
        ("pass", 4.9, (4.6, 5.2), "4.9 % slower than published (4.6 to 5.2 %)", "within the tolerance of 5.3"),
        (
            "pass",
            5.26,
            (5.2, 5.2632),
            "5.260 % slower than published (5.200 to 5.263 %)",
            "within the tolerance of 5.263",
        ),
    ],
)
def test_rounding_contradicts_no_verdict(
    verdict: str, delta_pct: float, ci95_pct: tuple[float, float], difference: str, tolerance: str
) -> None:
    written = sentence(PUBLISHED, verdict, delta_pct=delta_pct, ci95_pct=ci95_pct)
    assert written == f"{difference}, {tolerance} %{SOFT}"
