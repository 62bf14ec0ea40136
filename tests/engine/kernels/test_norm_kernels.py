# SPDX-License-Identifier: Apache-2.0
"""The kernels of norms: their results, and what they need on a GPU."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton_compiler import ENOUGH_IN_FLIGHT, compiling, resources

from llmb.engine.kernels import norm
from llmb.engine.kernels.arguments import NormOf

INTERPRETED = Path(__file__).with_name("interpreted_norm.py")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Needs(NamedTuple):
    """registers: of a thread, at most; with 128, a multiprocessor holds the one program of 512 threads that it gets.

    shared: bytes at most, so that most of a multiprocessor's memory caches rows. loads, stores: how many of 16 bytes;
    the others are sums of columns and statistics of rows, 4 bytes each.
    """

    registers: int
    shared: int
    loads: int
    stores: int
    in_flight: int = ENOUGH_IN_FLIGHT


PLAIN, CENTERED = (torch.ones(512).bfloat16(), None), (torch.ones(512), torch.ones(512))
HIDDEN, FACTOR, SCALE = torch.zeros(4, 64, 512).bfloat16(), torch.ones(256), torch.ones(())
WIDE, WIDE_CENTERED = torch.zeros(64, 18432).bfloat16(), (torch.ones(18432), torch.ones(18432))
# A tile has 16 elements for each thread: two loads or stores of 16 bytes in bf16, four loads in fp32, one store in FP8.
# Where the mean is not subtracted, tiles of the first loop forward are twice as wide.
CASES: dict[str, tuple[Callable[[], None], Needs]] = {
    "forward": (lambda: normalize(None, *PLAIN), Needs(128, 16384, 4 + 2 * 2, 2, 32768)),
    "forward of a sum": (lambda: normalize(HIDDEN, *PLAIN), Needs(128, 16384, 2 * 4 + 2 * 2, 4 + 2)),
    "forward of a sum, centered": (lambda: normalize(HIDDEN, *CENTERED), Needs(128, 16384, 2 * 3 + 4 * 2, 2 + 2)),
    "backward": (lambda: differentiate(*PLAIN, None), Needs(128, 16384, 2 * 7, 2)),
    "backward, centered": (lambda: differentiate(*CENTERED, None), Needs(128, 16384, 2 * 5 + 4 * 2, 2)),
    "backward of wide rows, centered": (
        lambda: differentiate(*WIDE_CENTERED, None, WIDE, FACTOR[:64]),
        Needs(128, 16384, 2 * 5 + 6 * 2, 2 + 2 * 2),
    ),
    "backward and cast": (lambda: differentiate(*PLAIN, SCALE), Needs(128, 32768, 2 * 7, 2 + 2)),
    "backward and cast, centered": (
        lambda: differentiate(*CENTERED, SCALE),
        Needs(128, 32768, 2 * 5 + 4 * 2, 2 + 2),
    ),
}
QUICK = [("forward of a sum, centered", 90), ("backward and cast", 100)]


def normalize(update: Tensor | None, weight: Tensor, bias: Tensor | None) -> None:
    from llmb.engine.kernels import norm_triton

    norm_triton._normalize_and_cast._init_fn(HIDDEN, update, weight, bias, 1e-5, SCALE, E4M3)


def differentiate(
    weight: Tensor, bias: Tensor | None, scale: Tensor | None, hidden: Tensor = HIDDEN, factor: Tensor = FACTOR
) -> None:
    from llmb.engine.kernels import norm_triton

    mean = None if bias is None else factor
    norm_triton._normalize_backward._init_fn(hidden, hidden, hidden, mean, factor, weight, scale, E5M2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param(name, capability, marks=() if (name, capability) in QUICK else pytest.mark.measured)
        for name in CASES
        for capability in (90, 100)
    ],
)
def test_compiled_for_a_gpu_kernels_read_and_write_16_bytes_at_a_time(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str, capability: int
) -> None:
    from llmb.engine.kernels import norm_triton

    monkeypatch.setattr(norm_triton, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(norm_triton, "_programs", lambda _device, groups: groups)
    launch, bounds = CASES[case]
    with compiling(monkeypatch, tmp_path, capability) as kernels:
        launch()
    (kernel,) = kernels
    assert not re.search(r"arith\.muli .*: tensor<\S*xi32>", kernel.asm["ttir"]), "an offset of 32 bits"
    needed = resources(kernel, tmp_path)
    assert needed.spilled == 0
    assert needed.registers <= bounds.registers
    assert needed.in_flight >= bounds.in_flight
    assert needed.shared <= bounds.shared
    assert Counter(needed.loads)[16] == bounds.loads
    assert Counter(needed.stores)[16] == bounds.stores
    assert {*needed.loads, *needed.stores} <= {4, 8, 16}


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("shape", [(1, 129, 70), (2, 600, 4096), (1, 3000, 6144), (1, 70, 18432)])
def test_a_gpu_normalizes_as_the_cpu_does(
    needs: Callable[[str, bool, str], None], shape: tuple[int, ...], centered: bool, compiled: bool
) -> None:
    """By the kernels themselves, whether the cache holds their rows or not."""
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    from llmb.engine.kernels import norm_triton

    torch.compiler.reset()
    torch.manual_seed(2)
    hidden, update, given, passed = (torch.randn(shape).bfloat16() for _ in range(4))
    weight, bias = torch.rand(shape[-1]) + 0.5, torch.randn(shape[-1])
    plain = NormOf(weight, bias if centered else None, 1e-5)
    names = "normalize_and_cast", "normalize_backward", "normalize_backward_and_cast"
    functions: list[Callable[..., Any]] = [getattr(norm_triton, name) for name in names]
    forward, backward, cast_backward = (torch.compile(each, fullgraph=True) if compiled else each for each in functions)
    on_gpu = NormOf(weight.cuda(), bias.cuda() if centered else None, 1e-5)
    found = forward(hidden.cuda(), update.cuda(), on_gpu, SCALE.cuda(), E4M3)
    expected = norm.normalize_and_cast(hidden, update, plain, SCALE, E4M3)
    assert_nearly(found, expected)
    operands = given, passed, expected.hidden, expected.mean, expected.factor, weight
    moved = [each if each is None else each.cuda() for each in operands]
    differentiated = norm.normalize_backward_and_cast(*operands, SCALE, E5M2)
    assert_nearly(backward(*moved), differentiated[0])
    gradients, casts = cast_backward(*moved, SCALE.cuda(), E5M2)
    assert_nearly(gradients, differentiated[0])
    assert_nearly(casts, differentiated[1])
    again, _ = cast_backward(*moved, SCALE.cuda(), E5M2)
    assert torch.equal(gradients.weight, again.weight)


def assert_nearly(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """fp32 as sums in another order, others but for few values to the bit."""
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
        elif theirs.dtype is torch.float32:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=2**-7, atol=1e-3)
        else:
            assert (ours.cpu().float() != theirs.float()).float().mean() <= 0.005


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(needs: Callable[[str, bool, str], None]) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
    needs("gpu", torch.cuda.get_device_properties(0).total_memory > 40e9, "40 GB of GPU memory")
    from llmb.engine.kernels import norm_triton

    hidden = torch.ones(2**17 + 1, 2**14, dtype=torch.bfloat16, device="cuda")
    weight, scale = torch.ones(2**14, device="cuda"), SCALE.cuda()
    found = norm_triton.normalize_and_cast(hidden, None, NormOf(weight, None, 0.0), scale, E4M3)
    assert found.values[-1, -1].float() == found.transposed[-1, -1].float() == found.amax == 1
    assert (found.transposed[-1].float() == 1).all()
    del found
    factor = torch.ones(len(hidden), device="cuda")
    gradients, casts = norm_triton.normalize_backward_and_cast(
        hidden, hidden, hidden, None, factor, weight, scale, E5M2
    )
    # What a row of ones gives through its norm is along the row.
    assert (gradients.hidden[-1] == 1).all()
    assert (casts[1][-1].float() == 1).all()
