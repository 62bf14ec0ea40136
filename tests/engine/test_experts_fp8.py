# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8: what is copied, computed again, and computed at once.

See also ``test_fp8_layers_product.py``.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from llmb.engine.model.moe import Experts, Sent
from llmb.engine.precision import experts as expert_products
from llmb.engine.precision.apply import layers_of
from llmb.engine.precision.experts import fp8_stacks, fused_fp8_products
from llmb.engine.precision.scaling import LayerScales, Scales
from llmb.engine.transformations import _policy
from llmb.runs.attention_choice import ProductDtype

COUNTS = [[16, 0, 32], [5, 0, 11], [7, 8, 9]]


def experts_of(counts: list[int], dtype: ProductDtype = "fp32") -> tuple[Experts, Scales]:
    torch.manual_seed(0)
    experts = Experts(32, 48, len(counts)).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    block = torch.nn.ModuleList([experts])
    scales = Scales(2, torch.device("cpu"), None, delayed=True)  # type: ignore[arg-type]
    scales.scale.copy_(torch.tensor([[100.0, 200.0, 3000.0], [30.0, 150.0, 900.0]]))
    scales.use()
    for number, layer in enumerate(layers_of(block)):
        layer.replace(LayerScales(scales, number), dtype)
    return experts, scales


def passes(
    experts: Experts, scales: Scales, counts: list[int], run: Any = None, halves: list[list[int]] | None = None
) -> list[Tensor]:
    """The output, all gradients, and the largest values. halves: the rows of each expert in each half."""
    generator = torch.Generator().manual_seed(1)
    rows, gradient = (torch.randn(sum(counts), 32, generator=generator).bfloat16() for _ in range(2))
    rows.requires_grad_()
    sizes = halves or [counts]
    order = torch.cat([part for half in split_by(rows, counts, sizes) for part in half])
    parts = zip(order.split([sum(half) for half in sizes]), sizes, strict=True)
    outputs = (run or experts)([Sent(part, torch.tensor(half), None) for part, half in parts])
    output = torch.cat(outputs)
    output.backward(torch.cat([part for half in split_by(gradient, counts, sizes) for part in half]))
    assert rows.grad is not None
    return [output, rows.grad, *(parameter.grad for parameter in experts.parameters()), scales.amax]  # type: ignore[list-item]


def split_by(rows: Tensor, counts: list[int], halves: list[list[int]]) -> list[list[Tensor]]:
    """The rows of each expert, by half."""
    by_expert = [each.split(sizes) for each, sizes in zip(rows.split(counts), zip(*halves, strict=True), strict=True)]
    return [[parts[half] for parts in by_expert] for half in range(len(halves))]


