# SPDX-License-Identifier: Apache-2.0
"""A step on paper, of accounts whose times can be computed by hand."""

from dataclasses import fields, replace
from typing import Any

import pytest

from llmb.catalogue.load import Catalogue
from llmb.catalogue.records import Layout
from llmb.predict.step import RATES, SOURCES, Rates, step_on_paper
from llmb.runs.rank_account import OWNERS, CollectiveCount, RankAccount

H100 = Catalogue().gpus["h100"]
ROUND = Rates(
    bf16_share=0.5, attention_share=0.25, memory_share=0.5, nvlink_share=0.5, network_share=0.5,
    start_s=1e-5, nvlink_hop_s=1e-6, network_hop_s=1e-4, update_bytes=30,
)  # fmt: skip


def sizes(**changes: int) -> Layout:
    given = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": 1, "gpus": 8, "mbs": 1, "gbs": 64, "seq_len": 4096}
    return Layout.model_validate({**given, "layers": 8, **changes})


def account(*collectives: CollectiveCount, rank: int = 0, bf16: int = 10**15, **changes: Any) -> RankAccount:
    given = {
        "rank": rank,
        "pp_stage": 0,
        "peak_bytes": 0,
        "bytes_by_owner": dict.fromkeys(OWNERS, 0),
        "flops": bf16,
        "flops_by_kind": {"bf16": bf16},
        "moved_bytes": 0,
        "collectives": collectives,
    }
    return RankAccount.model_validate({**given, **changes})


def message(kind: str, group: str, size: int, count: int = 1, **beside: int) -> CollectiveCount:
    return CollectiveCount(kind=kind, group=group, count=count, bytes=size, **beside)


def test_work_takes_its_amount_over_the_rate() -> None:
    """989 TFLOP/s and 3.35 TB/s, half of which is attained; a parameter updated has 8 bytes of moments."""
    owned = dict.fromkeys(OWNERS, 0) | {"optimizer": 8 * 10**9}
    flops = {"bf16": 989 * 10**12, "attention": 989 * 10**12}
    one = account(flops_by_kind=flops, moved_bytes=335 * 10**10, bytes_by_owner=owned)
    step = step_on_paper([one], sizes(gpus=1), sizes(gpus=1), H100, ROUND)
    expected = {"products bf16": 2.0, "attention": 4.0, "memory": 2.0, "optimizer": 30e9 / 1.675e12}
    assert step.terms == pytest.approx(expected)
    assert step.seconds == pytest.approx(sum(expected.values()))
    assert [name for name, _ in step.largest(2)] == ["attention", "products bf16"]


@pytest.mark.parametrize(
    ("of", "layout", "seconds"),
    [
        # Within a node: 8 GPUs, 225 of 900 GB/s.
        (message("all_gather", "tp", 225 * 10**9, 2), sizes(tp=8), 7 / 8 + 2 * (1e-5 + 7e-6)),
        (message("all_reduce", "tp", 225 * 10**9), sizes(tp=8), 2 * 7 / 8 + 1e-5 + 7e-6),
        # One member in each of 8 nodes: one adapter, 25 of 50 GB/s. All 8 of each node: as many adapters.
        (message("reduce_scatter", "dp", 25 * 10**9), sizes(tp=8, gpus=64), 7 / 8 + 1e-5 + 7e-4),
        (message("reduce_scatter", "dp", 200 * 10**9), sizes(gpus=64), 63 / 64 + 1e-5 + 56e-6 + 7e-4),
        # What stays within the node takes no network.
        (message("all_to_all", "dp", 25 * 10**9), sizes(gpus=16), 8 / 16 + 1e-5 + 14e-6 + 1e-4),
        (message("all_gather", "cp", 10**9), sizes(), 0),
    ],
)
def test_messages_take_a_latency_and_their_bytes_over_the_slowest_link(
    of: CollectiveCount, layout: Layout, seconds: float
) -> None:
    step = step_on_paper([account(of)], layout, layout, H100, ROUND)
    assert step.seconds - step.terms["products bf16"] == pytest.approx(seconds)


def test_products_hide_messages_that_they_run_beside() -> None:
    half = message("all_gather", "tp", 450 * 10**9, beside_bytes=225 * 10**9, beside_flops=10**14)
    step = step_on_paper([account(half)], sizes(tp=8), sizes(tp=8), H100, ROUND)
    whole = 2 * 7 / 8 + 1.7e-5
    assert step.terms["tp all-gather"] == pytest.approx(whole - 1e14 / 494.5e12)
    long = half.model_copy(update={"beside_flops": 10**16})
    hidden = step_on_paper([account(long)], sizes(tp=8), sizes(tp=8), H100, ROUND)
    assert hidden.terms["tp all-gather"] == pytest.approx(whole / 2)


def test_a_pipeline_waits_and_hides_messages_between_stages_if_a_rank_has_several() -> None:
    received = message("recv", "pp forward 1", 25 * 10**9)
    ranks = [account(received), account(received, rank=4, bf16=3 * 10**15)]
    layout = sizes(pp=2, gpus=64, gbs=128)
    plain = step_on_paper(ranks, layout, layout, H100, ROUND)
    interleaved = step_on_paper(ranks, layout, sizes(pp=2, vp=4, gpus=64, gbs=128), H100, ROUND)
    assert plain.rank == interleaved.rank == 4
    passed = 1 + 1e-5 + 1e-4
    mean = 2e15 / 494.5e12
    assert plain.terms["pp recv"] == pytest.approx(passed)
    assert plain.terms["pipeline bubble"] == pytest.approx((mean + passed) / 4)
    assert interleaved.terms["pipeline bubble"] == pytest.approx(mean / 16)
    assert "pp recv" not in interleaved.terms


def test_more_work_takes_longer() -> None:
    layout = sizes(tp=8, gpus=64)
    base = account(message("all_gather", "tp", 10**9), moved_bytes=10**12)
    more = [
        account(message("all_gather", "tp", 10**9), moved_bytes=10**12, bf16=2 * 10**15),
        account(message("all_gather", "tp", 10**9), moved_bytes=2 * 10**12),
        account(message("all_gather", "tp", 2 * 10**9), moved_bytes=10**12),
        account(message("all_gather", "tp", 10**9, 1000), moved_bytes=10**12),
    ]
    seconds = step_on_paper([base], layout, layout, H100).seconds
    assert all(step_on_paper([each], layout, layout, H100).seconds > seconds for each in more)
    assert step_on_paper([base], layout, layout, H100, replace(RATES, overlaps=False)).seconds >= seconds


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="no ranks are known of the group ring"):
        step_on_paper([account(message("all_gather", "ring", 1))], sizes(), sizes(), H100)


def test_every_rate_has_a_source() -> None:
    assert set(SOURCES) == {each.name for each in fields(Rates)} - {"overlaps"}
