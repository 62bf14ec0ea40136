# SPDX-License-Identifier: Apache-2.0
"""Casts by Triton kernels against torch's, in Triton's interpreter; run by ``test_kernels_interpreted.py``."""

import math
from itertools import cycle, product

import pytest
import torch

from llmb.engine.kernels import elementwise, fp8_cast_triton
from llmb.engine.kernels.elementwise import activate, activate_backward, cast
from llmb.engine.kernels.fp8_cast_triton import MAX_STRIDE

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = [(1, 1), (1, 70), (131, 1), (128, 64), (2, 130, 70), (0, 8)]
WORST = [0.0, -math.inf, math.nan]
CASTS = [(*case, worst) for case, worst in zip(product(SHAPES, FORMATS), cycle(WORST), strict=False)]
ACTIVATIONS = [
    (*size, activation, worst)
    for (size, activation), worst in zip(
        product([(1, 1), (37, 70), (129, 64), (0, 8)], ["swiglu", "squared-relu"]), cycle(WORST), strict=False
    )
]
"""Rows, features, the activation, and the worst of the values."""
SCALE = torch.tensor(3.7)


@pytest.fixture(autouse=True)
def without_capture(monkeypatch):
    """The interpreter takes a kernel as it is."""
    monkeypatch.setattr(fp8_cast_triton, "wrap_triton", lambda kernel: kernel)


def random(*shape, seed=0):
    """Of all magnitudes, so that some are saturated, some subnormal and some zero after the cast."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 10 ** (8 * torch.rand(shape, generator=generator) - 6)).bfloat16()


def with_worst(values, worst):
    if values.numel():
        values.view(-1)[values.numel() // 2] = worst
    return values


def assert_both_ways(found, source, dtype, scale=SCALE):
    """What ``source`` is after its cast, to the bit."""
    values, transposed, amax = found
    expected = cast(source, scale, dtype).float()
    assert values.dtype is transposed.dtype is dtype
    assert values.is_contiguous()
    assert transposed.is_contiguous()
    torch.testing.assert_close(values.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(transposed.float(), expected.mT, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(amax, elementwise.largest_value(source), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("shape", "dtype", "worst"), CASTS)
def test_a_cast_is_that_of_torch(shape, dtype, worst):
    source = with_worst(random(*shape), worst)
    assert_both_ways(run(fp8_cast_triton.cast_both_ways, source, SCALE, dtype), source, dtype)


def test_what_is_cast_already_is_transposed_as_it_is():
    """Without NaN, which the interpreter reads as a number."""
    source = cast(with_worst(random(131, 70), -math.inf), SCALE, FORMATS[0])
    values, transposed, _ = run(fp8_cast_triton.cast_both_ways, source, torch.ones(()), FORMATS[0])
    torch.testing.assert_close(values.float(), source.float(), rtol=0, atol=0)
    torch.testing.assert_close(transposed.float(), source.mT.float(), rtol=0, atol=0)


def test_zeros_have_no_largest_value():
    *_, amax = run(fp8_cast_triton.cast_both_ways, torch.zeros(70, 70).bfloat16(), SCALE, FORMATS[0])
    assert amax == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_all_numbers_of_bf16(dtype):
    source = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    for scale in (torch.tensor(1.0), torch.tensor(2.0**-9), torch.tensor(1e30)):
        assert_both_ways(run(fp8_cast_triton.cast_both_ways, source, scale, dtype), source, dtype, scale)


def test_rows_apart_in_memory():
    """Of the source and of the results, beside which nothing is written."""
    source = random(33, 90)[:, 3:73]
    values, transposed = (torch.full(size, 5.0).to(FORMATS[0]) for size in ((33, 80), (70, 40)))
    amax = torch.tensor(123.0)
    fp8_cast_triton.cast_into(source, SCALE, values[:, 5:75], transposed[:, :33], amax.zero_())
    expected = cast(source, SCALE, FORMATS[0]).float()
    assert torch.equal(values[:, 5:75].float(), expected)
    assert torch.equal(transposed[:, :33].float(), expected.T)
    assert (values[:, :5].float() == 5).all()
    assert (values[:, 75:].float() == 5).all()
    assert (transposed[:, 33:].float() == 5).all()
    assert amax == source.abs().max()


def far_apart(rows, columns, dtype):
    """In more memory than 32 bits count, of which the system gives only what is used."""
    return torch.empty(rows, MAX_STRIDE, dtype=dtype)[:, :columns]


def test_more_elements_than_32_bits_count():
    """Of the source and the values, then of transposed values."""
    source, values = far_apart(130, 70, torch.bfloat16), far_apart(130, 70, FORMATS[0])
    source.copy_(random(130, 70))
    transposed, amax = torch.empty(70, 130, dtype=FORMATS[0]), torch.tensor(0.0)
    fp8_cast_triton.cast_into(source, SCALE, values, transposed, amax)
    assert_both_ways((values.contiguous(), transposed, amax), source.contiguous(), FORMATS[0])

    source, values, transposed = random(70, 130), transposed, far_apart(130, 70, FORMATS[0])
    fp8_cast_triton.cast_into(source, SCALE, values, transposed, amax.zero_())
    assert_both_ways((values, transposed.contiguous(), amax), source, FORMATS[0])


def test_rows_further_apart_than_a_tile_can_count_are_refused():
    source = torch.empty(2, 1, dtype=torch.bfloat16).as_strided((1, 1), (MAX_STRIDE + 1, 1))
    with pytest.raises(ValueError, match="rows 16777217 elements apart"):
        run(fp8_cast_triton.cast_both_ways, source, SCALE, FORMATS[0])


@pytest.mark.parametrize(("rows", "features", "activation", "worst"), ACTIVATIONS)
def test_an_activation_is_cast_as_if_it_were_stored(rows, features, activation, worst):
    source = with_worst(torch.randn(rows, 2 * features).bfloat16() * 3, worst)
    if activation == "squared-relu":
        source = source[:, features:]
    found = run(fp8_cast_triton.cast_activated, source, SCALE, activation, FORMATS[0])
    assert_close_both_ways(found, activate(source, activation), FORMATS[0], 2**-3)


@pytest.mark.parametrize(("rows", "features", "activation", "worst"), ACTIVATIONS)
def test_the_gradient_of_an_activation_is_cast_as_if_it_were_stored(rows, features, activation, worst):
    source = with_worst(torch.randn(rows, 2 * features).bfloat16() * 3, worst)
    gradient = torch.randn(rows, features).bfloat16()
    if activation == "squared-relu":
        source = source[:, features:]
    found = run(fp8_cast_triton.cast_activation_gradient, source, gradient, SCALE, activation, FORMATS[1])
    assert_close_both_ways(found, activate_backward(source, gradient, activation), FORMATS[1], 2**-2)


def assert_close_both_ways(found, stored, dtype, step):
    """Equal but for few values, by one number of the format: exponentials differ in their last bit."""
    values, transposed, amax = found
    expected = cast(stored, SCALE, dtype).float()
    torch.testing.assert_close(values.float(), expected, rtol=step, atol=2**-9, equal_nan=True)
    assert torch.equal(values.float().nan_to_num(7.0), transposed.mT.float().nan_to_num(7.0))
    differing = (values.float().nan_to_num(7.0) != expected.nan_to_num(7.0)).sum()
    assert differing <= max(1, 0.002 * expected.numel())
    torch.testing.assert_close(amax, elementwise.largest_value(stored), rtol=2**-7, atol=0, equal_nan=True)


def run(operation, *arguments):
    """The function of a ``triton_op``, without the dispatcher."""
    return operation._init_fn(*arguments)
