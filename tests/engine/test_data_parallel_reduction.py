# SPDX-License-Identifier: Apache-2.0
"""Gradients computed in bf16 are added up in the dtype that the plan says, and no more often than it takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from llmb.runs.choices import Parallelism
from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "reduction_worker.py"
FULL, OPTIMIZER, WHOLE = (Parallelism(dp_sharding=sharding) for sharding in ("full", "optimizer", "none"))
SYNCED = Parallelism(dp_sharding="full", gradient_sync="micro-batch")
CASES = {
    "full": (FULL, {}, [24, 3, 0], 0),
    "optimizer": (OPTIMIZER, {}, [0, 3, 0], 1),
    "none": (WHOLE, {}, [0, 0, 3], 1),
    "synced": (SYNCED, {}, [24, 12, 0], 0),
    "pipeline": (FULL, {"pp": 2}, [0, 0, 0], 0),
}
"""Parallelism, layout, how often ranks gather, reduce and scatter, and reduce the two blocks and the rest of the
model in four micro-batches (eight where there is a pipeline), and how many of the engine's own reductions begin while
another block's gradients are computed."""


@pytest.mark.slow
def test_gradients_are_added_up_as_the_plan_says(
    tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    dtypes = ("fp32", "bf16")
    plans = {
        (case, dtype): tiny_plan(
            scale=2,
            dtype="bf16",
            grad_reduce_dtype=dtype,
            parallelism=parallelism,
            overrides={"layers": 2, "gbs": 8, "seq_len": 32, **sizes},
        )
        for case, (parallelism, sizes, *_) in CASES.items()
        for dtype in dtypes
    }
    (tmp_path / "plans.json").write_text(json.dumps([plan.model_dump(mode="json") for plan in plans.values()]))
    found = dict(zip(plans, json.loads(run_ranks(WORKER, 2, tmp_path)[0]), strict=True))
    for case in CASES:
        exact, rounded = (found[case, dtype] for dtype in dtypes)
        assert exact["error"] < 1e-6, case
        assert not exact["all_bf16"], case
        # Adding up eight numbers of 8 bits: each sum is off by up to 2^-9. Shards are added up in fp32.
        assert 1e-3 < rounded["error"] < 1e-2, case
        assert rounded["all_bf16"] == (case != "synced"), case
        assert exact["traffic"] == rounded["traffic"] == CASES[case][2], case
        assert exact["early"] == rounded["early"] == CASES[case][3], case
