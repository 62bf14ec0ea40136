# SPDX-License-Identifier: Apache-2.0
"""However a model that computes in FP8 is spread, recomputed, compiled or continued, it trains as on one process.

Exactly, where the same is computed. Where rounding in bf16 differs, a value may be cast to the next FP8 number, which
lies up to an eighth away, so that the bounds are those of FP8 and not of bf16.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmb.engine.precision import scaling
from llmb.runs.choices import Parallelism
from llmb.runs.plan import Plan, Start

LONG, STEPS, FEW, SAVED = 20, 6, 3, 3
SIZES = {"gbs": 4, "seq_len": 64}
SHALLOW = {"layers": 2}
"""Enough for models that are not cut into four stages, and whose first and last layer are in FP8, too."""
LLAMA, NEMOTRON, MAVERICK = "pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"
DROPLESS = {"capacity_factor": 0}
"""Rounding would decide which of two tokens an expert drops that score alike."""
QWEN, MIXTRAL, LORA = "pretrain_qwen3", "pretrain_mixtral", "finetune_llama3"
OPTIMIZER = Parallelism(dp_sharding="optimizer")
LOSS, MEAN_LOSS = 0.04, 0.008
"""Largest differences of the loss of any step and of their mean, also of 20 in which it falls by more than one."""
SCALE = 1.4
"""Largest ratio of a scale of inputs and weights to that of one process, after as many steps."""
INPUT, GRADIENT = 1.125, 1.3
"""Largest ratio of the largest value of inputs in the first step, where tensor-parallel sums are rounded otherwise, and
of gradients. Of inputs it is a step between two numbers in FP8: the value may come from the other one."""
BF16_LOSS = 0.05
ROUTED = 1
"""A seed for Mixtral with which no token whose experts score alike moves the loss of a step, as one does in bf16, too,
by up to 0.15 in single steps."""

Found = dict[str, Any]
Trains = Callable[..., list[Found]]


@pytest.fixture(scope="module")
def train(tiny_plan: Callable[..., Plan], train_plans: Callable[..., list[Found]]) -> Trains:
    """What plans on the same number of ranks found; options are those of ``tiny_plan``."""

    def run(ranks: int, *cases: dict[str, Any], backend: str = "aot_eager") -> list[Found]:
        return train_plans([make(tiny_plan, ranks, **case) for case in cases], backend)

    return run


def make(tiny_plan: Callable[..., Plan], ranks: int, start: Start | None = None, **options: Any) -> Plan:
    overrides = SIZES | options.pop("overrides", {})
    plan = tiny_plan(scale=ranks, **{"dtype": "fp8", "overrides": overrides, **options})
    return plan.model_copy(update={"start": start})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def alone(train: Trains, saved: Path) -> dict[str, Found]:
    """What one process finds, by workload and recipe; its Llama saves a checkpoint on its way."""
    saves = {"save_checkpoint": True, "checkpoint_interval": SAVED}
    cases = {
        LLAMA: {"workload": LLAMA, "checkpoint_dir": str(saved / "fp8"), **saves},
        MAVERICK: {"workload": MAVERICK, "overrides": SHALLOW, **DROPLESS},
        "current": {"workload": LLAMA, "fp8_recipe": "current"},
        "bf16": {"workload": LLAMA, "dtype": "bf16", "checkpoint_dir": str(saved / "bf16"), **saves},
    }
    found = train(1, *({"steps": STEPS, **case} for case in cases.values()))
    return dict(zip(cases, found, strict=True))


def checkpoint(saved: Path, dtype: str = "fp8") -> Start:
    (path,) = (saved / dtype).glob(f"*/step={SAVED}-*")
    return Start(path=str(path), step=SAVED, consumed_samples=SAVED * SIZES["gbs"])


def assert_same(found: Found, reference: Found, first: int = 0) -> None:
    """Bit by bit, for as many steps as it went; but for norms, sums of as many squares as a rank has."""
    steps = slice(first, first + len(found["losses"]))
    for name in ("losses", "counts"):
        assert found[name] == reference[name][steps], name
    assert found["norms"] == pytest.approx(reference["norms"][steps], rel=1e-14)
    if first == 0:
        for name, gradient in reference["gradients"].items():
            assert torch.equal(found["gradients"][name], gradient), name


def assert_close(found: Found, reference: Found) -> None:
    differences = [abs(a - b) for a, b in zip(found["losses"], reference["losses"], strict=False)]
    assert max(differences) <= LOSS
    assert sum(differences) / len(differences) <= MEAN_LOSS
    assert found["gradients"].keys() == reference["gradients"].keys()
    assert found["scales"].keys() == reference["scales"].keys()


def ratios(found: Found, reference: Found, kind: str, which: int, besides: str = "\0") -> Tensor:
    """Of scales, or of the largest values of the first step: found to those of one process, layer by layer.

    ``besides``: part of the names of layers that are left out.
    """
    names = [name for name in reference["scales"] if name.endswith(kind) and besides not in name]
    ours, theirs = (
        torch.stack([one["scales"][name][which].flatten()[0] for name in names]) for one in (found, reference)
    )
    return ours / theirs


def within(values: Tensor, bound: float) -> bool:
    return bool(((values <= bound) & (values >= 1 / bound)).all())


def assert_same_scales(found: Found, reference: Found, *, inputs: float = 1.0, gradients: float = 1.0) -> None:
    """``gradients``: how much larger they are, as a mean over ranks is taken afterwards."""
    assert (ratios(found, reference, "history", scaling.WEIGHT) == 1.0).all()
    assert within(ratios(found, reference, "history", scaling.INPUT), inputs)
    assert within(ratios(found, reference, "history", scaling.GRADIENT) / gradients, GRADIENT)
    # Later, rounding decides where a token goes whose experts score nearly alike, and the largest value that an expert
    # has seen may be that token's.
    if len(found["losses"]) == len(reference["losses"]):
        assert within(ratios(found, reference, "scale", scaling.INPUT, besides=".experts."), SCALE)
        assert within(ratios(found, reference, "scale", scaling.WEIGHT), SCALE)


@pytest.mark.slow
def test_fp8_begins_as_bf16_does(alone: dict[str, Found]) -> None:
    for name in (LLAMA, "current"):
        for ours, theirs in zip(alone[name]["losses"], alone["bf16"]["losses"], strict=True):
            assert abs(ours - theirs) <= BF16_LOSS
    assert any(saturated for saturated, _ in alone[LLAMA]["counts"])
    assert not any(saturated for saturated, _ in alone["current"]["counts"])


@pytest.mark.slow
def test_recomputed_kept_and_compiled_it_is_the_same(train: Trains, alone: dict[str, Found]) -> None:
    cases = [
        {"recompute": "full", "parallelism": OPTIMIZER},
        {"recompute": "selective"},
        {"compiled": True, "recompute": "selective", "parallelism": OPTIMIZER},
        {"workload": MAVERICK, **DROPLESS, "overrides": SHALLOW, "recompute": "selective", "parallelism": OPTIMIZER},
    ]
    found = train(1, *({"steps": FEW, **case} for case in cases))
    for case, one in zip(cases, found, strict=True):
        assert_same(one, alone[case.get("workload", LLAMA)])


@pytest.mark.measured
def test_recomputed_and_compiled_in_current_scaling_it_is_the_same(train: Trains, alone: dict[str, Found]) -> None:
    (found,) = train(1, {"steps": FEW, "compiled": True, "recompute": "full", "fp8_recipe": "current"})
    assert_same(found, alone["current"])


@pytest.mark.slow
def test_a_continued_run_repeats_the_uninterrupted_one(train: Trains, alone: dict[str, Found], saved: Path) -> None:
    found, to_bf16, from_bf16 = train(
        1,
        {"steps": FEW, "start": checkpoint(saved)},
        {"steps": 1, "start": checkpoint(saved), "dtype": "bf16"},
        {"steps": 1, "start": checkpoint(saved, "bf16")},
    )
    assert_same(found, alone[LLAMA], first=SAVED)
    assert abs(to_bf16["losses"][0] - alone[LLAMA]["losses"][SAVED]) <= MEAN_LOSS
    assert abs(from_bf16["losses"][0] - alone["bf16"]["losses"][SAVED]) <= MEAN_LOSS


@pytest.mark.slow
def test_ranks_train_as_one_process_does(train: Trains, alone: dict[str, Found], saved: Path) -> None:
    long, tp = {"steps": STEPS}, {"tp": 2}
    fsdp, sp, experts, pp, current, on = train(
        2,
        {**long, "workload": LLAMA},
        {**long, "workload": LLAMA, "overrides": tp, "parallelism": OPTIMIZER},
        {**long, "workload": MAVERICK, **DROPLESS, "overrides": {**SHALLOW, "ep": 2}},
        {"steps": FEW, "workload": LLAMA, "overrides": {"pp": 2, "vp": 2}},
        {"steps": FEW, "workload": LLAMA, "overrides": tp, "fp8_recipe": "current"},
        {"steps": FEW, "start": checkpoint(saved), "overrides": tp},
    )
    references = [LLAMA, LLAMA, MAVERICK, LLAMA, "current"]
    for found, reference in zip((fsdp, sp, experts, pp, current), references, strict=True):
        assert_close(found, alone[reference])
    # Of 4 micro-batches a rank of FSDP or EP takes 2 and their mean.
    assert_same_scales(fsdp, alone[LLAMA], gradients=2.0)
    assert_same_scales(experts, alone[MAVERICK], gradients=2.0)
    assert_same_scales(pp, alone[LLAMA])
    assert_same_scales(sp, alone[LLAMA], inputs=INPUT)
    for ours, theirs in zip(on["losses"], alone[LLAMA]["losses"][SAVED:], strict=False):
        assert abs(ours - theirs) <= MEAN_LOSS
    for name, gradient in alone["current"]["gradients"].items():
        assert (current["gradients"][name] - gradient).norm() <= 0.1 * gradient.norm(), name


@pytest.mark.measured
def test_further_models_train_on_ranks_as_on_one_process(train: Trains) -> None:
    """Scales of Mixtral's experts are not compared: rounding decides where a token goes whose second and third expert
    score alike, and the largest value of an expert may be that token's."""
    qwen, mixtral = {"workload": QWEN, "steps": STEPS}, {"workload": MIXTRAL, "steps": STEPS, "seed": ROUTED}
    spread = train(2, {**qwen, "overrides": {"tp": 2}}, {**mixtral, "overrides": {"ep": 2}})
    for found, reference in zip(spread, train(1, qwen, mixtral), strict=True):
        assert_close(found, reference)


