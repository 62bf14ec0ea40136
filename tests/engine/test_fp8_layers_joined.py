# SPDX-License-Identifier: Apache-2.0
"""FP8 layers with the same input are one product, and what is cast as it is computed is what is cast afterwards."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from llmb.catalogue.records import Model
from llmb.engine.model.decoder import Decoder
from llmb.engine.precision.apply import (
    caching_layers,
    drop_cast_weights,
    fuse_activations,
    fuse_rotation,
    join_casts,
    layers_of,
)
from llmb.engine.precision.scaling import LayerScales, Scales
from llmb.engine.transformations import apply_compile, apply_recompute
from llmb.runs.attention_choice import ProductDtype

Randomised = Callable[[Model], Decoder]
STEPS = (join_casts, fuse_activations, fuse_rotation)
DEVICE = "cuda"
FEW_CASES = [("none", "llama", False), ("selective", "llama4", False), ("full", "nemotron4", False)]
TOKENS = torch.randint(512, (2, 17), generator=torch.Generator().manual_seed(3))


def in_fp8(
    model: Decoder, steps: int, *, delayed: bool = True, product_dtype: ProductDtype = "fp32", device: str = "cpu"
) -> Scales:
    """Changes a model in place, with the first ``steps`` of ``STEPS``."""
    found = [layer for block in model.layers.values() for layer in layers_of(block)]
    keys = [layer.shares for layer in found]
    leaders = [keys.index(key) for key in keys]
    scales = Scales(len(found), torch.device(device), None, delayed=delayed, leaders=leaders)
    scales.scale.copy_(torch.tensor([50.0, 400.0, 1e6]))
    scales.use()
    for number, layer in enumerate(found):
        layer.replace(LayerScales(scales, number), product_dtype)
    for step in STEPS[:steps]:
        step(model)
    return scales


def results(model: Decoder) -> dict[str, Tensor]:
    """The loss and its gradients, by name."""
    model.zero_grad()
    tokens = TOKENS.to(next(model.parameters()).device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    found = {name: part.grad.clone() for name, part in model.named_parameters() if part.grad is not None}
    return {**found, "loss": loss.detach()}


def keep(model: Decoder) -> None:
    for layer in caching_layers(model):
        layer.keep_weight()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama-biased", "nemotron4", "llama4", "qwen3"])
def test_casts_in_one_pass_change_nothing(
    name: str, keeps: bool, models: dict[str, Model], randomised: Randomised
) -> None:
    """Bit by bit, with their largest values; if weights are kept or not."""
    found = []
    for steps in (1, 2, 3):
        model = randomised(models[name]).bfloat16()
        scales = in_fp8(model, steps)
        if keeps and steps > 1:
            keep(model)
        found.append({**results(model), "amax": scales.of_all(scales.amax)})
    assert found[0]["amax"].any()
    for other in found[1:]:
        assert_equal(other, found[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize(
    ("mode", "name", "compiled"),
    [
        pytest.param(*case, marks=() if case in FEW_CASES else pytest.mark.measured)
        for case in product(("none", "selective", "full"), ("llama", "nemotron4", "llama4"), (False, True))
    ],
)
def test_rotation_in_a_product_changes_nothing_when_it_is_recomputed(
    mode: Literal["none", "selective", "full"],
    compiled: bool,
    name: str,
    models: dict[str, Model],
    randomised: Randomised,
) -> None:
    """Bit by bit."""
    plain, fused = (randomised(models[name]).bfloat16() for _ in range(2))
    in_fp8(plain, 2, product_dtype="fp8")
    in_fp8(fused, 2, product_dtype="fp8")
    fuse_rotation(fused)
    torch.compiler.reset()
    if mode == "selective":
        apply_recompute(fused, mode)
    if compiled:
        apply_compile(fused, "aot_eager")
    if mode == "full":
        apply_recompute(fused, mode)
    assert_equal(results(fused), results(plain))


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_one_product_is_that_of_each_layer(
    delayed: bool, keeps: bool, models: dict[str, Model], randomised: Randomised
) -> None:
    """But for the rounding of partial sums. Gradients have the same largest value, and so the same current scale."""
    found = []
    hidden = torch.randn(2, 24, 64).bfloat16()
    for steps in (0, 1):
        model = randomised(models["llama"].model_copy(update={"hidden_size": 64})).bfloat16()
        scales = in_fp8(model, steps, delayed=delayed)
        if keeps:
            keep(model)
        attention, own = model.layers["0"].self_attn, hidden.clone().requires_grad_()
        outputs = attention.qkv(own, attention.head_dim)
        torch.autograd.backward(outputs, [torch.ones_like(part).mul_(0.3).cumsum(1) for part in outputs])
        weights = [layer.weight.grad for layer in attention.qkv.layers]
        found.append([*outputs, own.grad, *weights, scales.of_all(scales.amax)])
    for apart, joined in zip(*found, strict=True):
        assert joined.shape == apart.shape
        torch.testing.assert_close(joined, apart, rtol=2**-7, atol=2**-7 * apart.abs().max().item())


def test_joined_layers_keep_their_casts_in_one_matrix(models: dict[str, Model], randomised: Randomised) -> None:
    model = randomised(models["llama"]).bfloat16()
    in_fp8(model, 2)
    expected = results(model)
    keep(model)
    attention = model.layers["0"].self_attn
    values, transposed = attention.qkv.kept
    heights = [len(layer.weight) for layer in attention.qkv.layers]
    assert values.shape == transposed.mT.shape == (sum(heights), attention.q_proj.in_features)
    assert torch.equal(values.float(), transposed.t().float())
    for layer, own, turned in zip(
        attention.qkv.layers, values.split(heights), transposed.split(heights, 1), strict=True
    ):
        assert [part.data_ptr() for part in layer.kept] == [own.data_ptr(), turned.data_ptr()]
    assert_equal(results(model), expected)
    values.copy_(torch.zeros_like(values))
    assert not torch.equal(results(model)["loss"], expected["loss"])
    drop_cast_weights([model])
    assert attention.qkv.kept is None
    assert attention.k_proj.kept is None
    assert_equal(results(model), expected)


@pytest.mark.parametrize("name", ["llama", "nemotron4"])
def test_less_is_saved_for_the_backward_pass(name: str, models: dict[str, Model], randomised: Randomised) -> None:
    sizes = []
    for steps in (0, 1, 2, 3):
        model = randomised(models[name]).bfloat16()
        in_fp8(model, steps)
        keep(model)
        saved: dict[int, int] = {}

        def save(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            memory = tensor.untyped_storage()
            saved[memory.data_ptr()] = memory.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            loss = model(TOKENS[:, :-1], TOKENS[:, 1:])
        loss.backward()
        sizes.append(sum(saved.values()))
    # torch keeps one tensor for a squared ReLU anyway.
    assert sizes[0] > sizes[1] >= sizes[2] > sizes[3]
    assert name == "nemotron4" or sizes[1] > sizes[2]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, when it compiles
def test_fp8_blocks_compile_once_for_all_layers(models: dict[str, Model], randomised: Randomised) -> None:
    model = models["llama"].model_copy(update={"layers": 10})  # more than torch compiles again before it gives up
    compiled, eager = (randomised(model).bfloat16() for _ in range(2))
    for each in (compiled, eager):
        in_fp8(each, 3)
        keep(each)
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in compiled.blocks():
        block.wrap("compute", partial(torch.compile, dynamic=False, backend=counter, fullgraph=True))
    assert_equal(results(compiled), results(eager))
    drop_cast_weights([compiled])
    keep(compiled)
    assert_equal(results(compiled), results(eager))
    assert counter.frame_count == 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when it compiles
@pytest.mark.parametrize("name", ["llama", "nemotron4"])
def test_a_gpu_computes_in_one_pass_what_it_does_in_several(
    name: str, needs: Callable[[str, bool, str], None], models: dict[str, Model], randomised: Randomised
) -> None:
    """Kernels and compiled code round elsewhere, which a cast to FP8 makes a step: errors are as large, from fp32."""
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    exact = results(randomised(models[name]).to(DEVICE))

    def error(found: dict[str, Tensor]) -> float:
        return max(float((found[key] - value).norm() / value.norm()) for key, value in exact.items() if key != "loss")

    def computed(steps: int, *, compiled: bool) -> dict[str, Tensor]:
        model = randomised(models[name]).bfloat16().to(DEVICE)
        in_fp8(model, steps, product_dtype="fp8", device=DEVICE)
        keep(model)
        torch.compiler.reset()
        for block in model.blocks() if compiled else ():
            block.wrap("compute", partial(torch.compile, dynamic=False, fullgraph=True))
        return results(model)

    usual = error(computed(2, compiled=False))
    for steps, compiled in ((3, False), (2, True), (3, True)):
        assert error(computed(steps, compiled=compiled)) <= 1.25 * usual
