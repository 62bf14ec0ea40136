# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of norms against torch's code, in Triton's interpreter; run by ``test_interpreted.py``."""

import math

import pytest
import torch

from llmb.engine.kernels import fp8_cast_triton, norm, norm_triton
from llmb.engine.kernels.arguments import CastStatistics, NormOf
from llmb.engine.kernels.fp8_cast import cast_both_ways, normalize

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SCALE = torch.tensor(3.7)
SHAPES = [(1, 1, 1), (2, 17, 130), (1, 18, 1100), (1, 80, 70)]
"""Among them parts of a tile, more than one tile, and more groups of 16 rows than programs."""
PROGRAMS = 3
WORST = [((1, 1, 1), math.nan), ((2, 17, 130), -math.inf), ((2, 17, 130), math.nan)]
"""Shapes, and one value of a row in their middle."""
KINDS = ["bf16", "centered"]
"""A norm with a weight in bf16, and one that subtracts the mean, with weight and bias in fp32."""


@pytest.fixture(autouse=True)
def without_capture(monkeypatch):
    """The interpreter takes a kernel as it is, and there is no GPU to be asked."""
    for module in (fp8_cast_triton, norm_triton):
        monkeypatch.setattr(module, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(norm_triton, "_programs", lambda _device, groups: min(groups, PROGRAMS))
    for name in ("_normalize_and_cast", "_normalize_backward"):
        monkeypatch.setattr(norm_triton, name, getattr(norm_triton, name)._init_fn)


def norm_of(kind, columns):
    weight, bias = 1 + torch.randn(columns), torch.randn(columns)
    if kind == "centered":
        return NormOf(weight, bias, 1e-5)
    return NormOf(weight.bfloat16(), None, 1e-5)


def rows_of(shape, worst=0.0, seed=0):
    torch.manual_seed(seed)
    values = (torch.randn(shape) * 3).bfloat16()
    values.view(-1)[values.numel() // 2] = worst
    return values


def close(found, expected, rtol=2e-5, atol=1e-5):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, equal_nan=True)


def same(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def assert_casts(found, source, dtype):
    for ours, theirs in zip(found, cast_both_ways(source.flatten(0, -2), SCALE, dtype), strict=True):
        assert ours.is_contiguous()
        same(ours, theirs)


def rounded_alike(found, expected, share=0.01, rtol=2**-7):
    """But for few values, which are neighbors: sums in fp32 were in another order."""
    close(found.float(), expected.float(), rtol=rtol, atol=2**-8)
    differing = (found.nan_to_num(7.0) != expected.nan_to_num(7.0)).sum()
    assert differing <= max(2, share * expected.numel())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "worst"), [*((shape, 0.0) for shape in SHAPES), *WORST])
@pytest.mark.parametrize("adds", [False, True])
def test_rows_are_normalized_and_cast(shape, worst, kind, adds):
    hidden, update, of = rows_of(shape, worst), rows_of(shape, seed=1), norm_of(kind, shape[-1])
    found = norm_triton.normalize_and_cast(hidden, update if adds else None, of, SCALE, E4M3)
    expected = norm.normalize_and_cast(hidden, update if adds else None, of, SCALE, E4M3)
    assert (found.hidden is hidden) is not adds
    same(found.hidden, expected.hidden)
    close(found.factor, expected.factor)
    rows = (*shape[:-1], 1)
    mean = None
    if kind == "centered":
        finite = found.hidden.isfinite().all(-1).flatten()
        close(found.mean[finite], expected.mean[finite])
        mean = found.mean.view(rows)
    else:
        assert found.mean is None
    # To the bit what its own statistics give.
    statistics = CastStatistics(mean, found.factor.view(rows), of.weight, of.bias)
    assert_casts(found[3:], normalize(found.hidden, statistics), E4M3)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_normalized(kind):
    of = norm_of(kind, 600)
    found = norm_triton.normalize_and_cast(torch.zeros(1, 18, 600).bfloat16(), None, of, SCALE, E4M3)
    close(found.factor, torch.full((18,), 1e-5**-0.5))
    expected = torch.zeros(18, 600) if of.bias is None else of.bias.expand(18, 600)
    assert_casts(found[3:], expected.bfloat16(), E4M3)


