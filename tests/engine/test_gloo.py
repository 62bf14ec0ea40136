# SPDX-License-Identifier: Apache-2.0
"""Every process group of a training on CPUs has one gloo thread: two of them race."""

import json
from collections.abc import Callable
from pathlib import Path

from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "gloo_worker.py"


def test_every_group_has_one_thread(
    tmp_path: Path, tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]]
) -> None:
    """Those of the world, of both meshes and what is made out of them, of FP8 and of checkpoints."""
    layout = {"tp": 2, "ep": 2, "etp": 1}
    plan = tiny_plan("finetune_llama4-maverick", dtype="fp8", overrides=layout, save_checkpoint=True)
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    for printed in run_ranks(WORKER, 2, tmp_path):
        found = json.loads(printed)
        threads = found["groups"]
        assert len(threads) >= 8
        assert set(threads.values()) == {1}, threads
        assert found["devices"] == 1
