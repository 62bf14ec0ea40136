# SPDX-License-Identifier: Apache-2.0
"""AdamW's kernels against the same operations one by one, and against torch's own kernel.

``test_interpreted.py`` runs them in Triton's interpreter, ``test_adamw_kernels.py`` on a GPU.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from llmb.engine.kernels import adamw_triton
from llmb.engine.kernels.arguments import AdamWNumbers, Casts, OfParameter

SHAPES = [(1, 7), (33, 1), (130, 70), (3, 5, 34), (0, 8)]
NUMBERS = AdamWNumbers(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
KEPT = NUMBERS._replace(weight_decay=0.0)
"""Do not change a weight whose gradient and first moment are zero."""
E4M3 = torch.float8_e4m3fn


def random(shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """The same on each device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def started(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """A master weight and its moments, as after some steps."""
    return [random(shape, 0, device), random(shape, 1, device) * 0.1, random(shape, 2, device).square() * 0.1]


def one_by_one(*given: Tensor, numbers: AdamWNumbers = NUMBERS) -> list[Tensor]:
    """The results of the state, a gradient and its divisor, with every intermediate value rounded to fp32 by numpy.

    torch has faster kernels for some of these operations, which round differently.
    """
    master, first, second, gradient, divisor = (part.cpu().float().numpy() for part in given)
    lr, beta1, beta2, eps, weight_decay, step = numbers
    gradient = gradient / divisor
    master = master - np.float32(lr * weight_decay) * master
    first = np.float32(beta1) * first + np.float32(1 - beta1) * gradient
    second = np.float32(beta2) * second + np.float32(1 - beta2) * gradient * gradient
    denominator = np.sqrt(second) / np.float32(math.sqrt(1 - beta2**step)) + np.float32(eps)
    master = master - np.float32(lr / (1 - beta1**step)) * first / denominator
    return [torch.from_numpy(part) for part in (master, first, second)]


def same(found: Tensor, expected: Tensor) -> None:
    """To the bit, except that all NaN are alike."""
    torch.testing.assert_close(found.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def same_bytes(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.cpu().view(torch.uint8), expected.cpu().contiguous().view(torch.uint8))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps_are_those_operations(shape, dtype, device):
    state, divisor = started(shape, device), torch.tensor(1.7, device=device)
    weight = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    for step in range(1, 4):
        gradient, numbers = random(shape, step, device).to(dtype), NUMBERS._replace(step=step)
        before = gradient.clone()
        expected = one_by_one(*state, gradient, divisor, numbers=numbers)
        adamw_triton.update(OfParameter(*state, gradient, weight), divisor, numbers)
        for found, wanted in zip(state, expected, strict=True):
            same(found, wanted)
        same(weight, expected[0].bfloat16())
        assert torch.equal(gradient, before)


@pytest.mark.parametrize("numbers", [NUMBERS, KEPT, NUMBERS._replace(step=100_000)])
def test_steps_are_those_of_torch_but_for_some_roundings(numbers, device):
    """torch computes some intermediate values in fp64 on a GPU, and with fused multiply-adds on a CPU."""
    shape = 65, 17
    (ours, theirs), divisor = (started(shape, device) for _ in range(2)), torch.tensor(1.7, device=device)
    for number in range(3):
        gradient = random(shape, number, device)
        step = torch.tensor(float(numbers.step + number), device=device)
        of_step = numbers._replace(step=numbers.step + number)
        adamw_triton.update(OfParameter(*ours, gradient, None), divisor, of_step)
        lists = [theirs[0]], [gradient], [theirs[1]], [theirs[2]], [], [step]
        options = numbers._asdict()
        del options["step"]
        torch._fused_adamw_(*lists, **options, amsgrad=False, maximize=False, grad_scale=divisor)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-7, atol=5e-8)


def test_a_gradient_in_another_order_is_refused(device):
    state, gradient = started((6, 4), device), random((4, 6), 3, device).T
    with pytest.raises(AssertionError):
        adamw_triton.update(OfParameter(*state, gradient, None), torch.ones((), device=device), NUMBERS)
    with pytest.raises(AssertionError):
        update_and_cast(state, gradient, Buffers((6, 4), device, strided=False), 1.0)


def test_nothing_beyond_the_end_is_written(device):
    whole = [torch.full((2048,), float(number), device=device) for number in range(3)]
    gradient = random((1025,), 0, device).bfloat16()
    parts = OfParameter(*(part[:1025] for part in whole), gradient, None)
    adamw_triton.update(parts, torch.ones((), device=device), NUMBERS)
    for number, part in enumerate(whole):
        assert (part[1025:] == number).all()
        assert (part[:1025] != number).any()


class Buffers:
    """A matrix and its transpose in FP8, in larger buffers filled with fives if ``strided``; and the largest value."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, *, strided: bool) -> None:
        *stack, rows, columns = shape
        beside = (13, 7) if strided else (0, 0)
        self.wide, self.high = (
            torch.full(size, 5.0, device=device).to(E4M3)
            for size in ((*stack, rows, columns + beside[0]), (*stack, columns, rows + beside[1]))
        )
        self.values, self.transposed = self.wide[..., :columns], self.high[..., :rows]
        self.amax = torch.tensor(123.0, device=device)

    def check(self, weight: Tensor, scale: float) -> None:
        """They follow from the updated weight."""
        weight = weight.cpu()
        cast = (weight.float() * scale).clamp(-448, 448).to(E4M3)
        same(self.values.float(), cast.float())
        same(self.transposed.float(), cast.mT.float())
        same(self.amax, weight.abs().amax().float() if weight.numel() else torch.zeros(()))
        rest = self.wide[..., weight.shape[-1] :], self.high[..., weight.shape[-2] :]
        assert all((part.float() == 5).all() for part in rest)


def update_and_cast(state, gradient, casts, scale, numbers=NUMBERS, divisor=1.7) -> Tensor:
    """Returns the updated weight in bf16."""
    device = gradient.device
    weight = torch.zeros_like(gradient, dtype=torch.bfloat16)
    given = Casts(torch.tensor(scale, device=device), casts.values, casts.transposed, casts.amax)
    tensors = OfParameter(*state, gradient, weight)
    adamw_triton.update_and_cast(tensors, torch.tensor(divisor, device=device), numbers, given)
    return weight


@pytest.mark.parametrize(("dtype", "strided"), [(torch.bfloat16, True), (torch.float32, False)])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_cast_is_the_updated_weight(shape, dtype, strided, device):
    state, gradient = started(shape, device), random(shape, 3, device).to(dtype)
    expected = one_by_one(*state, gradient, torch.tensor(1.7))
    casts = Buffers(shape, device, strided=strided)
    weight = update_and_cast(state, gradient, casts, 150.0)
    for found, wanted in zip(state, expected, strict=True):
        same(found, wanted)
    same(weight, expected[0].bfloat16())
    casts.check(weight, 150.0)


def test_all_values_are_rounded_to_the_nearest_and_saturated(device):
    """All finite magnitudes of bf16, with alternating signs."""
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).float()
    every[1::2] *= -1
    master = every.where(every.isfinite(), 0.0).view(128, 256)
    state = [part.to(device) for part in (master, torch.zeros_like(master), torch.ones_like(master))]
    casts = Buffers((128, 256), device, strided=False)
    update_and_cast(state, torch.zeros_like(state[0]), casts, 1.0, KEPT)
    same(state[0], master)
    expected = master.clamp(-448, 448).to(E4M3)
    same_bytes(casts.values, expected)
    same_bytes(casts.transposed, expected.T)
    same(casts.amax, master.abs().max())


SPECIAL = torch.tensor([0.0, -0.0, 1.0, 3e38, -3e38, 1e-40, torch.inf, -torch.inf, torch.nan])


@pytest.mark.parametrize("special", [SPECIAL, SPECIAL[:-1], SPECIAL[-1:]])
def test_special_values_spread_as_in_those_operations(special, device):
    """All pairs of a weight and a gradient, beside ordinary ones."""
    shape, count = (35, 40), len(special)
    state, gradient = started(shape, device), random(shape, 3, device)
    state[0][33 - count : 33, 20 : 20 + count] = special.unsqueeze(1).to(device)
    gradient[33 - count : 33, 20 : 20 + count] = special.to(device)
    expected = one_by_one(*state, gradient, torch.tensor(1.7))
    casts = Buffers(shape, device, strided=False)
    weight = update_and_cast(state, gradient, casts, 2.0)
    for found, wanted in zip(state, expected, strict=True):
        same(found, wanted)
    casts.check(weight, 2.0)


def test_what_is_beyond_the_edge_is_no_largest_value(device):
    """There 0 is divided by 0."""
    state, casts = started((33, 1), device), Buffers((33, 1), device, strided=False)
    weight = update_and_cast(state, random((33, 1), 3, device), casts, 2.0, NUMBERS._replace(eps=0.0))
    casts.check(weight, 2.0)
    assert casts.amax.isfinite()


def test_zeros_stay_zeros(device):
    state = [torch.zeros(5, 33, device=device) for _ in range(3)]
    casts = Buffers((5, 33), device, strided=False)
    weight = update_and_cast(state, torch.zeros(5, 33, device=device), casts, 2.0)
    casts.check(weight, 2.0)
    assert not any(part.any() for part in (*state, casts.amax))


def test_more_elements_than_32_bits_count(device):
    """The last of them; 40 GB on a GPU."""
    size, end = 2**31 + 2**13, 2**13
    if device.type == "cpu" or torch.cuda.mem_get_info()[0] < 20 * size:
        pytest.skip("needs a GPU with 45 GB free")
    state = [torch.ones(size, device=device) for _ in range(3)]
    gradient = torch.ones(size, device=device, dtype=torch.bfloat16)
    weight = torch.zeros_like(gradient)
    expected = one_by_one(*(part[-end:] for part in (*state, gradient)), torch.ones(()))
    one = torch.ones((), device=device)
    adamw_triton.update(OfParameter(*state, gradient, weight), one, NUMBERS)
    same(state[0][-end:], expected[0])
    same(weight[-end:], expected[0].bfloat16())
    casts, shape = torch.zeros(2, size, dtype=torch.uint8, device=device).view(E4M3), (size // end, end)
    tensors = OfParameter(*(part.fill_(1.0).view(shape) for part in (*state, gradient, weight)))
    into = casts[0].view(shape), casts[1].view(end, size // end)
    adamw_triton.update_and_cast(tensors, one, NUMBERS, Casts(one, *into, torch.zeros((), device=device)))
    same(state[0][-end:], expected[0])
    same(casts[:, -end:].float(), expected[0].bfloat16().to(E4M3).float().expand(2, -1))