def test_deviations_from_a_large_mean_are_kept():
    """In bf16, numbers around 1000 are multiples of 4; their squares are not told apart in fp32."""
    torch.manual_seed(0)
    hidden = (1000 + 4 * torch.randint(-1, 2, (1, 20, 4096))).bfloat16()
    found = norm_triton.normalize_and_cast(hidden, None, norm_of("centered", 4096), SCALE, E4M3)
    exact = hidden[0].double()
    close(found.mean, exact.mean(-1).float(), rtol=1e-7, atol=0)
    close(found.factor, exact.var(-1, correction=0).rsqrt().float(), rtol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "worst"), [*((shape, 0.0) for shape in SHAPES), *WORST])
@pytest.mark.parametrize("dtype", [None, E5M2])
def test_gradients_are_those_of_torch(shape, worst, kind, dtype):
    hidden, given, passed = rows_of(shape, worst), rows_of(shape, seed=1), rows_of(shape, seed=2)
    of = norm_of(kind, shape[-1])
    before = norm.normalize_and_cast(hidden, None, of, SCALE, E4M3)
    operands = given, passed, hidden, before.mean, before.factor, of.weight
    expected = norm.normalize_backward(*operands)
    if dtype is None:
        found = norm_triton.normalize_backward(*operands)
    else:
        found, casts = norm_triton.normalize_backward_and_cast(*operands, SCALE, dtype)
        assert_casts(casts, found.hidden, dtype)
    rounded_alike(found.hidden, expected.hidden)
    exact = gradient_of_weight(*operands)
    close(found.weight.double(), exact, rtol=1e-5, atol=2e-5)
    assert (found.bias is None) is (kind != "centered")
    if found.bias is not None:
        close(found.bias.double(), given.double().flatten(0, 1).sum(0), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_wide_rows_are_taken_fewer_at_a_time(rows, kind, monkeypatch):
    shape = (1, 9, 1100)
    monkeypatch.setattr(norm_triton, "GROUP", rows * shape[-1])
    assert norm_triton._rows_of_group(shape[-1]) == rows
    test_gradients_are_those_of_torch(shape, 0.0, kind, None)


def gradient_of_weight(given, _passed, hidden, mean, factor, _weight):
    rows = hidden.double().flatten(0, -2)
    centered = rows if mean is None else rows - mean.double()[:, None]
    return (given.double().flatten(0, -2) * centered * factor.double()[:, None]).sum(0)


def test_gradients_of_zeros_are_those_that_passed():
    hidden, passed = torch.zeros(1, 18, 600).bfloat16(), rows_of((1, 18, 600))
    found = norm_triton.normalize_backward(hidden, passed, hidden, None, torch.full((18,), 316.0), torch.ones(600))
    same(found.hidden, passed)
    assert not found.weight.any()


def test_gradients_may_be_strided():
    hidden, given, passed = rows_of((2, 9, 64)), rows_of((64, 9, 2), seed=1).transpose(0, 2), rows_of((1, 1, 64))
    operands = passed.expand(2, 9, 64), hidden, None, torch.rand(18) + 0.5, torch.ones(64)
    found, expected = (each(given, *operands) for each in (norm_triton.normalize_backward, norm.normalize_backward))
    rounded_alike(found.hidden, expected.hidden)
    close(found.weight, expected.weight)


def test_only_sums_of_the_weight_depend_on_the_number_of_programs(monkeypatch):
    hidden, given, passed = (rows_of((1, 100, 300), seed=seed) for seed in range(3))
    operands = given, passed, hidden, torch.zeros(100), torch.rand(100) + 0.5, torch.ones(300), SCALE, E5M2
    (first, casts), again = (norm_triton.normalize_backward_and_cast(*operands) for _ in range(2))
    same(first.weight, again[0].weight)
    for programs in (1, 2, 7):
        monkeypatch.setattr(norm_triton, "_programs", lambda _device, groups, most=programs: min(groups, most))
        found, cast_again = norm_triton.normalize_backward_and_cast(*operands)
        same(found.hidden, first.hidden)
        for ours, theirs in zip(cast_again, casts, strict=True):
            same(ours, theirs)
        close(found.weight, first.weight)
        close(found.bias, first.bias)


def test_no_rows():
    hidden, of = torch.zeros(0, 8).bfloat16(), norm_of("centered", 8)
    found = norm_triton.normalize_and_cast(hidden, hidden, of, SCALE, E4M3)
    assert found.values.shape == (0, 8)
    gradients, _ = norm_triton.normalize_backward_and_cast(
        hidden, hidden, hidden, found.mean, found.factor, of.weight, SCALE, E5M2
    )
    assert not gradients.weight.any()
    assert not gradients.bias.any()
