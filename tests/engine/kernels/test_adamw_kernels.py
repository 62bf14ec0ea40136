# SPDX-License-Identifier: Apache-2.0
"""The kernels of AdamW: their results, and what they need on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from triton_compiler import ENOUGH_IN_FLIGHT, compiling, resources
from triton_interpreter import run_cases

from llmb.engine.kernels.arguments import AdamWNumbers, Casts, OfParameter

CASES = Path(__file__).with_name("adamw_cases.py")
CAPABILITIES = [90, pytest.param(100, marks=pytest.mark.slow)]
"""Of Hopper and Blackwell."""
NUMBERS = AdamWNumbers(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
E4M3 = torch.float8_e4m3fn


@pytest.mark.gpu
def test_cases_on_a_gpu(needs: Callable[..., None]) -> None:
    needs("gpu", torch.cuda.is_available(), "no CUDA device is visible to torch")
    run_cases(CASES, interpreted=False)


def tensors(rows: int, columns: int) -> OfParameter:
    master, first, second = (torch.zeros(rows, columns) for _ in range(3))
    weight = torch.zeros(rows, columns, dtype=torch.bfloat16)
    return OfParameter(master, first, second, weight.clone(), weight)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_an_update_moves_16_bytes_at_a_time_and_exchanges_nothing(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    from llmb.engine.kernels import adamw_triton

    with compiling(monkeypatch, tmp_path, capability) as kernels:
        adamw_triton.update(tensors(64, 64), torch.ones(()), NUMBERS)
    (kernel,) = kernels
    needed = resources(kernel, tmp_path)
    assert needed.spilled == needed.shared == needed.conversions == 0
    assert needed.registers <= 64  # Then a multiprocessor holds four programs or more.
    assert needed.in_flight >= ENOUGH_IN_FLIGHT
    # The divisor; four values of bf16, and of fp32.
    assert sorted(needed.loads) == [4, 8, 16, 16, 16]
    assert sorted(needed.stores) == [8, 16, 16, 16]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_an_update_with_casts_exchanges_the_fp8_values_alone(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int
) -> None:
    from llmb.engine.kernels import adamw_triton

    values, transposed = (torch.zeros(size).to(E4M3) for size in ((64, 96), (96, 64)))
    with compiling(monkeypatch, tmp_path, capability) as kernels:
        casts = Casts(torch.ones(()), values, transposed, torch.zeros(()))
        adamw_triton.update_and_cast(tensors(64, 96), torch.ones(()), NUMBERS, casts)
    (kernel,) = kernels
    needed = resources(kernel, tmp_path)
    # What the interpreter does in any case: values are clamped with NaN kept, and rounded between two operations.
    assert "min.NaN" in kernel.asm["ptx"]
    assert "fma" not in kernel.asm["ptx"]
    assert needed.spilled == 0
    assert needed.conversions == 1
    assert needed.shared <= 2 * 32 * 32  # A byte for each value of a tile, or two, as the version of Triton has it.
    assert needed.registers <= 64
    assert needed.in_flight >= ENOUGH_IN_FLIGHT
    assert sorted(needed.loads) == [4, 4, 8, 16, 16, 16]
    assert sorted(needed.stores) == [4, 4, 8, 16, 16, 16]


def test_all_steps_and_layers_share_a_compiled_kernel(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step would otherwise wait for a compiler, perhaps on one rank alone."""
    from llmb.engine.kernels import adamw_triton

    values, numbers = torch.zeros(2, 64 * 96, dtype=torch.uint8).view(E4M3), torch.zeros(8)
    with compiling(monkeypatch, tmp_path, 90) as kernels:
        for step, (rows, columns) in enumerate([(64, 96), (96, 64), (32, 192)], 1):
            into = values[0].view(rows, columns), values[1].view(columns, rows)
            casts = Casts(numbers[step + 1], *into, numbers[step + 2])
            of_step = NUMBERS._replace(step=step, lr=1.0 / step)
            adamw_triton.update_and_cast(tensors(rows, columns), numbers[step], of_step, casts)
            adamw_triton.update(tensors(rows, columns), numbers[step], of_step)
    assert len(kernels) == 6
    assert len({id(kernel) for kernel in kernels}) == 2
