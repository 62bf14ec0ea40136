# SPDX-License-Identifier: Apache-2.0
"""The account of one rank among fake ones is what that rank takes when it trains, alone or with the others."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmb.runs.choices import Parallelism
from llmb.runs.plan import Plan

WORKER = Path(__file__).parent / "account_worker.py"
LLAMA, MAVERICK, LORA = "pretrain_llama3.1", "finetune_llama4-maverick", "finetune_llama3"
FEW, MANY = 2, 5
"""Micro-batches: all are counted, or the fifth is added. A fifth adds the same in other layouts, too."""
SHALLOW = {"layers": 2}
"""As many as differ: the first and the last, or one without experts and one with them."""


class Case(NamedTuple):
    sizes: dict[str, Any]
    workload: str = LLAMA
    ranks: int = 2
    choices: dict[str, Any] = {}  # noqa: RUF012 (not changed)


FULL, OPTIMIZER = Parallelism(dp_sharding="full"), Parallelism(dp_sharding="optimizer")
CASES = {
    "TP2 + SP": Case({"tp": 2}),
    "PP2 x VP2": Case({"pp": 2, "vp": 2, "gbs": 4}),
    "CP2": Case({"cp": 2}),
    "EP2": Case({"ep": 2}, MAVERICK, choices={"force_load_balancing": True}),
    "FSDP2": Case({"gbs": MANY * 2}, choices={"parallelism": FULL}),
    "ZeRO-1": Case({}, choices={"parallelism": OPTIMIZER}),
    "DDP": Case({}, choices={"parallelism": Parallelism(dp_sharding="none")}),
    "FP8": Case({}, choices={"dtype": "fp8"}),
    "LoRA TP2": Case({"tp": 2}, LORA),
}
FURTHER = ("CP2", "ZeRO-1", "DDP", "LoRA TP2")
"""What the others have, too, or ``test_account_messages.py`` counts for every change."""
MakePlan = Callable[..., Plan]
RunRanks = Callable[..., list[str]]


def written(case: Case, make_plan: MakePlan, folder: Path) -> None:
    data_parallel = 1 if {"tp", "pp", "cp"} & set(case.sizes) else case.ranks
    layers = {} if "pp" in case.sizes else SHALLOW
    sizes = {"gbs": FEW * data_parallel, **layers, **case.sizes}
    plan = make_plan(case.workload, steps=2, scale=case.ranks, overrides=sizes, **case.choices)
    (folder / "plan.json").write_text(plan.model_dump_json())


def in_flight(found: dict[str, Any]) -> float:
    """Bytes that a real rank may hold, and a fake one, whose collectives take no time, does not: as busy as it may be.

    Gloo holds what it has sent until it has arrived, and what a collective takes and gives until its thread goes on,
    later than the rank that waited for it. Meanwhile the next one may be under way: FSDP gathers one module ahead and
    reduces one behind. So each group may hold one of each kind.
    """
    sent, largest = 0, defaultdict[tuple[str, str], float](float)
    for each in found["sequence"]:
        if each["kind"] == "send":
            sent += each["bytes"]
        elif each["kind"] != "recv":
            of_both = each["bytes"] * (1 + 1 / len(each["members"]))
            largest[each["group"], each["kind"]] = max(largest[each["group"], each["kind"]], of_both)
    return sent + sum(largest.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.measured] * (name in FURTHER)) for name in CASES]
)
def test_an_account_is_what_ranks_take_when_they_train(
    name: str, run_ranks: RunRanks, tiny_plan: MakePlan, tmp_path: Path
) -> None:
    """Peak, FLOPs, and the number and bytes of the collectives in every group, of all micro-batches of a step."""
    case = CASES[name]
    written(case, tiny_plan, tmp_path)
    real = [json.loads(printed) for printed in run_ranks(WORKER, case.ranks, tmp_path, "real")]
    fake = [json.loads(printed) for printed in run_ranks(WORKER, case.ranks, tmp_path, "fake")]
    first = 0 if "pp" in case.sizes else case.ranks - 1  # only stages of a pipeline do not all do the same
    alone = [json.loads(printed) for printed in run_ranks(WORKER, case.ranks, tmp_path, "pretended", first=first)]
    assert disorder([each["sequence"] for each in fake]) == []
    for ours, pretended in zip(fake[first:], alone, strict=True):
        same = ("flops_by_kind", "collectives", "peak_bytes", "bytes_by_owner")
        assert {key: pretended["account"][key] for key in same} == {key: ours["account"][key] for key in same}
    for ours, theirs in zip(fake, real, strict=True):
        account, true = ours["account"], theirs["account"]
        assert account["flops_by_kind"] == true["flops_by_kind"]
        assert sum(account["flops_by_kind"].values()) == account["flops"] == true["flops"] > 0
        # A CPU multiplies FP8 values in another precision, which depends on the processor.
        own = {case.choices.get("dtype", "fp32")} - {"fp8"}
        assert {"attention"} | own <= account["flops_by_kind"].keys()
        assert account["collectives"] == true["collectives"] != []
        assert account["peak_bytes"] <= 1.001 * true["peak_bytes"]
        assert true["peak_bytes"] <= 1.02 * account["peak_bytes"] + in_flight(ours)
        assert sum(account["bytes_by_owner"].values()) == account["peak_bytes"]


@pytest.mark.slow
def test_selective_recomputation_exchanges_no_rows_again(
    run_ranks: RunRanks, tiny_plan: MakePlan, tmp_path: Path
) -> None:
    """Nor does it keep the rows of an exchange that nothing waits for."""
    found = []
    for recompute in ("none", "selective"):
        choices = {"force_load_balancing": True, "recompute": recompute}
        written(Case({"ep": 2}, MAVERICK, choices=choices), tiny_plan, tmp_path)
        account = json.loads(run_ranks(WORKER, 1, tmp_path, "fake")[0])["account"]
        found.append([each for each in account["collectives"] if each["kind"] == "all_to_all"])
    assert found[0] == found[1] != []


@pytest.mark.measured
@pytest.mark.parametrize(("dtype", "sums"), [("fp8", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_compiled_blocks_multiply_and_communicate_as_eager_ones(
    dtype: str, sums: str, run_ranks: RunRanks, tiny_plan: MakePlan, tmp_path: Path
) -> None:
    """Graphs are counted and not run; operators that communicate within, or add to sums, are part of them."""
    found = []
    for compiled in (False, True):
        choices = {"dtype": dtype, "compiled": compiled, "grad_reduce_dtype": sums}
        written(Case({"tp": 2, "gbs": 2}, choices=choices), tiny_plan, tmp_path)
        found.append(json.loads(run_ranks(WORKER, 1, tmp_path, "fake")[0])["account"])
    eager, compiled = found
    assert compiled["flops_by_kind"] == eager["flops_by_kind"] != {}
    assert compiled["collectives"] == eager["collectives"] != []
    assert 0.8 * eager["peak_bytes"] < compiled["peak_bytes"] < eager["peak_bytes"]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case({"gbs": 2}, ranks=1), id="alone"),
        pytest.param(
            Case({"pp": 2, "vp": 2, "gbs": 8, "layers": 8}, ranks=4, choices={"parallelism": FULL}),
            id="PP2 x VP2, FSDP2",
            marks=pytest.mark.measured,
        ),
    ],
)
def test_the_allocator_is_asked_for_what_an_account_says(
    case: Case, run_ranks: RunRanks, tiny_plan: MakePlan, tmp_path: Path
) -> None:
    """torch's own record of allocations has those within operators too, such as the workspace of attention."""
    written(case, tiny_plan, tmp_path)
    real, fake = (
        [json.loads(printed) for printed in run_ranks(WORKER, case.ranks, tmp_path, way)]
        for way in ("allocated", "fake")
    )
    for found, ours in zip(real, fake, strict=True):
        account = ours["account"]["peak_bytes"]
        assert account <= found["allocated"] <= 1.03 * account + in_flight(ours)


