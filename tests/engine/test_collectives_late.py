# SPDX-License-Identifier: Apache-2.0
"""However late collectives complete, ranks train alike: nothing is read before it was waited for."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from llmb.runs.choices import DpSharding, GradientSync, Parallelism
from llmb.runs.plan import Plan, Start

LLAMA, NEMOTRON, MAVERICK, QWEN_MOE, LORA = (
    "pretrain_llama3.1",
    "pretrain_nemotron4",
    "finetune_llama4-maverick",
    "pretrain_qwen3 tiny-moe",
    "finetune_llama3",
)
SIZES = {"gbs": 4, "seq_len": 64, "layers": 2}
STEPS, SAVED = 3, 2
Found = dict[str, Any]


class Case(NamedTuple):
    """Ranks, sizes of the layout, and what data-parallel ranks shard; ``choices`` are those of a run."""

    ranks: int
    sizes: dict[str, int | bool]
    sharding: DpSharding | None = "optimizer"
    dtype: str = "bf16"
    workload: str = LLAMA
    shard_size: int | None = None
    choices: tuple[tuple[str, object], ...] = ()
    sync: GradientSync = "step"

    def plan(self, tiny_plan: Callable[..., Plan]) -> Plan:
        return tiny_plan(
            self.workload,
            self.ranks,
            **{"steps": STEPS, **dict(self.choices)},
            dtype=self.dtype,
            overrides=SIZES | self.sizes,
            parallelism=Parallelism(dp_sharding=self.sharding, dp_shard_size=self.shard_size, gradient_sync=self.sync),
        )


def experts(ranks: int, sizes: dict[str, int | bool], **fields: Any) -> Case:
    return Case(ranks, sizes, **{"workload": MAVERICK, "choices": (("capacity_factor", 0),), **fields})


KINDS = {
    "DP2": Case(2, {}, "none"),
    "DP2, optimizer": Case(2, {}),
    "DP2, full": Case(2, {}, "full"),
    "TP2": Case(2, {"tp": 2, "sequence_parallel": False}),
    "TP2 + SP": Case(2, {"tp": 2}),
    "PP2": Case(2, {"pp": 2}),
    "PP2 x VP2": Case(2, {"pp": 2, "vp": 2, "layers": 4}),
    "CP2": Case(2, {"cp": 2}),
    "EP2": experts(2, {"ep": 2}),
    "EP2 x ETP2": experts(4, {"ep": 2, "etp": 2}),
}
COMBINED = {
    "CP2, full": Case(2, {"cp": 2}, "full"),
    "DP2, full, recomputed": Case(2, {}, "full", choices=(("recompute", "full"),)),
    "DP2, optimizer, selective": Case(2, {}, choices=(("recompute", "selective"),)),
    "DP2 x TP2, optimizer": Case(4, {"tp": 2}),
    "DP2 x TP2, full": Case(4, {"tp": 2}, "full"),
    "DP2 x CP2, optimizer": Case(4, {"cp": 2}),
    "DP2 x PP2 x VP2, optimizer": Case(4, {"pp": 2, "vp": 2, "layers": 4}),
    "DP2 x PP2 x VP2, full": Case(4, {"pp": 2, "vp": 2, "layers": 4}, "full"),
    "TP2 x PP2 x VP2": Case(4, {"tp": 2, "pp": 2, "vp": 2, "layers": 4}),
    "TP2 x CP2": Case(4, {"tp": 2, "cp": 2}),
    "DP4 by 2, optimizer": Case(4, {}, shard_size=2),
    "DP4 by 2, full": Case(4, {}, "full", shard_size=2),
    "DP2, synced": Case(2, {}, "full", sync="micro-batch"),
    "DP2 x CP2, synced": Case(4, {"cp": 2}, "full", sync="micro-batch"),
    "DP2 x PP2 x VP2, synced": Case(4, {"pp": 2, "vp": 2, "layers": 4}, "full", sync="micro-batch"),
    "DP4 by 2, synced": Case(4, {"gbs": 8}, "full", shard_size=2, sync="micro-batch"),
    "DP2 x EP2, synced": experts(4, {"ep": 2}, sharding="full", sync="micro-batch"),
    "DP2 x EP2, optimizer": experts(4, {"ep": 2}),
    "DP2 x EP2, full": experts(4, {"ep": 2}, sharding="full"),
    "TP2 x EP2 x ETP2": experts(4, {"tp": 2, "ep": 2, "etp": 2}),
    "PP2 x EP2": experts(4, {"pp": 2, "ep": 2, "layers": 4}),
    "DP2 x TP2 x PP2 x VP2, optimizer": Case(8, {"tp": 2, "pp": 2, "vp": 2, "layers": 4}),
    "TP2 x PP2 x CP2": Case(8, {"tp": 2, "pp": 2, "cp": 2}),
    "Qwen3, EP2": experts(2, {"ep": 2}, workload=QWEN_MOE),
    "Qwen3, TP2 x EP4": experts(4, {"tp": 2, "ep": 4}, workload=QWEN_MOE),
    "Qwen3, PP2 x EP2 x VP2": experts(4, {"pp": 2, "ep": 2, "vp": 2, "layers": 4}, workload=QWEN_MOE),
    "Qwen3, CP2 x EP2": experts(4, {"cp": 2, "ep": 2}, workload=QWEN_MOE),
    "Nemotron4, TP2 + SP": Case(2, {"tp": 2}, workload=NEMOTRON),
    "LoRA, TP2 + SP": Case(2, {"tp": 2}, workload=LORA),
}
"""What published layouts combine, other ways to share, and other models. synced: gradients, by each micro-batch."""
QUICK = ("TP2 + SP", "PP2 x VP2", "EP2")


def in_fp8(cases: dict[str, Case]) -> dict[str, Case]:
    return {f"{name}, FP8": case._replace(dtype="fp8") for name, case in cases.items()}


TABLE = {"kinds": KINDS, "combined": COMBINED, "kinds in FP8": in_fp8(KINDS), "combined in FP8": in_fp8(COMBINED)}


@pytest.fixture(scope="module")
def differences(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[Found]]
) -> Callable[..., dict[str, list[str]]]:
    """What of cases is not, to the last digit, as it is with collectives that complete when they can."""

    def compare(cases: dict[str, Case], backend: str = "aot_eager") -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for ranks in sorted({case.ranks for case in cases.values()}):
            plans = {name: case.plan(tiny_plan) for name, case in cases.items() if case.ranks == ranks}
            early, late = (train_plans([*plans.values()], backend, late=late) for late in (False, True))
            found |= {name: different(*each) for name, *each in zip(plans, early, late, strict=True)}
        return {name: kinds for name, kinds in found.items() if kinds}

    return compare


def different(early: Found, late: Found) -> list[str]:
    return [kind for kind in early if not equal(early[kind], late[kind])]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return one == other


def chosen(names: Iterable[str]) -> dict[str, Case]:
    return {name: KINDS[name] for name in names}


def test_nothing_is_read_before_it_was_waited_for(differences: Callable[..., dict[str, list[str]]]) -> None:
    assert differences({**chosen(QUICK), **in_fp8(chosen(["DP2, optimizer"]))}) == {}


@pytest.mark.slow
def test_nothing_is_read_early_in_any_kind_of_layout(differences: Callable[..., dict[str, list[str]]]) -> None:
    assert differences(chosen(KINDS.keys() - QUICK)) == {}


@pytest.mark.measured
@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_read_early_in_combinations_and_in_fp8(
    name: str, differences: Callable[..., dict[str, list[str]]]
) -> None:
    assert differences(TABLE[name]) == {}


@pytest.mark.slow
def test_checkpoints_hold_what_was_waited_for(
    tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[Found]], tmp_path: Path
) -> None:
    """Saved and resumed with late collectives, a run goes on as one does whose collectives complete when they can."""

    def saving(folder: str) -> Plan:
        choices = {"save_checkpoint": True, "checkpoint_interval": SAVED, "checkpoint_dir": str(tmp_path / folder)}
        return Case(2, {}, dtype="fp8", choices=tuple(choices.items())).plan(tiny_plan)

    def resuming(folder: str) -> Plan:
        (path,) = (tmp_path / folder).glob(f"*/step={SAVED}-*")
        start = Start(path=str(path), step=SAVED, consumed_samples=SAVED * SIZES["gbs"])
        choices = (("steps", STEPS - SAVED),)
        return Case(2, {}, dtype="fp8", choices=choices).plan(tiny_plan).model_copy(update={"start": start})

    (whole,), (late,) = train_plans([saving("early")]), train_plans([saving("late")], late=True)
    assert different(whole, late) == []
    (from_late,) = train_plans([resuming("late")], late=True)
    assert from_late["losses"] == whole["losses"][SAVED:]
