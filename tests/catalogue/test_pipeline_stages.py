# SPDX-License-Identifier: Apache-2.0
"""Every layer stands in exactly one pipeline stage."""

from llmb.catalogue.layout_check import rank_stages, stage_layers
from llmb.catalogue.load import Catalogue, layout_of
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


def test_a_rank_has_every_pp_th_stage() -> None:
    layout = Layout(gpus=4, pp=4, vp=2, mbs=1, gbs=4, seq_len=128, layers=8)
    assert [rank_stages(layout, rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
