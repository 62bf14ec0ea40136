# SPDX-License-Identifier: Apache-2.0
"""Where all experts get equally many rows, ranks know what goes where without asking."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.catalogue.records import MixtureOfExperts
from llmb.engine.model.moe import BalancedRouter, Router
from llmb.engine.parallel.expert_parallel import rank_places

MOE = MixtureOfExperts(router="sigmoid-scaled-inputs", experts=4, top_k=1, ffn_hidden_size=8, interleave=1)
WORKER = Path(__file__).parent / "traffic_worker.py"


@pytest.mark.parametrize("routing", ["balanced", pytest.param("capacity", marks=pytest.mark.slow)])
def test_known_traffic_gives_the_same_results_without_asking(
    routing: str, tmp_path: Path, run_ranks: Callable[..., list[str]]
) -> None:
    found = json.loads(run_ranks(WORKER, 4, tmp_path, routing)[0])
    assert all(found["same"])
    for asked, known in [*pairwise(found["collectives"])][::2]:
        assert known == asked - 2
    # Those of the shared expert while outputs come back, and of its gradients, but that of its input, while theirs do.
    assert found["beside"][:2] == [[0, 0, 0, 3], [4, 0, 0, 0]]
    # The first two while rows are sent.
    assert found["beside"][2:] == [[2, 0, 0, 1], [2, 0, 0, 2]]
    if routing == "balanced":
        # Rows of one half arrive while those of the other are multiplied, and outputs return; then gradients.
        assert found["halves"] == [[0, 2, 0, 0, 2, 0, 0, 0], [0, 4, 0, 0, 4, 0, 0, 0]]


@pytest.mark.parametrize("rank", range(8))
def test_places_are_those_of_the_pipeline_stage(rank: int) -> None:
    """8 ranks, PP2 x EDP1 x EP2 x ETP2: each stage has the places 0 to 3."""
    dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 1, 2, 2), mesh_dim_names=("pp", "edp", "ep", "etp"))
        router = BalancedRouter(Router(8, MOE), rank % 4)
        assert rank_places(mesh["ep", "etp"], router).tolist() == [[0, 1], [2, 3]]
    finally:
        dist.destroy_process_group()
