# SPDX-License-Identifier: Apache-2.0
"""Norms with additions and casts: the torch code, which is the reference of the kernels, against autograd."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from llmb.engine.kernels import norm as kernels
from llmb.engine.kernels.arguments import NormOf
from llmb.engine.kernels.fp8_cast import cast_both_ways
from llmb.engine.kernels.norm import fits, normalize_and_cast, normalize_backward, normalize_backward_and_cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = torch.tensor(3.7)
MEGABYTE = 2**20


def apply(norm: NormOf, hidden: Tensor) -> Tensor:
    if norm.bias is None:
        return functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.eps)
    return functional.layer_norm(hidden.float(), norm.weight.shape, norm.weight, norm.bias, norm.eps).to(hidden.dtype)


def norm_of(centered: bool, dtype: torch.dtype, columns: int) -> NormOf:
    weight = 1 + 0.3 * torch.randn(columns)
    if centered:
        return NormOf(weight.requires_grad_(), torch.randn(columns).requires_grad_(), 1e-5)
    return NormOf(weight.to(dtype).requires_grad_(), None, 1e-5)


def assert_cast(found: tuple[Tensor, ...], source: Tensor, dtype: torch.dtype) -> None:
    for ours, theirs in zip(found, cast_both_ways(source.flatten(0, -2), SCALE, dtype), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(2, 64, 128), (1, 17, 70), (1, 1, 1)])
@pytest.mark.parametrize("worst", [0.0, torch.inf, torch.nan])
def test_they_are_what_autograd_computes(
    dtype: torch.dtype, weights: torch.dtype, centered: bool, shape: tuple[int, ...], worst: float
) -> None:
    """In bf16 to the bit. In fp32 autograd adds the three parts of the gradient in another order."""
    torch.manual_seed(5)
    norm = norm_of(centered, weights, shape[-1])
    hidden, update, given, passed = (torch.randn(shape).to(dtype) * scale for scale in (3, 1, 1, 2))
    hidden.view(-1)[hidden.numel() // 2] = worst
    total = (hidden + update).requires_grad_()
    result = apply(norm, total)
    torch.autograd.backward([result, total], [given, passed])
    plain = norm._replace(weight=norm.weight.detach(), bias=None if norm.bias is None else norm.bias.detach())
    found = normalize_and_cast(hidden, update, plain, SCALE, E4M3)
    assert (found.mean is not None) is centered
    assert_same(found.hidden, total.detach())
    assert_cast((found.values, found.transposed, found.amax), result.detach(), E4M3)
    operands = given, passed, found.hidden, found.mean, found.factor, plain.weight
    gradients, casts = normalize_backward_and_cast(*operands, SCALE, E5M2)
    for one in (gradients, normalize_backward(*operands)):
        rounding = 1e-5 if dtype is torch.float32 else 0.0
        torch.testing.assert_close(one.hidden, total.grad, rtol=rounding, atol=rounding, equal_nan=True)
        assert_same(one.weight.to(norm.weight.dtype), norm.weight.grad)
        assert one.weight.dtype is torch.float32
        if norm.bias is not None:
            assert_same(one.bias, norm.bias.grad)
    assert_cast(casts, gradients.hidden, E5M2)


def assert_same(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_nothing_added_is_nothing_copied() -> None:
    hidden = torch.randn(2, 3, 8).bfloat16()
    assert normalize_and_cast(hidden, None, NormOf(torch.ones(8), None, 1e-5), SCALE, E4M3).hidden is hidden


@pytest.mark.parametrize("centered", [False, True])
def test_where_the_cache_does_not_hold_rows_statistics_come_first(
    centered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of GPUs, with the torch code of casts: nearly the same, as it rounds fp32 elsewhere."""
    torch.manual_seed(5)
    with torch.no_grad():
        norm, (hidden, update) = norm_of(centered, torch.float32, 64), torch.randn(2, 2, 9, 64).bfloat16()
        expected = normalize_and_cast(hidden, update, norm, SCALE, E4M3)
        monkeypatch.setattr(kernels, "has_kernel", lambda _tensor, _module: True)
        monkeypatch.setattr(kernels, "holds_rows", lambda _device, columns, tensors: (columns, tensors) != (64, 1))
        found = normalize_and_cast(hidden, update, norm, SCALE, E4M3)
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        else:
            torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize(
    ("cache", "multiprocessors", "columns", "tensors"),
    [(50, 132, 8192, 1), (60, 132, 4096, 2), (126, 148, 16384, 1), (126, 148, 8192, 2)],
)
def test_the_cache_of_a_gpu_holds_so_many_columns(cache: int, multiprocessors: int, columns: int, tensors: int) -> None:
    """H100, H200 and B200: what fits in it, and what with twice as many columns or tensors does not."""
    assert fits(cache * MEGABYTE, multiprocessors, columns, tensors)
    assert not fits(cache * MEGABYTE, multiprocessors, 2 * columns, tensors)
    assert not fits(cache * MEGABYTE, multiprocessors, columns, 2 * tensors)