@pytest.mark.parametrize("fused", [True, False])
def test_halves_have_the_gradients_and_the_largest_values_of_the_whole(fused: bool) -> None:
    counts, halves = COUNTS[2], [[4, 1, 7], [3, 7, 2]]
    found = []
    for parts in (None, halves):
        experts, scales = experts_of(counts)
        if fused:
            experts.products = fused_fp8_products
        found.append(passes(experts, scales, counts, halves=parts))
    (_, by_rows, *whole, amax), (_, by_halves, *summed, largest) = found
    assert torch.equal(largest, amax)
    assert (amax[:, [0, 2]] > 0).all()
    assert torch.equal(by_halves, by_rows)
    for one, other in zip(summed, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("keeps", [True, False])
def test_casts_with_activations_give_the_same_bits_as_casts_after_them(counts: list[int], keeps: bool) -> None:
    found = []
    for fused in (True, False):
        experts, scales = experts_of(counts)
        if fused:
            experts.products = fused_fp8_products
        for stack in fp8_stacks(experts) if keeps else ():
            stack.keep_weight()
        found.append(passes(experts, scales, counts))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert (found[0][-1][:, [0, 2]] > 0).all()


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def in_fp8(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("counts", COUNTS)
def test_gradients_of_weights_copy_rows_only_where_they_are_not_aligned(counts: list[int]) -> None:
    """The transposed rows of an expert are columns of a larger matrix."""
    torch.manual_seed(0)
    rows, gradients, one = in_fp8(32, sum(counts)), in_fp8(48, sum(counts)), torch.ones(())
    with Calls() as calls:
        found = expert_products.expert_weight_gradients._init_fn(rows, one, gradients, one, counts, "fp8")
    parts = zip(rows.float().split(counts, 1), gradients.float().split(counts, 1), strict=True)
    expected = torch.stack([left @ right.T for left, right in parts])
    torch.testing.assert_close(found, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    aligned = sum(count > 0 for count in counts) if counts == COUNTS[0] else 0
    assert calls.names.count("aten._scaled_mm.out") == aligned
    assert ("aten.clone.default" in calls.names) == (aligned == 0)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A word for each product of an expert."""
    made: list[str] = []
    multiply = expert_products._multiply_into

    def counted(*arguments: Any, **options: Any) -> None:
        made.append("product")
        multiply(*arguments, **options)

    monkeypatch.setattr(expert_products, "_multiply_into", counted)
    return made


def test_selective_recomputation_keeps_products_of_experts(products: list[str]) -> None:
    counts = COUNTS[1]
    plain = passes(*experts_of(counts), counts)
    once = len(products)
    assert once == 3 * 3 * 2  # experts x products of a layer x layers
    experts, scales = experts_of(counts)
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    run = partial(checkpoint, experts, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    again = passes(experts, scales, counts, run)
    assert len(products) == 2 * once
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


def test_operands_of_a_grouped_product_are_those_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own checks of shapes, with the reference in place of the kernel."""
    kernel = torch._scaled_grouped_mm

    def checked(rows: Tensor, matrices: Tensor, *scales: Tensor, offs: Tensor, **options: Any) -> Tensor:
        of_meta = [each.to("meta") for each in (rows, matrices, *scales)]
        assert kernel(*of_meta, offs=offs.to("meta"), **options).shape == (len(rows), matrices.shape[-1])
        groups = torch.tensor_split(rows.float() * scales[0][:, None], offs[:-1].long())
        products = [one @ (two.float() * scale) for one, two, scale in zip(groups, matrices, scales[1], strict=True)]
        return torch.cat(products).bfloat16()

    monkeypatch.setattr(torch, "_scaled_grouped_mm", checked)
    monkeypatch.setattr(expert_products, "supports_grouped", lambda rows, _: rows.dtype == torch.float8_e4m3fn)
    found = []
    for groups in (False, True):
        experts, scales = experts_of([16, 0, 32])
        for stack in fp8_stacks(experts):
            stack.groups = groups
        found.append(passes(experts, scales, [16, 0, 32]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("other", "scales", "result"),
    [((2, 64, 16), [(32,), (2, 16)], (32, 16)), ((64, 16), [(2 * 32,), (2 * 16,)], (2, 32, 16))],
    ids=["of inputs", "of weights"],
)
def test_torch_has_no_grouped_product_for_gradients(
    other: tuple[int, ...], scales: list[tuple[int, ...]], result: tuple[int, ...]
) -> None:
    """Gradients are in e5m2. If this fails, the backward pass of ``--group-experts`` can be grouped, too."""
    with torch.device("meta"):
        gradients, matrices = torch.empty(32, 64), torch.empty(other).to(torch.float8_e4m3fn).mT.contiguous().mT
        operands = matrices, *map(torch.empty, scales), torch.empty(2, dtype=torch.int32)
    assert torch._scaled_grouped_mm(gradients.to(torch.float8_e4m3fn), *operands).shape == result
    with pytest.raises(RuntimeError, match="E4M3"):
        torch._scaled_grouped_mm(gradients.to(torch.float8_e5m2), *operands)
    assert not expert_products.supports_grouped(gradients.to(torch.float8_e5m2), matrices)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[160, 0, 33, 7], [1, 2, 3, 4]])
def test_a_grouped_product_is_that_of_each_expert(counts: list[int], needs: Callable[..., None]) -> None:
    able = torch.cuda.is_available() and torch.cuda.get_device_capability() == expert_products.GROUPED_CAPABILITY
    needs("gpu", able, "a GPU of compute capability 9.0")
    generator = torch.Generator("cuda").manual_seed(0)
    rows, matrices = (
        torch.randn(shape, generator=generator, device="cuda").to(torch.float8_e4m3fn)
        for shape in ((sum(counts), 256), (len(counts), 512, 256))
    )
    scales = [torch.tensor(value, device="cuda") for value in (0.5, 0.01)]
    one, other = (
        expert_products.expert_products(rows, scales[0], matrices, scales[1], counts, True, "fp8", grouped)
        for grouped in (True, False)
    )
    torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)
