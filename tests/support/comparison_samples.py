# SPDX-License-Identifier: Apache-2.0
"""Samples of the JSON documents of comparisons."""

from typing import Any

from llmb.runs.conditions import Difference
from llmb.verdict.compare_runs import Comparison, LeftOutRun, Row, Unmatched


def sample_comparison() -> dict[str, Any]:
    difference = Difference(key="software.driver", before="570.86", after="575.51")
    row = Row(
        recipe="pretrain_llama3.1 8b bf16 on 8 x h100",
        n_before=3,
        n_after=3,
        before_s=12.3,
        after_s=12.7,
        delta_pct=3.3,
        ci95_pct=(2.5, 4.1),
        smallest_visible_change_pct=1.1,
        noise_pct=0.4,
        earlier_runs=0,
        verdict="regressed",
        soft=False,
        reason=None,
        more_runs=None,
        tolerance_pct=1,
        tolerance_source="",
        measure="step_time",
        speed_up=0.97,
        scaling=None,
        before_runs=("",),
        after_runs=("",),
    )
    alone = Unmatched(side="before", recipe="", runs=("",), differs=(difference,), reason=None)
    return Comparison(
        before="",
        after="",
        vary=(),
        verdict="regressed",
        rows=(row,),
        differences=(difference,),
        unmatched=(alone,),
        left_out=(LeftOutRun(run="", reason="", side="before"),),
    ).model_dump(mode="json")