@pytest.mark.measured
def test_compiled_ranks_train_as_others_do(train: Trains) -> None:
    """Bit by bit; they shard the same parameters."""
    cases: list[dict[str, Any]] = [
        {"workload": LLAMA},
        {"workload": NEMOTRON, "parallelism": OPTIMIZER},
        {"workload": LLAMA, "overrides": {"cp": 2}, "recompute": "full"},
        {"workload": MAVERICK, **DROPLESS, "overrides": {"ep": 2}, "recompute": "selective"},
    ]
    eager = train(2, *({"steps": FEW, **case} for case in cases))
    compiled = train(2, *({"steps": FEW, "compiled": True, **case} for case in cases))
    for found, reference in zip(compiled, eager, strict=True):
        assert_same(found, reference)


@pytest.mark.slow
def test_adapters_beside_frozen_weights_in_fp8(train: Trains) -> None:
    """Whether weights are cast once in a run or whenever they are gathered, recomputed or not, it is the same; and in
    layouts it is close. Scales of weights are final before the first step."""
    lora = {"workload": LORA, "steps": FEW, "lora_targets": "all-linear"}
    cast_once, recomputed, current = train(1, lora, {**lora, "recompute": "full"}, {**lora, "fp8_recipe": "current"})
    assert_same(recomputed, cast_once)
    assert all("adapter." in name for name in cast_once["gradients"])
    for name, history in cast_once["scales"].items():
        if name.endswith("history"):
            assert (history[scaling.WEIGHT] == history[scaling.WEIGHT][0]).all()
            assert history[scaling.WEIGHT][0] > 0
    often, kept, tp = train(2, lora, {**lora, "parallelism": OPTIMIZER}, {**lora, "overrides": {"tp": 2}})
    assert_same(often, kept)
    for found in (kept, tp):
        assert_close(found, cast_once)
        assert (ratios(found, cast_once, "history", scaling.WEIGHT) == 1.0).all()
    assert abs(current["losses"][-1] - cast_once["losses"][-1]) <= LOSS
