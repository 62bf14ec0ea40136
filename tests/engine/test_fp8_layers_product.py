# SPDX-License-Identifier: Apache-2.0
"""Layers in FP8 multiply what the casts made of their tensors, and lose no more than the formats do."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from llmb.base.errors import EnvironmentProblem
from llmb.engine.kernels.elementwise import cast
from llmb.engine.model.linear import Linear
from llmb.engine.model.moe import Experts
from llmb.engine.precision.apply import check_device
from llmb.engine.precision.experts import Fp8Stack
from llmb.engine.precision.fp8_layers import Fp8Linear
from llmb.engine.precision.scaling import (
    FORMATS,
    GRADIENT,
    INPUT,
    LARGEST,
    WEIGHT,
    LayerScales,
    Scaled,
    Scales,
    multiply,
    scale_from,
)
from llmb.runs.attention_choice import ProductDtype

ROUNDED = 2**-8
"""Relative: the results are bf16."""


def place(*, delayed: bool) -> LayerScales:
    torch.manual_seed(3)
    return LayerScales(Scales(1, torch.device("cpu"), None, delayed=delayed), 0)


def set_scales(where: LayerScales, *values: float) -> None:
    where.scale.copy_(torch.tensor(values))
    where.scales.use()


def stands_for(values: Tensor, which: int, scales: Tensor, *, delayed: bool = True) -> Tensor:
    """What a tensor is after its cast, in fp64."""
    own = scales[which]
    if not delayed and which != WEIGHT:
        own = scale_from(values.abs().amax().float(), LARGEST[which], 1.0)
    return cast(values, own, FORMATS[which]).double() / own.double()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    size = theirs.abs().amax().item()
    torch.testing.assert_close(ours.double(), theirs, rtol=ROUNDED, atol=ROUNDED * size)


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("product_dtype", ["fp8", "fp32", "bf16"])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(32, 64, 48), (7, 40, 20)])
def test_a_linear_layer_and_its_gradients(
    delayed: bool, keeps: bool, product_dtype: ProductDtype, rows: int, inputs: int, outputs: int
) -> None:
    where = place(delayed=delayed)
    set_scales(where, 100.0, 400.0, 3000.0)
    layer = Fp8Linear(Linear(inputs, outputs).bfloat16(), where, product_dtype=product_dtype)
    if keeps:
        layer.keep_weight()
    hidden = torch.randn(1, rows, inputs, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(1, rows, outputs, dtype=torch.bfloat16)
    output = layer(hidden)
    output.backward(gradient)
    x = stands_for(hidden.detach()[0], INPUT, where.scale, delayed=delayed)
    w = stands_for(layer.weight.detach(), WEIGHT, where.scale)
    dy = stands_for(gradient[0], GRADIENT, where.scale, delayed=delayed)
    assert output.dtype is torch.bfloat16
    assert_close(output.detach()[0], x @ w.T)
    assert_close(hidden.grad[0], dy @ w)
    assert_close(layer.weight.grad, dy.T @ x)
    assert where.scales.amax[0].tolist() == [hidden.abs().max().item(), 0.0, gradient.abs().max().item()]


@pytest.mark.parametrize("formats", [(INPUT, WEIGHT), (GRADIENT, WEIGHT), (GRADIENT, INPUT)])
def test_the_product_of_a_cpu_rounds_once(formats: tuple[int, int]) -> None:
    """It is the exact product, rounded to bf16, but where sums in fp32 end beside the middle of two bf16 numbers.

    A product in bf16, which rounds twice, misses a quarter of them.
    """
    torch.manual_seed(11)
    scales = torch.tensor(0.37), torch.tensor(1.91)
    left, right = (
        Scaled(cast(torch.randn(size) * 50, torch.ones(()), FORMATS[which]), 1 / scale)
        for size, which, scale in zip(((96, 256), (192, 256)), formats, scales, strict=True)
    )
    exact = left.values.double() * left.inverse.double() @ (right.values.double() * right.inverse.double()).T
    missed = {
        dtype: (multiply(left, right.mT, fast=False, product_dtype=dtype) != exact.bfloat16()).double().mean().item()
        for dtype in get_args(ProductDtype)
    }
    assert missed["fp32"] <= 1e-3
    assert missed["fp8"] <= 1e-2
    assert missed["bf16"] >= 0.1


@pytest.mark.parametrize(("which", "error"), [(INPUT, 2**-4), (GRADIENT, 2**-3)])
def test_a_cast_rounds_to_nearest_and_keeps_the_largest(which: int, error: float) -> None:
    values = torch.cat([torch.linspace(-3, 3, 10001), torch.tensor([1e30, -math.inf])])
    scale = torch.tensor(LARGEST[which] / 3)
    found = cast(values, scale, FORMATS[which]).double() / scale
    inside = values[:-2].double()
    normal = inside.abs() > 3 * 2**-10
    assert ((found[:-2] - inside).abs() <= error * inside.abs() * (1 + 1e-6))[normal].all()
    torch.testing.assert_close(found[-2:], torch.tensor([3.0, -3.0], dtype=torch.float64))
    assert cast(torch.tensor([math.nan]), scale, FORMATS[which]).float().isnan().all()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("product_dtype", ["fp8", "fp32"])
@pytest.mark.parametrize("counts", [[5, 0, 11], [0, 0, 0]])
def test_experts_and_their_gradients(keeps: bool, product_dtype: ProductDtype, counts: list[int]) -> None:
    where = place(delayed=True)
    set_scales(where, 100.0, 400.0, 3000.0)
    experts = Experts(32, 24, len(counts)).bfloat16()
    torch.nn.init.normal_(experts.down_proj)
    stack = Fp8Stack(experts, "down_proj", where, product_dtype=product_dtype)
    if keeps:
        stack.keep_weight()
    rows = torch.randn(sum(counts), 24, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn(sum(counts), 32, dtype=torch.bfloat16)
    output = stack(rows, counts, 0)
    output.backward(gradient)
    w = stands_for(experts.down_proj.detach(), WEIGHT, where.scale)
    assert experts.down_proj.grad is not None
    groups = zip(*(part.split(counts) for part in (rows.detach(), gradient, output.detach(), rows.grad)), strict=True)
    for number, (taken, given, made, back) in enumerate(groups):
        x, dy = stands_for(taken, INPUT, where.scale), stands_for(given, GRADIENT, where.scale)
        if len(x):
            assert_close(made, x @ w[number])
            assert_close(back, dy @ w[number].T)
        assert_close(experts.down_proj.grad[number], x.T @ dy)


def test_largest_values_of_several_passes_are_not_added_up() -> None:
    where = place(delayed=True)
    layer = Fp8Linear(Linear(16, 16).bfloat16(), where, product_dtype="fp32")
    for size in (2.0, 3.0, 1.0):
        hidden = torch.full((16, 16), size, dtype=torch.bfloat16, requires_grad=True)
        layer(hidden).backward(torch.full((16, 16), -size, dtype=torch.bfloat16))
    assert where.scales.amax[0].tolist() == [3.0, 0.0, 3.0]
    assert where.probe.grad is None


def test_a_gpu_without_fp8_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(EnvironmentProblem, match=r"A100 does not support FP8: its compute capability 8\.0") as raised:
        check_device(torch.device("cuda"))
    assert "--emulate-fp8" in raised.value.text()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    check_device(torch.device("cuda"))


@pytest.mark.gpu
def test_a_gpu_multiplies_as_the_cpu_does(needs: Callable[[str, bool, str], None]) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    torch.manual_seed(5)
    whole = Linear(96, 80).bfloat16()
    hidden, gradient = torch.randn(48, 96).bfloat16(), torch.randn(48, 80).bfloat16()
    found = []
    for device, product_dtype in ((torch.device("cpu"), "fp32"), (torch.device("cuda"), "fp8")):
        copy = Linear(96, 80).bfloat16().to(device)
        copy.load_state_dict(whole.state_dict())
        layer = Fp8Linear(copy, LayerScales(Scales(1, device, None, delayed=False), 0), product_dtype=product_dtype)
        rows = hidden.to(device, copy=True).requires_grad_()
        output = layer(rows)
        output.backward(gradient.to(device))
        found.append([tensor.detach().cpu() for tensor in (output, rows.grad, layer.weight.grad)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs.double())


@pytest.mark.parametrize("keeps", [True, False])
def test_a_frozen_layer_has_the_same_input_gradient_and_keeps_no_rows(keeps: bool) -> None:
    torch.manual_seed(3)
    whole = Linear(64, 48).bfloat16()
    rows = torch.randn(1, 32, 64, dtype=torch.bfloat16)
    gradients, kept = [], []
    for trained in (True, False):
        whole.weight.requires_grad_(trained)
        layer = Fp8Linear(whole, place(delayed=True), product_dtype="fp32")
        if keeps:
            layer.keep_weight()
        hidden = rows.clone().requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda t: t
        ):
            layer(hidden).sum().backward()
        gradients.append(hidden.grad)
        kept.append(sum(tensor.numel() == rows.numel() for tensor in saved))
    assert torch.equal(*gradients)
    assert whole.weight.grad is not None
    assert (kept[0] - kept[1]) == 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_input_that_is_cast_again_gives_the_same_bits_and_is_kept_once(compiled: bool) -> None:
    torch.manual_seed(3)
    whole = Linear(64, 48).bfloat16()
    rows = torch.randn(1, 32, 64, dtype=torch.bfloat16)
    found, kept = [], []
    for again in (True, False):
        where = place(delayed=True)
        set_scales(where, 3.0, 5.0, 7.0)
        layer = Fp8Linear(whole, where, product_dtype="fp32")
        layer.casts_again, whole.weight.grad = again, None
        hidden = rows.clone().requires_grad_()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda t: t
        ):
            output = (torch.compile(layer, backend="aot_eager") if compiled else layer)(hidden)
            output.sum().backward()
        found.append([output, hidden.grad, whole.weight.grad])
        kept.append([tensor.dtype for tensor in saved if tensor.numel() == rows.numel()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert kept[0] == [torch.bfloat16]
    assert compiled or kept[1] == [FORMATS[INPUT]]
