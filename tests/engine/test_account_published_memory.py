# SPDX-License-Identifier: Apache-2.0
"""The largest published layouts fit their GPUs, as the engine's own step is counted."""

import pytest
from benchmarks.published_layouts import published_layouts

from llmb.catalogue.catalogue import Catalogue
from llmb.launch.programs.engine.program import count_ranks
from llmb.prediction.memory import estimate
from llmb.runs.rank_account import fullest_ranks

LAYOUTS = {each.name: each for each in published_layouts(Catalogue())}
FLAGSHIPS = [
    *(f"pretrain_llama3.1 {each}" for each in ("8b {} h100 8", "70b {} h100 64", "405b {} h100 512")),
    *(f"pretrain_nemotron4 {each}" for each in ("15b {} h100 16", "340b {} h100 256")),
    "finetune_llama3 70b {} h100 8",
    "finetune_llama4-maverick 400b {} b200/h100 256",
]


@pytest.mark.measured
@pytest.mark.parametrize("name", [each.format(dtype) for each in FLAGSHIPS for dtype in ("bf16", "fp8")])
def test_a_published_layout_fits(name: str) -> None:
    layout = LAYOUTS[name]
    ranks = fullest_ranks(layout.layout)
    use = count_ranks(layout.plan, ranks, lambda _: None).model_copy(update={"capacity_gib": layout.capacity_gib})
    assert use.fits, f"{use.needed_gib:.1f} of {layout.capacity_gib} GiB"
    assert estimate(layout.plan, ranks).needed_gib == pytest.approx(use.needed_gib, rel=0.05)
