# SPDX-License-Identifier: Apache-2.0
"""Rows of an acceptance, from documents of the form that commands print."""

from typing import Any

from llmb.nodes.acceptance.part_rows import (
    checks_row,
    devices_row,
    measured_row,
    more_runs_needed,
    pairs_row,
    runs_row,
    unfit_of_checks,
    verdict_rows,
)
from llmb.nodes.acceptance.parts import PartResult


def result(document: dict[str, Any] | None, code: int = 0, error: str | None = None) -> PartResult:
    return PartResult(command=("x",), exit_code=code, seconds=1, error=error, document=document)


def node(name: str, **checks: str) -> dict[str, Any]:
    status = "fail" if "fail" in checks.values() else "pass"
    return {"node": name, "status": status, "checks": [{"name": key, "status": one} for key, one in checks.items()]}


def test_checks_of_one_node_and_of_several() -> None:
    assert checks_row(result(node("n1", a="pass", b="warn"))).value == "1 check passed; warned: b"
    several = result({"nodes": [node("n1", a="pass"), node("n2", a="fail"), node("n3", nodes_answer="warn")]}, 4)
    assert (checks_row(several).status, checks_row(several).value) == ("fail", "n2 a failed, of 3 nodes")
    assert unfit_of_checks(several) == ["n2", "n3"]


def test_a_slow_device_and_one_that_failed() -> None:
    device = {"node": "n1", "local_rank": 3, "below_median_pct": 12.3, "slow": True}
    found = {"devices": [device], "failed": [{"node": "n2", "part": "local rank 0", "reason": "lost"}]}
    row = devices_row(result(found, 4), {**found, "missing_nodes": ["n4"]})
    assert row.value == "n1 rank 3 is 12 % below the median; n2 local rank 0: lost; n4 reported nothing"
    assert devices_row(result(None, 4, "no torch"), None).status == "fail"


def test_the_largest_size_is_shown_beside_the_peak_or_the_measurement_before() -> None:
    def rows(*speeds: float, peak: float | None = None, wrong: int = 0) -> PartResult:
        return result(
            {
                "measurements": [
                    {"size_bytes": place, "bandwidth_gb_per_s": one, "bus_bandwidth_gb_per_s": None}
                    | {"peak_pct": peak, "wrong": wrong}
                    for place, one in enumerate(speeds)
                ]
            }
        )

    assert measured_row("memory", rows(9, 3), rows(4)).reference == "4 GB/s before"
    assert measured_row("memory", rows(9, 3, peak=81.5), rows(4)).reference == "82 % of the peak"
    assert (measured_row("x", rows(1, 2), None).status, measured_row("x", rows(2, wrong=3), None).status) == (
        "measured",
        "fail",
    )


def test_failed_runs_and_invalid_ones() -> None:
    rows = [{"step_time_s": 1.25}, {"step_time_s": 0.75}]
    assert runs_row("runs", result({"rows": rows}), 3).value == "3 runs each: 1.25, 0.75 s a step"
    assert [runs_row("runs", result({}, code), 3).status for code in (4, 6)] == ["fail", "invalid"]


def verdict(name: str, recipe: str = "pretrain_x 8b bf16 on 8 x h100", **more: Any) -> dict[str, Any]:
    reference = {"step_time_s": 2.0, "kind": "published"}
    usual = {"delta_pct": 3.0, "step_time_s": 2.06, "soft": False, "more_runs": None, "reason": "", **more}
    return {"recipe": recipe, "verdict": name, "reference": reference, **usual}


def test_the_worst_verdict_of_a_recipe_is_shown() -> None:
    found = result(
        {"judged": [verdict("pass"), verdict("regressed"), verdict("pass", "pretrain_x 8b fp8 on 8 x h100")]}
    )
    assert [(row.name, row.status) for row in verdict_rows("verdict", found)] == [
        ("verdict 8b bf16", "regressed"),
        ("verdict 8b fp8", "pass"),
    ]
    assert verdict_rows("verdict", found)[0].value == "2.06 s, 3.0 % slower"
    assert more_runs_needed(result({"judged": [verdict("inconclusive", more_runs=4), verdict("pass")]})) == 4


def test_slower_than_predicted_is_no_regression() -> None:
    predicted = {"step_time_s": 2.0, "kind": "prediction"}
    (row,) = verdict_rows("verdict", result({"judged": [verdict("regressed", reference=predicted, soft=True)]}))
    assert (row.status, row.reference) == ("inconclusive", "2 s, prediction")
    assert row.value.endswith("3.0 % slower, but no measured step confirms this prediction")


def test_nothing_passes_without_an_answer() -> None:
    for code in (0, 4):
        nothing = result(None, code, "killed")
        assert [row(nothing).status for row in (checks_row, lambda one: devices_row(one, None))] == ["fail", "fail"]
        assert (pairs_row(nothing, None).status, verdict_rows("x", nothing)[0].status) == ("fail", "inconclusive")
    unsure = {"nodes": [{"node": "n1", "fit": None, "evidence": []}, {"node": "n2", "fit": True, "evidence": []}]}
    assert pairs_row(result(None), unsure).status == "inconclusive"


def test_recipes_of_the_same_size_have_rows_of_their_own() -> None:
    other = "finetune_x 8b bf16 on 8 x h100"
    rows = verdict_rows("v", result({"judged": [verdict("regressed"), verdict("pass", other)]}))
    assert [row.name for row in rows] == ["v pretrain_x 8b bf16 on 8 x h100", f"v {other}"]
