# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are side by side are multiplied as one, with the results and gradients of each by itself."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from side_by_side import side_by_side
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from llmb.catalogue.records import Lora, LoraTargets, Model
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import Joined, Linear, join_products, joined_layers
from llmb.engine.transformations import apply_lora, apply_recompute

Randomised = Callable[[Model], Decoder]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.03}


def as_one(stage: Decoder) -> set[int]:
    """The numbers of layers that are multiplied as one."""
    return {len(joined.names) for joined in joined_layers(stage) if joined.weight is not None}


def gradients(model: Decoder) -> dict[str, Tensor]:
    tokens = torch.randint(512, (2, 65), generator=torch.Generator().manual_seed(3))
    model.zero_grad()
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def assert_equal_gradients(found: Decoder, expected: Decoder, bound: float) -> None:
    others = gradients(expected)
    own = gradients(found)
    assert own.keys() == others.keys()
    for name, gradient in own.items():
        assert (gradient - others[name]).norm() <= bound * others[name].norm(), name


def pair(model: Model, randomised: Randomised, dtype: torch.dtype) -> tuple[Decoder, Decoder]:
    """Two equal models; the products of the first are joined."""
    joined, apart = (randomised(model).to(dtype) for _ in range(2))
    join_products([joined], side_by_side)
    return joined, apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "nemotron4", "llama4", "qwen3-tied", "mixtral"])
def test_gradients_are_those_of_each_layer_by_itself(
    name: str, dtype: torch.dtype, models: dict[str, Model], randomised: Randomised
) -> None:
    joined, apart = pair(models[name], randomised, dtype)
    assert 3 in as_one(joined)
    assert list(joined.state_dict()) == list(apart.state_dict())
    assert_equal_gradients(joined, apart, BOUNDS[dtype])


def test_gradients_of_the_parts_are_views_of_one_product(models: dict[str, Model], randomised: Randomised) -> None:
    joined, _ = pair(models["llama"], randomised, torch.bfloat16)
    found = gradients(joined)
    names = [f"layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    assert len({found[name].untyped_storage().data_ptr() for name in names}) == 1
    assert all(found[name].is_contiguous() for name in names)


def test_a_change_of_a_parameter_changes_the_product(models: dict[str, Model], randomised: Randomised) -> None:
    joined, apart = pair(models["llama"], randomised, torch.float32)
    with torch.no_grad():
        for model in (joined, apart):
            model.get_parameter("layers.0.mlp.up_proj.weight").mul_(2)
    assert_equal_gradients(joined, apart, BOUNDS[torch.float32])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_compile_once_for_all_layers(recompute: str, models: dict[str, Model], randomised: Randomised) -> None:
    model = models["llama"].model_copy(update={"layers": 10})  # more than torch compiles again before it gives up
    joined, apart = pair(model, randomised, torch.bfloat16)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    if recompute == "selective":
        apply_recompute(joined, recompute)
    for block in joined.blocks():
        block.wrap("compute", partial(torch.compile, dynamic=False, backend=counter, fullgraph=True))
    if recompute == "full":
        apply_recompute(joined, recompute)
    assert_equal_gradients(joined, apart, BOUNDS[torch.bfloat16])
    gradients(joined)
    assert counter.frame_count == 1


def lora(targets: LoraTargets) -> Lora:
    return Lora(rank=4, alpha=8, dropout=0, targets=targets)


@pytest.mark.parametrize("targets", ["qkv", "attention"])
def test_adapters_get_the_parts_of_a_joined_product(
    targets: LoraTargets, models: dict[str, Model], randomised: Randomised
) -> None:
    joined, apart = (randomised(models["llama"]) for _ in range(2))
    for model in (joined, apart):
        apply_lora(model, lora(targets), torch.float32)
        generator = torch.Generator().manual_seed(7)
        for name, part in model.named_parameters():
            if "adapter" in name:
                nn.init.normal_(part, std=0.1, generator=generator)
    join_products([joined], side_by_side)
    assert as_one(joined) == {2, 3}
    assert_equal_gradients(joined, apart, BOUNDS[torch.float32])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("layers", [2, 3])
def test_frozen_layers_compile_as_one(layers: int) -> None:
    """As in the blocks of LoRA, where no joined weight has a gradient."""
    owner = nn.Module()
    names = [str(number) for number in range(layers)]
    generator = torch.Generator().manual_seed(7)
    for name in names:
        layer = Linear(4, 8).requires_grad_(False)
        layer.weight.copy_(torch.randint(-8, 9, (8, 4), generator=generator))  # whose sums are exact in any order
        setattr(owner, name, layer)
    joined = owner.all = Joined(owner, *names)
    expected = joined(torch.ones(2, 4))
    join_products([owner], side_by_side)
    torch.compiler.reset()
    found = torch.compile(joined, backend="aot_eager", fullgraph=True)(torch.ones(2, 4))
    assert torch.equal(torch.cat(found), torch.cat(expected))


def test_hooks_of_layers_that_stay_apart_are_honored() -> None:
    owner = nn.Module()
    owner.first, owner.second = Linear(4, 8), Linear(4, 8)
    seen: list[nn.Module] = []
    owner.second.register_forward_hook(lambda layer, _inputs, _output: seen.append(layer))
    joined = owner.both = Joined(owner, "first", "second")
    join_products([owner], side_by_side)
    outputs = joined(torch.ones(2, 4))
    assert joined.weight is None
    assert seen == [owner.second]
    assert [output.shape for output in outputs] == [(2, 8), (2, 8)]
