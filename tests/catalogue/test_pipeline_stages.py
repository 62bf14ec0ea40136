# SPDX-License-Identifier: Apache-2.0
"""Every layer stands in exactly one pipeline stage."""

import pytest

from llmb.catalogue.layout_check import check_layout
from llmb.catalogue.load import Catalogue, layout_of
from llmb.catalogue.pipeline_stages import rank_stages, stage_layers
from llmb.catalogue.records import Layout


def test_every_published_layout_puts_each_layer_in_one_stage() -> None:
    for workload in Catalogue().workloads.values():
        for table in workload.layouts:
            for row in table.rows:
                layout = layout_of(table, row)
                stages = stage_layers(layout)
                assert len(stages) == layout.pp * layout.vp
                assert [layer for stage in stages for layer in stage] == list(range(layout.layers))


def test_embedding_and_loss_take_the_place_of_a_layer() -> None:
    layout = Layout(
        gpus=512, tp=8, pp=8, vp=8, cp=2, mbs=1, gbs=256, seq_len=8192, layers=126, counts_embedding_and_loss=True
    )
    sizes = [len(stage) for stage in stage_layers(layout)]
    assert sizes == [1, *[2] * 62, 1]


def test_a_proxy_may_leave_the_ends_without_layers() -> None:
    layout = Layout(
        gpus=64, tp=8, pp=4, vp=8, cp=2, mbs=1, gbs=64, seq_len=8192, layers=30, counts_embedding_and_loss=True
    )
    assert [len(stage) for stage in stage_layers(layout)] == [0, *[1] * 30, 0]


def test_a_v_runs_to_the_last_rank_and_back() -> None:
    layout = Layout(gpus=4, pp=4, vp=2, mbs=1, gbs=4, seq_len=128, layers=8)
    assert [rank_stages(layout, rank, v_shaped=True) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [rank_stages(layout, rank, v_shaped=False) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


EIGHT_STAGES = Layout(gpus=4, pp=4, vp=2, mbs=1, gbs=4, seq_len=128, layers=30)


@pytest.mark.parametrize(
    ("ends", "sizes"),
    [
        ({"first_stage_layers": 2}, [2, *[4] * 7]),
        ({"last_stage_layers": 2}, [*[4] * 7, 2]),
        ({"first_stage_layers": 0, "last_stage_layers": 6}, [0, *[4] * 6, 6]),
    ],
)
def test_the_ends_can_have_sizes_of_their_own(ends: dict[str, int], sizes: list[int]) -> None:
    layout = EIGHT_STAGES.model_copy(update={**ends, "counts_embedding_and_loss": True})
    assert [len(stage) for stage in stage_layers(layout)] == sizes
    assert check_layout(Catalogue().models["llama3.1", "8b"], layout) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_stage_layers": 3}, "the other 27 layers are not divisible by the 7 stages"),
        ({"first_stage_layers": 20, "last_stage_layers": 20}, "cannot hold 40 of 30 layers"),
        ({"first_stage_layers": -2}, "cannot hold -2 of 30 layers"),
        (
            {"first_stage_layers": 10, "last_stage_layers": 10, "pp": 2, "vp": 1, "gpus": 2},
            "the other 10 layers are not divisible by the 0",
        ),
        ({"first_stage_layers": 10, "pp": 1, "vp": 1, "gpus": 1}, "needs PP above 1"),
    ],
)
def test_sizes_that_do_not_add_up_are_refused(changes: dict[str, int], said: str) -> None:
    problems = check_layout(Catalogue().models["llama3.1", "8b"], EIGHT_STAGES.model_copy(update=changes))
    assert any(said in problem for problem in problems), problems