@pytest.mark.slow
def test_ranks_issue_collectives_in_an_order_that_cannot_deadlock(
    run_ranks: RunRanks, tiny_plan: MakePlan, tmp_path: Path
) -> None:
    written(Case({"tp": 2, "pp": 2, "vp": 2, "gbs": 2}, ranks=4), tiny_plan, tmp_path)
    fake = [json.loads(printed) for printed in run_ranks(WORKER, 4, tmp_path, "fake")]
    assert disorder([each["sequence"] for each in fake]) == []
    swapped = [list(each["sequence"]) for each in fake]
    swapped[3] = swapped[3][::-1]
    assert disorder(swapped) != []


def disorder(sequences: list[list[dict[str, Any]]]) -> list[str]:
    """Groups whose members do not all issue the same collectives in the same order, or where sends meet no receives."""
    together: dict[tuple[int, ...], dict[int, list[tuple[str, int]]]] = defaultdict(dict)
    pairs: dict[tuple[str, tuple[int, ...], int, int], dict[str, list[int]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for rank, sequence in enumerate(sequences):
        for each in sequence:
            members = tuple(each["members"])
            if each["peer"] is None:
                together[members].setdefault(rank, []).append((each["kind"], each["bytes"]))
                continue
            other = members[each["peer"]]
            way = (rank, other) if each["kind"] == "send" else (other, rank)
            pairs[(each["group"], members, *way)][each["kind"]].append(each["bytes"])
    apart = [
        f"group {members}" for members, of in together.items() if len({tuple(of.get(rank, ())) for rank in members}) > 1
    ]
    return apart + [f"pair {pair}" for pair, of in pairs.items() if of["send"] != of["recv"]]
