# SPDX-License-Identifier: Apache-2.0
"""Gradients that products add to are those that autograd sums, in whatever order micro-batches pass."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of
from side_by_side import side_by_side
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.catalogue.records import Model
from llmb.engine import transformations
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import Linear, add_product, join_products
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.stages import prepare_stages, sum_in_products
from llmb.engine.transformations import apply_recompute, freeze
from llmb.runs.choices import Parallelism
from llmb.runs.plan import EnginePlan
from llmb.verdict.published_verdict import ways_of_engine

Randomised = Callable[[Model], Decoder]
STEPS, MICRO_BATCHES = 2, 3


def losses(model: Decoder, step: int) -> list[Callable[[], Tensor]]:
    """The forward passes of a step's micro-batches."""
    batches = torch.randint(512, (MICRO_BATCHES, 2, 33), generator=torch.Generator().manual_seed(step))
    return [lambda batch=batch: model(batch[:, :-1], batch[:, 1:]) for batch in batches]


def gradients(trained: TrainedStage | Decoder, step: int, *, together: bool = False) -> dict[str, Tensor]:
    """Of a step. together: all forward passes precede all backward passes, as some may in a pipeline."""
    model, sums = (trained, ()) if isinstance(trained, Decoder) else (trained.model, trained.gradient_sums)
    for parameter in model.parameters():
        parameter.grad = None
    passes = losses(model, step)
    for loss in [each() for each in passes] if together else (each() for each in passes):
        loss.backward()
    for each in sums:
        each.give()
    return {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}


def exact(model: Decoder, step: int) -> dict[str, Tensor]:
    return gradients(model.float(), step)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name].float() - gradient).norm() <= bound * gradient.norm(), name


def pair(model: Model, randomised: Randomised, dtype: torch.dtype) -> tuple[TrainedStage, Decoder]:
    """Two equal models; products add to the gradients of the first, some of them joined."""
    ours, theirs = (TrainedStage(randomised(model).to(dtype)) for _ in range(2))
    join_products([ours.model], side_by_side)
    sum_in_products([ours])
    return ours, theirs.model


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", ["llama", "nemotron4", "llama4", "qwen3-tied"])
def test_sums_of_steps_are_those_of_autograd(
    name: str, together: bool, models: dict[str, Model], randomised: Randomised
) -> None:
    ours, theirs = pair(models[name], randomised, torch.float32)
    assert ours.gradient_sums
    for step in range(STEPS):
        assert_close(gradients(ours, step, together=together), gradients(theirs, step), 1e-5)


def test_bf16_sums_are_no_less_exact_than_those_of_autograd(models: dict[str, Model], randomised: Randomised) -> None:
    ours, theirs = pair(models["llama"], randomised, torch.bfloat16)
    found, usual = gradients(ours, 0), gradients(theirs, 0)
    expected = exact(theirs, 0)
    names = [name for name in expected if "proj" in name]
    errors = [
        torch.stack([(each[name].float() - expected[name]).norm() / expected[name].norm() for name in names]).mean()
        for each in (found, usual)
    ]
    assert errors[0] <= 1.02 * errors[1]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recompute",
    ["none", pytest.param("selective", marks=pytest.mark.slow), pytest.param("full", marks=pytest.mark.measured)],
)
def test_compiled_and_recomputed_blocks_add_to_them_too(
    recompute: str, compiled: bool, models: dict[str, Model], randomised: Randomised
) -> None:
    """With one graph for all layers and micro-batches, whether a sum is empty or not."""
    ours, theirs = pair(models["llama"].model_copy(update={"layers": 10}), randomised, torch.float32)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    if recompute == "selective":
        apply_recompute(ours.model, recompute)
    for block in ours.model.blocks() if compiled else ():
        block.wrap("compute", partial(torch.compile, dynamic=False, backend=counter, fullgraph=True))
    if recompute == "full":
        apply_recompute(ours.model, recompute)
    for step in range(STEPS):
        assert_close(gradients(ours, step, together=True), gradients(theirs, step), 1e-5)
    assert counter.frame_count == compiled


def test_gradients_are_views_of_one_memory_in_all_steps(models: dict[str, Model], randomised: Randomised) -> None:
    ours, _ = pair(models["llama"], randomised, torch.bfloat16)
    places = []
    for step in range(STEPS):
        gradients(ours, step)
        places.append([part.grad.data_ptr() for name, part in ours.model.named_parameters() if "proj" in name])
    assert places[0] == places[1]
    sums = {each.total.data_ptr() for each in ours.gradient_sums}
    assert sums <= set(places[0])


def test_frozen_weights_have_no_sum(models: dict[str, Model], randomised: Randomised) -> None:
    stage = TrainedStage(randomised(models["llama"]))
    freeze(stage.model, torch.bfloat16)
    sum_in_products([stage])
    assert stage.gradient_sums == []


def test_the_first_product_overwrites_whatever_is_there() -> None:
    total, is_empty = torch.full((3, 4), float("nan")), torch.ones((), dtype=torch.bool)
    gradient, rows = torch.randn(5, 3), torch.randn(5, 4)
    for times in (1, 2):
        add_product(total, is_empty, gradient, rows)
        torch.testing.assert_close(total, times * gradient.T @ rows)
    assert not is_empty


@pytest.mark.parametrize(
    ("workload", "overrides", "options"),
    [
        ("pretrain_llama3.1", {}, {}),
        ("pretrain_llama3.1", {}, {"parallelism": Parallelism(dp_sharding="full")}),
        ("pretrain_llama3.1", {}, {"grad_reduce_dtype": "fp32"}),
        ("pretrain_nemotron4", {}, {"dtype": "fp8"}),
        ("pretrain_llama3.1", {"tp": 2}, {"compiled": True}),
        ("pretrain_nemotron4", {"tp": 2}, {"dtype": "fp8"}),
    ],
)
def test_what_a_verdict_says_of_a_plan_is_what_the_engine_does(
    tiny_plan: Callable[..., EnginePlan],
    workload: str,
    overrides: dict[str, int],
    options: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the first of two ranks; the other one does not answer."""
    monkeypatch.setattr(transformations, "apply_compile", lambda _stage, _backend: None)
    chosen = {"dtype": "bf16", "grad_reduce_dtype": "bf16", "parallelism": Parallelism(dp_sharding="optimizer")}
    plan = tiny_plan(workload, scale=2, overrides={"gbs": 8, "mbs": 1, **overrides}, **{**chosen, **options})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        (stage,) = prepare_stages(plan, ranks_of(plan))
    finally:
        dist.destroy_process_group()
    ways = ways_of_engine(plan)
    assert ways["weight_gradients"] == ("by the product" if stage.gradient_sums else "after the product")
    gathering = [module for module in stage.model.modules() if isinstance(module, Linear) and module.group]
    assert ways["tp_overlap"] == ("in part of the backward pass" if gathering else "none")
