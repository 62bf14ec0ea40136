# SPDX-License-Identifier: Apache-2.0
"""However a model is spread over ranks, each of its parameters has the values and the gradient of one process."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "layout_worker.py"
LIMIT_S = 300
TOLERANCE = 1e-5
"""Relative, of a gradient; rounding alone gives 1e-6."""
MODELS = ("pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick")


class Kind(NamedTuple):
    """What is tried with each layout; ``document_tokens`` packs sequences from documents."""

    recompute: str = "none"
    compiled: bool = False
    document_tokens: int | None = None


PLAIN, RECOMPUTED, COMPILED = Kind(), Kind(recompute="full"), Kind(compiled=True)
PACKED = Kind(document_tokens=50)
PACKED_AND_MORE = (PACKED, PACKED._replace(recompute="full"), PACKED._replace(compiled=True))
LAYOUTS = {
    "fsdp2": (2, {}, (PLAIN, PACKED)),
    "tp2": (2, {"tp": 2}, (PLAIN, RECOMPUTED, COMPILED, PACKED)),
    "cp2": (2, {"cp": 2}, (PLAIN, RECOMPUTED, COMPILED, *PACKED_AND_MORE)),
    "tp2-cp2": (4, {"tp": 2, "cp": 2}, (PLAIN, RECOMPUTED, PACKED)),
    "fsdp2-tp2": (4, {"tp": 2}, (PLAIN,)),
    "pp2": (2, {"pp": 2}, (PLAIN, RECOMPUTED, COMPILED)),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}, (PLAIN, RECOMPUTED)),
    "uneven-pp2": (2, {"pp": 2, "first_stage_layers": 1}, (PLAIN,)),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}, (PLAIN,)),
    "pp2-cp2-vp2": (4, {"pp": 2, "cp": 2, "vp": 2}, (PLAIN, PACKED)),
    "fsdp2-tp2-pp2": (8, {"tp": 2, "pp": 2}, (PLAIN,)),
    "ep2": (2, {"ep": 2}, (PLAIN, RECOMPUTED, COMPILED)),
    "ep4": (4, {"ep": 4}, (PLAIN,)),
    "ep2-etp2": (4, {"ep": 2, "etp": 2}, (PLAIN, RECOMPUTED)),
    "tp2-ep2-etp2": (4, {"tp": 2, "ep": 2, "etp": 2}, (PLAIN,)),
    "cp2-ep2": (4, {"cp": 2, "ep": 2}, (PLAIN,)),
    "tp2-pp2-ep2": (8, {"tp": 2, "pp": 2, "ep": 2}, (PLAIN,)),
}


def run_ranks(folder: Path, ranks: int) -> list[dict[str, float]]:
    """What the first rank found in each case."""
    workers = [
        subprocess.Popen(
            [sys.executable, WORKER, folder, str(rank)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [worker.communicate(timeout=LIMIT_S) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, complaints) in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, complaints
    return json.loads(outputs[0][0])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_and_gradient_is_that_of_one_process(
    layout: str, tiny_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    scale, sizes, kinds = LAYOUTS[layout]
    cases = {
        f"{workload}, {kind}": tiny_plan(
            workload, scale=scale, overrides={**sizes, "gbs": 4}, **kind._asdict()
        ).model_dump(mode="json")
        for workload in (MODELS[2:] if "ep" in sizes else MODELS)
        for kind in kinds
    }
    (tmp_path / "cases.json").write_text(json.dumps(list(cases.values())))
    for case, errors in zip(cases, run_ranks(tmp_path, scale), strict=True):
        assert not [name for name, error in errors.items() if name.startswith("value") and error > 0], case
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] < TOLERANCE, f"{case}: {worst} differs by {errors[worst]:.1e}"
