# SPDX-License-Identifier: Apache-2.0
"""The update of one parameter, against torch's AdamW and against casts made afterwards."""

import pytest
import torch
from torch import Tensor

from llmb.engine.kernels.adamw import update, update_and_cast
from llmb.engine.kernels.arguments import AdamWNumbers, Casts, OfParameter
from llmb.engine.kernels.fp8_cast import cast, largest_value

NUMBERS = AdamWNumbers(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
SHAPE = (5, 7)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_updates_are_those_of_torch_with_gradients_divided_before(dtype: torch.dtype) -> None:
    master, divisor = random(*SHAPE), torch.tensor(4.0)
    theirs = torch.nn.Parameter(master.clone())
    options = {"lr": NUMBERS.lr, "betas": (NUMBERS.beta1, NUMBERS.beta2), "weight_decay": NUMBERS.weight_decay}
    optimizer = torch.optim.AdamW([theirs], **options, eps=NUMBERS.eps)
    first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
    weight = None if dtype is torch.float32 else torch.empty(SHAPE, dtype=dtype)
    for step in (1, 2):
        gradient = random(*SHAPE, seed=step).to(dtype)
        theirs.grad = gradient.float() / 4
        optimizer.step()
        update(OfParameter(master, first, second, gradient, weight), divisor, NUMBERS._replace(step=step))
    torch.testing.assert_close(master, theirs.detach())
    torch.testing.assert_close(first, optimizer.state[theirs]["exp_avg"])
    torch.testing.assert_close(second, optimizer.state[theirs]["exp_avg_sq"])
    assert weight is None or torch.equal(weight, master.bfloat16())


def test_a_gradient_in_another_order_is_refused_on_every_device() -> None:
    """A GPU's kernel would take the values of other places; so layouts that pass on a CPU pass there, too."""
    state, gradient = [random(*SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)], random(*SHAPE[::-1]).T
    with pytest.raises(AssertionError):
        update(OfParameter(*state, gradient, None), torch.tensor(1.0), NUMBERS)


@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7)], ids=["matrix", "stack"])
@pytest.mark.parametrize("worst", [0.0, torch.inf, torch.nan])
def test_what_is_cast_with_the_update_is_what_is_cast_after_it(shape: tuple[int, ...], worst: float) -> None:
    """Into slices of larger buffers, also if a value is saturated or not finite."""
    (*stack, rows, columns), scale = shape, torch.tensor(300.0)
    one, other = ([random(*shape), torch.zeros(shape), torch.zeros(shape)] for _ in range(2))
    for master, *_ in (one, other):
        master.view(-1)[3] = worst
    gradient, weights = random(*shape, seed=1).bfloat16(), [torch.empty(shape, dtype=torch.bfloat16) for _ in range(2)]
    values = torch.zeros(*stack, rows + 4, columns, dtype=torch.float8_e4m3fn)[..., 2 : rows + 2, :]
    transposed = torch.zeros(*stack, columns, rows + 4, dtype=torch.float8_e4m3fn)[..., 2 : rows + 2]
    amax = torch.tensor(-1.0)
    update(OfParameter(*one, gradient, weights[0]), torch.tensor(1.0), NUMBERS)
    casts = Casts(scale, values, transposed, amax)
    update_and_cast(OfParameter(*other, gradient, weights[1]), torch.tensor(1.0), NUMBERS, casts)
    for ours, theirs in zip([*one, weights[0]], [*other, weights[1]], strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
    expected = cast(weights[0], scale, torch.float8_e4m3fn).float().nan_to_num(7.0)
    assert torch.equal(values.float().nan_to_num(7.0), expected)
    assert torch.equal(transposed.float().nan_to_num(7.0), expected.mT)
    assert torch.equal(amax.nan_to_num(7.0), largest_value(weights[0]).nan_to_num(7.0))
