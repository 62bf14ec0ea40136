# SPDX-License-Identifier: Apache-2.0
"""Where no other rank has the same parameters, a training without FSDP is bit for bit the one with it, in less memory.

FSDP over one rank, which the engine does not use, is the reference.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import ranks_of, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmb.engine import stages, transformations
from llmb.engine.attention_backend import attention_kernel
from llmb.engine.checkpoint.load import load_checkpoint, load_weights
from llmb.engine.checkpoint.save import Staging, Writer
from llmb.engine.checkpoint.state import RANDOM, local_elements, training_state
from llmb.engine.data.batches import rank_data
from llmb.engine.data.build import build_data
from llmb.engine.loop import add_gradients, update
from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.model.layers import GatedMLP
from llmb.engine.model.linear import joined_layers, local_tensor
from llmb.engine.optimizer import AdamW, build_optimizer
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.precision.apply import fp8_layers
from llmb.engine.stages import adjacent_weights, place_parameters, prepare_stages
from llmb.runs.plan import EnginePlan, Plan

CPU = torch.device("cpu")
LLAMA, NEMOTRON, MAVERICK = "pretrain_llama3.1", "pretrain_nemotron4", "finetune_llama4-maverick"
QWEN, LORA = "pretrain_qwen3", "finetune_llama3"
SIZES = {"gbs": 3, "mbs": 1, "seq_len": 32}
MakePlan = Callable[..., Plan]
WithFsdp = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    yield
    dist.destroy_process_group()


@pytest.fixture
def with_fsdp(monkeypatch: pytest.MonkeyPatch) -> WithFsdp:
    @contextmanager
    def use() -> Iterator[None]:
        with monkeypatch.context() as patch:
            usual = EnginePlan.compute_path.fget
            sharded = {"shards_parameters": True, "keeps_gathered": False, "gradient_sums": "by FSDP"}
            patch.setattr(EnginePlan, "compute_path", property(lambda plan: usual(plan).model_copy(update=sharded)))
            yield

    return use


@pytest.fixture
def summed_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that adds to a gradient rounds once, and not twice."""
    monkeypatch.setattr(stages, "sum_in_products", lambda _stages: None)


class Trainee(NamedTuple):
    ranks: Ranks
    stage: TrainedStage
    optimizer: AdamW
    step: Callable[[int], tuple[float, float]]
    """Does a step; returns loss and gradient norm."""

    def steps(self, *numbers: int) -> list[tuple[float, float]]:
        return [self.step(number) for number in numbers]

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint would hold of weights, optimizer and scales, as full tensors."""
        state = training_state([self.stage], [self.optimizer], CPU)
        return {name: whole(tensor).clone() for name, tensor in state.items() if not name.startswith(RANDOM)}

    def save(self, folder: Path) -> Path:
        save(training_state([self.stage], [self.optimizer], CPU), storage_writer=Writer(folder / "weights"))
        return folder

    def load(self, folder: Path) -> "Trainee":
        load_checkpoint(folder, [self.stage], [self.optimizer], self.ranks)
        return self


def prepare(plan: Plan) -> Trainee:
    ranks = ranks_of(plan)
    stages = prepare_stages(plan, ranks)
    passes, source = build_passes(stages, plan, ranks), rank_data(build_data(plan), plan, ranks, varlen=False)
    optimizer = build_optimizer(stages[0], plan.recipe.training)

    def step(number: int) -> tuple[float, float]:
        # The fused kernel of a CPU gives the last bit of a bf16 gradient by where its memory happens to be.
        with attention_kernel("math"):
            loss = add_gradients(passes, plan, source.step(number), number, ranks)
        assert loss is not None
        return loss.item(), update(stages, [optimizer], plan.recipe.training, number).item()

    return Trainee(ranks, stages[0], optimizer, step)


def uses_fsdp(trainee: Trainee) -> bool:
    return any(isinstance(module, FSDPModule) for module in trainee.stage.model.modules())


def values(trainee: Trainee) -> dict[str, Tensor]:
    return {each.name: each.values.detach() for each in trainee.stage.held()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit."""
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: each.dtype for n, each in expected.items()}
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []


CASES = {
    "fp32": (LLAMA, {}),
    "bf16": (LLAMA, {"dtype": "bf16"}),
    "bf16, reduced in bf16": (QWEN, {"dtype": "bf16", "grad_reduce_dtype": "bf16"}),
    "fp8": (NEMOTRON, {"dtype": "fp8"}),
    "fp8, current scaling": (LLAMA, {"dtype": "fp8", "fp8_recipe": "current", "recompute": "full"}),
    "fp8 experts": (MAVERICK, {"dtype": "fp8"}),
    "adapters": (LORA, {"dtype": "bf16", "lora_dropout": 0.1}),
    "adapters beside fp8": (LORA, {"dtype": "fp8", "lora_targets": "all-linear"}),
}


QUICK = ("bf16", "fp8")


