# SPDX-License-Identifier: Apache-2.0
"""Casts that write both layouts at once: the torch code here, the kernels in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from triton_compiler import ENOUGH_IN_FLIGHT, compiling, resources

from llmb.engine.kernels import elementwise
from llmb.engine.kernels.elementwise import (
    Activation,
    activate,
    activate_backward,
    cast,
    cast_activated,
    cast_activation_gradient,
    cast_both_ways,
    cast_into,
    largest_value,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS: list[Activation] = ["swiglu", "squared-relu"]


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("operation", "inputs", "registers"),
    # Then a multiprocessor holds five programs of 256 threads or more, and three.
    [
        ("cast_both_ways", 1, 48),
        pytest.param("cast_activated", 2, 48, marks=pytest.mark.slow),
        pytest.param("cast_activation_gradient", 3, 80, marks=pytest.mark.slow),
    ],
)
def test_compiled_for_a_gpu_kernels_read_and_write_16_bytes_at_a_time(
    triton: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    operation: str,
    inputs: int,
    registers: int,
    capability: int,
) -> None:
    """In both layouts; with one more read, of the scale, and nothing in memory beside a tile in transposition."""
    from llmb.engine.kernels import fp8_cast_triton

    monkeypatch.setattr(fp8_cast_triton, "wrap_triton", lambda kernel: kernel)
    gate_up, scale = torch.zeros(256, 512).bfloat16(), torch.ones(())
    arguments = {
        "cast_both_ways": (gate_up, scale, E4M3),
        "cast_activated": (gate_up, scale, "swiglu", E4M3),
        "cast_activation_gradient": (gate_up, gate_up[:, :256].contiguous(), scale, "swiglu", E5M2),
    }
    with compiling(monkeypatch, tmp_path, capability) as kernels:
        getattr(fp8_cast_triton, operation)._init_fn(*arguments[operation])
    (kernel,) = kernels
    needed = resources(kernel, tmp_path)
    assert "NaN" in kernel.asm["ptx"]
    assert needed.spilled == 0
    assert needed.registers <= registers
    assert needed.in_flight >= ENOUGH_IN_FLIGHT
    assert sorted(needed.loads) == [4, *[16] * (2 * inputs)]
    assert set(needed.stores) == {16}


@pytest.mark.slow
def test_no_value_is_lost_of_any_number_of_rows(triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from llmb.engine.kernels import fp8_cast_triton

    monkeypatch.setattr(fp8_cast_triton, "wrap_triton", lambda kernel: kernel)
    inputs, scale = torch.zeros(300, 512).bfloat16(), torch.ones(())
    with compiling(monkeypatch, tmp_path, 90) as kernels:
        for dtype in (E4M3, E5M2):
            fp8_cast_triton.cast_both_ways._init_fn(inputs, scale, dtype)
            for activation in ACTIVATIONS:
                fp8_cast_triton.cast_activated._init_fn(inputs, scale, activation, dtype)
    assert len(kernels) == 6
    for kernel in kernels:
        resources(kernel, tmp_path)
    monkeypatch.setattr(elementwise, "has_kernel", lambda *_: True)
    monkeypatch.setattr(fp8_cast_triton, "cast_both_ways", lambda *_: "cast apart")
    # The kernel of the gradient would lose some of these.
    assert elementwise.cast_activation_gradient(inputs, inputs, scale, "squared-relu", E5M2) == "cast apart"


def test_a_cast_into_given_memory_leaves_nothing_behind(
    triton: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the compiler captures is kept for good: in each step of each layer it would fill the host's memory."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    from llmb.engine.kernels import fp8_cast_triton

    def kept() -> tuple[int, int]:
        return len(kernel_side_table.id_to_kernel), len(kernel_side_table.constant_args)

    values, transposed = (torch.zeros(size).to(E4M3) for size in ((64, 96), (96, 64)))
    before = kept()
    with compiling(monkeypatch, tmp_path, 90) as kernels:
        fp8_cast_triton.cast_into(torch.zeros(64, 96).bfloat16(), torch.ones(()), values, transposed, torch.zeros(()))
    assert len(kernels) == 1
    assert kept() == before


def module_output(inputs: torch.Tensor, activation: Activation) -> torch.Tensor:
    if activation == "squared-relu":
        return functional.relu(inputs).square()
    gate, up = inputs.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_activations_are_those_of_autograd(activation: Activation) -> None:
    torch.manual_seed(2)
    inputs = (torch.randn(40, 96) * 3).bfloat16().requires_grad_()
    output = module_output(inputs, activation)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    assert torch.equal(activate(inputs.detach(), activation), output.detach())
    assert torch.equal(activate_backward(inputs.detach(), gradient, activation), inputs.grad)


def test_the_parts_of_a_joined_matrix_are_cast_in_place() -> None:
    torch.manual_seed(2)
    scale, amax = torch.tensor(20.0), torch.tensor(5.0)
    parts = [torch.randn(rows, 24).bfloat16() for rows in (16, 8)]
    values, transposed = torch.empty(24, 24, dtype=E4M3), torch.empty(24, 24, dtype=E4M3)
    for part, rows in zip(parts, (slice(0, 16), slice(16, 24)), strict=True):
        cast_into(part, scale, values[rows], transposed[:, rows], amax)
        assert amax == part.abs().max()
    whole = cast(torch.cat(parts), scale, E4M3)
    assert torch.equal(values.float(), whole.float())
    assert torch.equal(transposed.float(), whole.t().float())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(129, 65), (512, 1024), (3, 130, 70)])
def test_a_gpu_casts_as_the_cpu_does(
    needs: Callable[[str, bool, str], None], shape: tuple[int, ...], compiled: bool
) -> None:
    needs_fp8(needs)
    torch.compiler.reset()
    torch.manual_seed(2)
    source, scale = torch.randn(shape).bfloat16() * 100, torch.tensor(3.7)
    source.view(-1)[7] = torch.nan
    for dtype in (E4M3, E5M2):
        cast_on_gpu = torch.compile(cast_both_ways) if compiled else cast_both_ways
        found = cast_on_gpu(source.cuda(), scale.cuda(), dtype)
        for ours, theirs in zip(found, cast_both_ways(source, scale, dtype), strict=True):
            torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "compiled"), [(304, False), (304, True), (300, False)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gpu_activates_as_the_cpu_does(
    needs: Callable[[str, bool, str], None], activation: Activation, rows: int, compiled: bool
) -> None:
    needs_fp8(needs)
    torch.compiler.reset()
    torch.manual_seed(2)
    inputs, scale = torch.randn(rows, 512).bfloat16(), torch.tensor(3.7)
    gradient = torch.randn_like(activate(inputs, activation))
    forward, backward = (
        (torch.compile(each) if compiled else each) for each in (cast_activated, cast_activation_gradient)
    )
    cases = [
        (forward(inputs.cuda(), scale.cuda(), activation, E4M3), cast_activated(inputs, scale, activation, E4M3)),
        (
            backward(inputs.cuda(), gradient.cuda(), scale.cuda(), activation, E5M2),
            cast_activation_gradient(inputs, gradient, scale, activation, E5M2),
        ),
    ]
    for found, expected in cases:
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            differing = (ours.cpu().float() != theirs.float()).float().mean()
            assert differing <= 0.002
        torch.testing.assert_close(found[0].cpu().float(), expected[0].float(), rtol=2**-2, atol=2**-9)
        torch.testing.assert_close(found[2].cpu(), expected[2], rtol=2**-7, atol=0)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(needs: Callable[[str, bool, str], None]) -> None:
    needs_fp8(needs)
    memory = torch.cuda.get_device_properties(0).total_memory
    needs("gpu", memory > 20e9, "20 GB of GPU memory")
    source = torch.ones(2**17 + 1, 2**14, dtype=torch.bfloat16, device="cuda")
    source[-1, -1] = 3
    values, transposed, amax = cast_both_ways(source, torch.ones((), device="cuda"), E4M3)
    assert largest_value(source[-1]) == amax == 3
    assert values[-1, -1].float() == transposed[-1, -1].float() == 3
    assert values[-1, 0].float() == transposed[0, -1].float() == 1


def needs_fp8(needs: Callable[[str, bool, str], None]) -> None:
    needs("gpu", torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9), "a GPU with FP8")
