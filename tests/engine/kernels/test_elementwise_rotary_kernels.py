# SPDX-License-Identifier: Apache-2.0
"""Rotation back, in the cast of a product's gradient: torch code, and the kernel compiled and on a GPU."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from triton_compiler import ENOUGH_IN_FLIGHT, compiling, resources

from llmb.engine.kernels.elementwise import Heads, Rotation, cast_both_ways, cast_rotated_gradient, factors_of, rotate

E5M2 = torch.float8_e5m2
BATCH, SEQ, HEAD = 2, 24, 16
NUMBERS = (4, 2, 2)


PROXIES = {
    "llama3.1": (128, 64, (32, 8, 8), False),
    "nemotron4 15b": (128, 32, (48, 8, 8), False),
    "340b": (192, 48, (96, 8, 8), False),
    "maverick": (128, 64, (40, 8, 8), True),
}
"""head_dim, pairs, heads, and whether pairs are interleaved."""
QUICK = (("llama3.1", 90), ("340b", 100), ("maverick", 100))
"""All of a head that is a power of two, a part of another one, and pairs side by side."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proxy", "capability"),
    [
        pytest.param(proxy, capability, marks=() if (proxy, capability) in QUICK else pytest.mark.measured)
        for proxy in PROXIES
        for capability in (90, 100)
    ],
)
def test_compiled_for_a_gpu_the_kernel_reads_and_writes_16_bytes_at_a_time(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, proxy: str, capability: int
) -> None:
    """In both layouts; with one more read, of the scale, and no more in shared memory than a tile in transposition."""
    from llmb.engine.kernels import rotary_triton

    monkeypatch.setattr(rotary_triton, "wrap_triton", lambda kernel: kernel)
    head_dim, pairs, numbers, interleaved = PROXIES[proxy]
    parts = [torch.zeros(2, 128, number, head_dim).bfloat16() for number in numbers]
    rotation = Rotation(torch.zeros(128, pairs), torch.zeros(128, pairs), interleaved)
    with compiling(monkeypatch, tmp_path, capability) as kernels:
        rotary_triton.cast_rotated_gradient._init_fn(*parts, *rotation, torch.ones(()), E5M2)
    (kernel,) = kernels
    gradient = resources(kernel, tmp_path)
    assert set(gradient.stores) == {16}
    assert sorted(set(gradient.loads)) == [4, 16]
    assert gradient.loads.count(4) == 1
    assert gradient.spilled == 0
    assert gradient.registers <= 128  # Then a multiprocessor holds two programs or more.
    assert gradient.in_flight >= ENOUGH_IN_FLIGHT
    assert gradient.shared <= 8192


def test_strides_may_have_more_than_32_bits(triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some of them, and others not: of queries, which have more heads than keys."""
    from llmb.engine.kernels import rotary_triton

    monkeypatch.setattr(rotary_triton, "wrap_triton", lambda kernel: kernel)
    parts = [torch.zeros(1, 64, number, 64).bfloat16() for number in NUMBERS]
    parts[0] = parts[0].as_strided(parts[0].shape, (2**31, *parts[0].stride()[1:]))
    rotation = Rotation(torch.zeros(64, 32), torch.zeros(64, 32), interleaved=False)
    with compiling(monkeypatch, tmp_path, 90) as kernels:
        rotary_triton.cast_rotated_gradient._init_fn(*parts, *rotation, torch.ones(()), E5M2)
    (kernel,) = kernels
    assert not re.search(r"arith\.muli .*: tensor<\S*xi32>", kernel.asm["ttir"]), "an offset of 32 bits"


def random_heads() -> list[Tensor]:
    return [torch.randn(BATCH, SEQ, number, HEAD).bfloat16() for number in NUMBERS]


def tables(pairs: int, *, by_sequence: bool, seq: int = SEQ) -> tuple[Tensor, Tensor]:
    angles = torch.randn(*((BATCH,) if by_sequence else ()), seq, pairs)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize("pairs", [4, 8])
def test_what_is_rotated_and_cast_is_what_autograd_would_store(
    pairs: int, by_sequence: bool, interleaved: bool
) -> None:
    torch.manual_seed(2)
    cos, sin = tables(pairs, by_sequence=by_sequence)
    product = torch.cat(random_heads(), -2).flatten(2).flatten(0, 1).requires_grad_()
    query, key, value = product.view(BATCH, SEQ, -1, HEAD).split(NUMBERS, -2)
    rotation = Rotation(cos, sin, interleaved)
    rotated = [rotate(part, factors_of(rotation)) for part in (query, key)]
    gradients = random_heads()
    torch.autograd.backward([*rotated, value], gradients)
    found = cast_rotated_gradient(Heads(*gradients), rotation, torch.tensor(3.7), E5M2)
    for ours, theirs in zip(found, cast_both_ways(product.grad, torch.tensor(3.7), E5M2), strict=True):
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("proxy", PROXIES)
def test_a_gpu_rotates_as_the_cpu_does(needs: Callable[[str, bool, str], None], proxy: str, compiled: bool) -> None:
    """But for few values: a GPU multiplies and adds with one rounding."""
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    torch.compiler.reset()
    torch.manual_seed(2)
    head_dim, pairs, numbers, interleaved = PROXIES[proxy]
    rotation = Rotation(*tables(pairs, by_sequence=False, seq=130), interleaved)
    there = Rotation(rotation.cos.cuda(), rotation.sin.cuda(), interleaved)
    scale = torch.tensor(3.7)
    parts = Heads(*(torch.randn(BATCH, number, 130, head_dim).bfloat16().transpose(1, 2) for number in numbers))
    backward = torch.compile(cast_rotated_gradient) if compiled else cast_rotated_gradient
    on_gpu = Heads(*(part.cuda() for part in parts))
    found = backward(on_gpu, there, scale.cuda(), E5M2)
    expected = cast_rotated_gradient(parts, rotation, scale, E5M2)
    for mine, other in zip(found[:2], expected[:2], strict=True):
        assert (mine.cpu().float() != other.float()).float().mean() <= 0.002
        torch.testing.assert_close(mine.cpu().float(), other.float(), rtol=2**-2, atol=2**-9)
    torch.testing.assert_close(found[2].cpu(), expected[2], rtol=2**-7, atol=0)
    assert torch.equal(found[0].float().t(), found[1].float())