def plan_of(name: str, tiny_plan: MakePlan) -> Plan:
    workload, options = CASES[name]
    layers = 3 if name == "fp8, current scaling" else 2  # its first and last ones stay in bf16
    return tiny_plan(workload, scale=1, overrides={**SIZES, "layers": layers}, **options)


@pytest.mark.usefixtures("alone", "summed_by_autograd")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.measured) for name in CASES]
)
def test_it_trains_as_with_fsdp_and_either_resumes_the_other(
    name: str, tiny_plan: MakePlan, with_fsdp: WithFsdp, tmp_path: Path
) -> None:
    plan = plan_of(name, tiny_plan)
    flat = prepare(plan)
    with with_fsdp():
        sharded = prepare(plan)
    assert (uses_fsdp(flat), uses_fsdp(sharded)) == (False, True)
    assert_equal(flat.state(), sharded.state())
    assert flat.steps(0, 1) == sharded.steps(0, 1)
    assert_equal(flat.state(), sharded.state())
    of_flat, of_sharded = flat.save(tmp_path / "flat"), sharded.save(tmp_path / "sharded")
    expected = flat.steps(2, 3)
    resumed = [prepare(plan).load(folder) for folder in (of_flat, of_sharded)]
    with with_fsdp():
        resumed.append(prepare(plan).load(of_flat))
    for each in resumed:
        found = each.steps(2, 3)
        if name == "adapters beside fp8":  # thin bf16 products of a CPU: their last bit depends on the place in memory
            assert [*chain(*found)] == pytest.approx([*chain(*expected)], rel=1e-6)
        else:
            assert found == expected
            assert_equal(each.state(), flat.state())


def storage_bytes(tensors: Iterator[Tensor]) -> int:
    """Each storage counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def held(trainee: Trainee) -> Iterator[Tensor]:
    """All tensors that live from step to step, but for step counts and scales."""
    yield from trainee.stage.model.parameters()
    yield from trainee.stage.masters.values()
    for each in trainee.optimizer.trained:
        yield from (each.first, each.second)
    for layer in fp8_layers([trainee.stage.model]):
        yield from layer.kept or ()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "trained_bytes", "frozen_bytes"),
    [("fp32", 12, 0), ("bf16", 14, 0), ("fp8 experts", 14, 0), ("adapters", 14, 2)],
)
def test_each_parameter_takes_as_many_bytes_as_its_update_needs(
    name: str, trained_bytes: int, frozen_bytes: int, tiny_plan: MakePlan
) -> None:
    """Casts to FP8 are gone after the passes of a step."""
    trainee = prepare(plan_of(name, tiny_plan))
    trainee.steps(0)
    assert not any(parameter.grad is not None for parameter in trainee.stage.model.parameters())
    parameters = list(trainee.stage.model.parameters())
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in parameters) - trained
    assert any(fp8_layers([trainee.stage.model])) == (name == "fp8 experts")
    assert storage_bytes(held(trainee)) == trained_bytes * trained + frozen_bytes * frozen


@pytest.mark.usefixtures("alone")
def test_initial_values_are_those_of_fp32_and_parameters_are_rounded_from_them(tiny_plan: MakePlan) -> None:
    exact, rounded = (prepare(plan_of(name, tiny_plan)) for name in ("fp32", "bf16"))
    assert not exact.stage.masters
    assert_equal(values(rounded), values(exact))
    for parameter, master in rounded.stage.masters.items():
        assert torch.equal(parameter, master.bfloat16())
    assert set(rounded.stage.masters) == set(rounded.stage.model.parameters())


@pytest.mark.usefixtures("alone")
def test_weights_to_start_with_are_not_rounded(tiny_plan: MakePlan, tmp_path: Path) -> None:
    plan = plan_of("bf16", tiny_plan)
    other, started = prepare(plan), prepare(plan)
    other.stage.initialize(99)
    folder = other.save(tmp_path / "other")
    load_weights(folder, [started.stage], started.ranks)
    assert_equal(values(started), values(other))
    assert started.steps(0) == other.steps(0)


@pytest.mark.usefixtures("alone")
def test_micro_batches_are_summed_in_fp32_if_the_recipe_says_so(tiny_plan: MakePlan) -> None:
    """And in place: by the second micro-batch, no other tensor is made for the sum."""
    plan = plan_of("bf16", tiny_plan)
    trainee = prepare(plan)
    stage, data = trainee.stage.model, build_data(plan)
    sums = {name: torch.zeros(parameter.shape) for name, parameter in stage.named_parameters()}
    places = []
    for sample in range(3):
        batch = data.micro_batch(range(sample, sample + 1))
        alone = build_model(plan.recipe.model).to(torch.bfloat16)
        TrainedStage(alone).initialize(plan.seed)
        with attention_kernel("math"):  # as in ``prepare``
            for model in (stage, alone):
                model(batch.tokens, batch.labels).backward()
        for name, parameter in alone.named_parameters():
            sums[name] += parameter.grad
        places.append({name: parameter.grad.data_ptr() for name, parameter in stage.named_parameters()})
    assert {name: parameter.grad.dtype for name, parameter in stage.named_parameters()} == dict.fromkeys(
        sums, torch.float32
    )
    assert_equal({name: parameter.grad for name, parameter in stage.named_parameters()}, sums)
    assert places[0] == places[1] == places[2]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_layers_with_the_same_input_are_multiplied_as_one_if_compiled(
    name: str, tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an update makes of the layers' weights is what they multiply by."""
    plan = plan_of(name, tiny_plan)
    monkeypatch.setattr(transformations, "apply_compile", lambda _stage, _backend: None)  # takes long
    apart, joined = prepare(plan), prepare(plan.model_copy(update={"compiled": True}))
    assert all(layers.weight is None for layers in joined_layers(apart.stage.model))
    assert all(layers.weight is not None for layers in joined_layers(joined.stage.model))
    for ours, theirs in zip(joined.steps(0, 1, 2), apart.steps(0, 1, 2), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5 if name == "fp32" else 2e-3)
    for layers in joined_layers(joined.stage.model):
        assert layers.weight is not None
        assert torch.equal(layers.weight, torch.cat([layer.weight for layer in layers.layers]))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("gbs", [1, 3])
