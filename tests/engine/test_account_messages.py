# SPDX-License-Identifier: Apache-2.0
"""The messages and products that predictions assume are those of the engine's own step, for each way of parallelism."""

from collections import Counter

import pytest
from benchmarks.predict.review_cases import by_ranks, predicted_work
from tests.prediction.test_memory_random_layouts import SYNCED, random_layout

from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.records import Layout
from llmb.catalogue.resolve import Overrides, Request, resolve
from llmb.launch.programs.engine.program import count_rank, count_ranks
from llmb.runs.choices import Choices, Parallelism
from llmb.runs.plan import EnginePlan, make_plan
from llmb.runs.rank_account import AccountJob, CollectiveCount, countable

LAYOUTS = {
    "TP and CP": ("pretrain_llama3.1", {"tp": 2, "cp": 2}),
    "PP": ("pretrain_llama3.1", {"pp": 2, "vp": 2}),
    "EP": ("pretrain_mixtral", {"ep": 2, "gbs": 16}),
}
SEEDS, QUICK_SEED = (*range(60), *SYNCED[:20]), 22
FEW_BYTES = 10_000
"""Sums of norms and of losses are smaller."""
UNPREDICTED = 0.005
"""Part of bytes and FLOPs that are not predicted: norms, maxima of logits, shapes of what stages exchange; routers."""


def planned(workload: str, sizes: dict[str, int]) -> EnginePlan:
    request = Request(
        workload=workload, size="tiny", dtype="bf16", gpu_type="h100", scale=8, overrides=Overrides(**sizes)
    )
    choices = Choices(compiled=False, parallelism=Parallelism(dp_sharding="optimizer"))
    return countable(make_plan(resolve(Catalogue(), request), choices, device="cuda"))[0]


def counted(collectives: tuple[CollectiveCount, ...], layout: Layout) -> Counter[tuple[str, str]]:
    """Without what is received, which another rank sent, tensor-parallel sums of a few numbers, and what a rank that
    is alone in its group sends to itself."""
    world = next((name for name in ("tp", "cp") if getattr(layout, name) == layout.gpus), "dp")
    groups = {"dp_cp": "dp", "replicate": "dp", "world": world}
    found: Counter[tuple[str, str]] = Counter()
    for each in collectives:
        group = each.group.split()[0]
        of_tp = group in ("tp", "mesh_dp_tp") and layout.sequence_parallel
        is_alone = each.kind == "all_to_all" and getattr(layout, group, 0) == 1
        few = is_alone or (each.kind == "all_reduce" and (of_tp or each.bytes < FEW_BYTES))
        if each.kind != "recv" and not few and each.bytes:
            found[groups.get(group, group), each.kind] += each.bytes
    return by_ranks(found, layout)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("name", ["TP and CP", pytest.param("PP", marks=pytest.mark.measured), "EP"])
def test_messages_and_products_are_those_of_the_engine(name: str) -> None:
    plan = planned(*LAYOUTS[name])
    account = count_rank(AccountJob(plan=plan, rank=0))
    messages, flops = predicted_work(plan)
    assert flops == pytest.approx(account.flops_by_kind["bf16"], rel=UNPREDICTED)
    assert messages == pytest.approx(counted(account.collectives, plan.recipe.layout), rel=UNPREDICTED)
    if LAYOUTS[name][0] == "pretrain_llama3.1":
        assert flops == account.flops_by_kind["bf16"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_fused_operators_send_the_same_messages_and_need_a_workspace() -> None:
    separate = planned(*LAYOUTS["TP and CP"])
    fused = separate.model_copy(update={"communication": "fused"})
    account, expected = (count_rank(AccountJob(plan=plan, rank=0)) for plan in (fused, separate))
    assert account.collectives == expected.collectives
    assert account.flops_by_kind == expected.flops_by_kind
    assert account.peak_bytes == expected.peak_bytes + fused.fused_workspace_bytes > expected.peak_bytes
    messages, flops = predicted_work(fused)
    assert messages == pytest.approx(counted(account.collectives, fused.recipe.layout), rel=UNPREDICTED)
    assert flops == account.flops_by_kind["bf16"]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_programs")
def test_halves_send_the_same_bytes_to_experts() -> None:
    whole = planned(*LAYOUTS["EP"])
    halves = whole.model_copy(update={"communication": "halves"})
    account, expected = (count_rank(AccountJob(plan=plan, rank=0)) for plan in (halves, whole))
    messages, flops = predicted_work(halves)
    assert messages == pytest.approx(counted(account.collectives, halves.recipe.layout), rel=UNPREDICTED)
    assert flops == pytest.approx(account.flops_by_kind["bf16"], rel=UNPREDICTED)
    assert account.flops_by_kind == expected.flops_by_kind
    assert account.peak_bytes == pytest.approx(expected.peak_bytes, rel=UNPREDICTED)


@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed == QUICK_SEED else pytest.mark.measured) for seed in SEEDS],
)
def test_messages_of_random_layouts_are_those_of_the_engine(seed: int) -> None:
    plan, rank, text = random_layout(seed, Catalogue())
    account = count_ranks(plan, [rank], lambda _: None).fullest
    layout = plan.recipe.layout
    expected = counted(account.collectives, layout)
    least = UNPREDICTED * sum(expected.values())
    messages = predicted_work(plan, account.pp_stage)[0]
    for key in messages | expected:
        assert messages[key] == pytest.approx(expected[key], rel=UNPREDICTED, abs=least), (text, key)
