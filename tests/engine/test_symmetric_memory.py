# SPDX-License-Identifier: Apache-2.0
"""With ``--communication fused``, torch's fused operators gather, multiply and scatter, with the same numbers.

On CPUs they are torch's own references for these operators, called by the code that calls the operators on a GPU.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of
from tests.engine.fused_operators import OPERATORS
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.base.errors import EnvironmentProblem
from llmb.engine.parallel import symmetric_memory
from llmb.engine.parallel.symmetric_memory import prepare_fused_products
from llmb.readers.samples.host import host_name
from llmb.runs.plan import Plan

HERE = host_name()
WORKER = Path(__file__).parent / "fused_worker.py"
SIZES = {"gbs": 4, "seq_len": 64, "layers": 2}
SUMMED = {"dtype": "bf16", "grad_reduce_dtype": "bf16", "compiled": True}
EAGER = {
    "fp32": {"dtype": "fp32"},
    "bf16, sequences of 2": {"dtype": "bf16", "overrides": {"mbs": 2}},
    "FP8": {"dtype": "fp8"},
}
OTHERS = {
    "bf16, sums in products": SUMMED,
    "bf16, recomputed": SUMMED | {"recompute": "selective"},
    "FP8, current, sequences of 2": {"dtype": "fp8", "fp8_recipe": "current-all", "overrides": {"mbs": 2}},
    "FP8, compiled": {"dtype": "fp8", "compiled": True},
    "Nemotron4, FP8, recomputed": {"workload": "pretrain_nemotron4", "dtype": "fp8", "recompute": "full"},
}
ROUNDED = 2e-5
"""Of losses and of gradients, relative to their norm, in fp32."""
Train = Callable[..., list[dict[str, Any]]]


def planned(tiny_plan: Callable[..., Plan], way: str, ranks: int = 2, **options: Any) -> Plan:
    overrides = SIZES | options.pop("overrides", {}) | {"tp": ranks}
    plan = tiny_plan(scale=ranks, **{"steps": 3, "overrides": overrides, **options})
    return plan.model_copy(update={"communication": way})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


def differences(
    cases: dict[str, dict[str, Any]], tiny_plan: Callable[..., Plan], train_plans: Train
) -> list[tuple[str, str]]:
    """What of each case is not, to the last digit, as with separate operators."""
    plans = [planned(tiny_plan, way, **case) for case in cases.values() for way in ("overlapped", "fused")]
    found = train_plans(plans, operators=True)
    pairs = zip(cases, found[::2], found[1::2], strict=True)
    return [(name, kind) for name, one, other in pairs for kind in one if not equal(one[kind], other[kind])]


def test_fused_products_train_as_separate_ones(tiny_plan: Callable[..., Plan], train_plans: Train) -> None:
    assert differences(EAGER, tiny_plan, train_plans) == []


@pytest.mark.measured
def test_fused_products_train_as_separate_ones_compiled_and_recomputed(
    tiny_plan: Callable[..., Plan], train_plans: Train
) -> None:
    assert differences(OTHERS, tiny_plan, train_plans) == []


def test_fused_products_train_as_one_process(tiny_plan: Callable[..., Plan], train_plans: Train) -> None:
    (alone,) = train_plans([planned(tiny_plan, "overlapped", 1, **EAGER["fp32"])])
    (fused,) = train_plans([planned(tiny_plan, "fused", **EAGER["fp32"])], operators=True)
    assert fused["losses"] == pytest.approx(alone["losses"], rel=ROUNDED)
    for name, gradient in alone["gradients"].items():
        assert float((fused["gradients"][name] - gradient).norm() / gradient.norm()) < ROUNDED, name


def outcomes(
    device: str, ranks: int, tiny_plan: Callable[..., Plan], run: Callable[..., list[str]], folder: Path
) -> Any:
    (folder / "plan.json").write_text(planned(tiny_plan, "fused", ranks, dtype="fp8").model_dump_json())
    return [json.loads(printed) for printed in run(WORKER, ranks, folder, device, ranks)]


def test_operators_are_tried_before_the_first_step(
    tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    for found in outcomes("cpu", 2, tiny_plan, run_ranks, tmp_path):
        assert found["refused"] is None
        assert set(found["calls"]) == set(OPERATORS)
        assert found["difference"] == 0
        assert found["wrong"] == "the fused and the separate operators compute different products"


def test_tensor_parallel_ranks_on_several_hosts_are_refused(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tiny_plan, "fused")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        ranks = ranks_of(plan)
        monkeypatch.setattr(
            symmetric_memory, "of_every_rank", lambda value, _: ["a", "b"] if value == HERE else [value]
        )
        with pytest.raises(EnvironmentProblem, match="on rank 0: its TP ranks are on a, b") as raised:
            prepare_fused_products(plan, ranks)
    finally:
        dist.destroy_process_group()
    assert raised.value.do == "omit --communication fused"


@pytest.mark.gpu
def test_operators_compute_on_gpus_what_separate_ones_do(
    tiny_plan: Callable[..., Plan], run_ranks: Callable[..., list[str]], needs: Callable[..., None], tmp_path: Path
) -> None:
    needs("gpus", torch.cuda.device_count() > 1, "two GPUs")
    for found in outcomes("cuda", 2, tiny_plan, run_ranks, tmp_path):
        assert found["refused"] is None
        assert found["difference"] < 0.02
