# SPDX-License-Identifier: Apache-2.0
"""Ranks that hold parameters whole and exchange what they update train as FSDP does, and either resumes the other."""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from llmb.engine.checkpoint.state import PartPlace, boxes
from llmb.runs.choices import DpSharding, Parallelism
from llmb.runs.plan import Plan, Start

LLAMA, MAVERICK = "pretrain_llama3.1", "finetune_llama4-maverick"
STEPS, SAVED = 3, 2
WAYS: tuple[DpSharding, ...] = ("full", "optimizer", "none")
SIZES = {"gbs": 4, "mbs": 1, "seq_len": 32, "layers": 2}
Found = dict[str, Any]
Trains = Callable[..., list[Found]]


@pytest.fixture
def train(tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[Found]]) -> Trains:
    """What plans on two ranks found, each given by how it shares, where it starts and other options."""

    def run(*cases: tuple[DpSharding, Start | None, dict[str, Any]]) -> list[Found]:
        return train_plans([plan(*case) for case in cases])

    def plan(sharding: DpSharding, start: Start | None, options: dict[str, Any]) -> Plan:
        made = tiny_plan(scale=2, parallelism=Parallelism(dp_sharding=sharding), overrides=SIZES, **options)
        return made.model_copy(update={"start": start})

    return run


def assert_same(found: Found, expected: Found) -> None:
    """Losses and gradients bit by bit: a sum of two has one order. Norms are sums of as many squares as a rank has."""
    assert found["losses"] == expected["losses"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-14)
    for kind in ("gradients", "last_gradients"):
        assert found[kind].keys() == expected[kind].keys()
        assert [name for name, each in found[kind].items() if not torch.equal(each, expected[kind][name])] == []


@pytest.mark.slow
def test_ranks_train_alike_however_they_share_parameters_and_resume_each_other(train: Trains, tmp_path: Path) -> None:
    def saving(way: str) -> dict[str, Any]:
        folder = str(tmp_path / f"checkpoints-{way}")
        return {"steps": STEPS, "save_checkpoint": True, "checkpoint_interval": SAVED, "checkpoint_dir": folder}

    def saved(way: str) -> Start:
        (path,) = (tmp_path / f"checkpoints-{way}").glob(f"*/step={SAVED}-*")
        return Start(path=str(path), step=SAVED, consumed_samples=SAVED * SIZES["gbs"])

    experts = {"workload": MAVERICK, "steps": 2}
    full, *others = train(
        *((way, None, {"workload": LLAMA, **saving(way)}) for way in WAYS), *((way, None, experts) for way in WAYS)
    )
    for found in others[:2]:
        assert_same(found, full)
    for found in others[3:]:
        assert_same(found, others[2])
    assert list((tmp_path / "checkpoints-optimizer").glob("*/*/weights/*_1_*")) != []
    rest = {name: each[SAVED:] if isinstance(each, list) else each for name, each in full.items()}
    rest["gradients"] = full["last_gradients"]
    for found in train(
        *(
            (way, saved(other), {"workload": LLAMA, "steps": STEPS - SAVED})
            for way in WAYS
            for other in WAYS
            if way != other and "optimizer" in (way, other)
        )
    ):
        assert_same(found, rest)


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 3, 2, 3)])
def test_consecutive_elements_are_a_few_boxes_in_their_order(shape: tuple[int, ...]) -> None:
    full = torch.arange(prod(shape)).view(shape)
    for start in range(full.numel()):
        for stop in range(start + 1, full.numel() + 1):
            found = list(boxes(shape, start, stop))
            assert len(found) <= 2 * len(shape) - 1
            parts = [full[tuple(slice(first, first + size) for first, size in zip(*box, strict=True))] for box in found]
            assert torch.equal(torch.cat([part.flatten() for part in parts]), torch.arange(start, stop))


def test_boxes_of_a_shard_are_where_the_shard_is() -> None:
    """Rows 2 and 3 of a matrix of 4 x 3, all but the first and the last element."""
    place = PartPlace(1, 5, shape=(2, 3), offset=(2, 0), full=(4, 3))
    found = [(tuple(chunk.offsets), each.tolist()) for chunk, each in place.boxes(torch.arange(4))]
    assert found == [((2, 1), [[0, 1]]), ((3, 0), [[2, 3]])]