def test_micro_batches_in_bf16_are_summed_by_products(
    gbs: int, tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If there are several."""
    plan = tiny_plan(LLAMA, scale=1, overrides={**SIZES, "gbs": gbs, "layers": 2}, **CASES["bf16, reduced in bf16"][1])
    ours = prepare(plan)
    assert sum(len(each.parameters) for each in ours.stage.gradient_sums) == (2 * 7 if gbs > 1 else 0)
    monkeypatch.setattr(stages, "sum_in_products", lambda _stages: None)
    for one, other in zip(ours.steps(0, 1, 2), prepare(plan).steps(0, 1, 2), strict=True):
        assert one == pytest.approx(other, rel=2e-3)


def adjacent(stage: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in stage.modules():
        if isinstance(module, Attention):
            yield [module.q_proj, module.k_proj, module.v_proj]
        elif isinstance(module, GatedMLP):
            yield [module.gate_proj, module.up_proj]


def assert_joined(stage: Decoder) -> None:
    layers = list(adjacent(stage))
    assert {len(each) for each in layers} == {2, 3}
    for each in layers:
        for number, layer in enumerate(each):
            local_tensor(layer.weight.detach()).fill_(number)
        joined = adjacent_weights(each)
        assert torch.equal(joined, torch.cat([local_tensor(layer.weight.detach()) for layer in each]))
        joined.fill_(7)
        assert all((local_tensor(layer.weight.detach()) == 7).all() for layer in each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_with_the_same_input_are_one_matrix(dtype: torch.dtype, tiny_plan: MakePlan) -> None:
    model = tiny_plan(MAVERICK, scale=1).recipe.model
    with torch.device("meta"):
        models = [build_model(model) for _ in range(2)]
    place_parameters(list(map(TrainedStage, models)), dtype, CPU)
    for stage in models:
        assert_joined(stage)
        block = stage.layers["0"]
        with pytest.raises(ValueError, match="not adjacent"):
            adjacent_weights([block.self_attn.q_proj, block.self_attn.v_proj])


def test_tensor_parallel_shards_are_views_too(
    tiny_plan: MakePlan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And their masters have the shape of the full parameter in checkpoints. No other rank answers."""
    monkeypatch.setattr(transformations, "apply_compile", lambda _stage, _backend: None)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        plan = tiny_plan(LLAMA, scale=2, dtype="bf16", compiled=True, overrides={"tp": 2})
        (stage,) = prepare_stages(plan, ranks_of(plan))
        optimizer = build_optimizer(stage, plan.recipe.training)
        shapes = {name: parameter.shape for name, parameter in build_model(plan.recipe.model).named_parameters()}
        state = training_state([stage], [optimizer], CPU)
        for name, shape in shapes.items():
            assert state[f"model.{name}"].shape == state[f"optimizer.{name}.exp_avg"].shape == shape
            assert state[f"model.{name}"].dtype == torch.float32
            assert stage.model.get_parameter(name).dtype == torch.bfloat16
        assert len({local_tensor(part.detach()).untyped_storage().data_ptr() for part in stage.model.parameters()}) == 1
        staged = Staging().copy(local_elements(state, {}), CPU)
        expected = {name: local_tensor(tensor).clone() for name, tensor in state.items() if name.startswith("model.")}
        assert_joined(stage.model)
        for tensor in stage.masters.values():
            local_tensor(tensor).fill_(8)  # as later steps change them while a checkpoint is written
        assert_equal({name: local_tensor(staged[name]) for name in expected}, expected)
    finally:
        dist.destroy_process_group()
