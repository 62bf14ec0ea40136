# SPDX-License-Identifier: Apache-2.0
"""Schedule and optimizer, against the documents' own log lines and a reference written out by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from llmb.catalogue.catalogue import Catalogue
from llmb.engine.optimizer import AdamW, build_optimizer, clip_gradients, gradient_norm, learning_rate
from llmb.engine.parallel.exchange import TrainedStage

CATALOGUE = Catalogue()
LLAMA = CATALOGUE.workloads["pretrain_llama3.1"].training_for("8b")
NEMOTRON = CATALOGUE.workloads["pretrain_nemotron4"].training_for("15b")


def optimizer_of(model: nn.Module) -> AdamW:
    model.replica = None
    return build_optimizer(TrainedStage(model), LLAMA)


@pytest.mark.parametrize(("training", "printed"), [(LLAMA, "7.496e-06"), (NEMOTRON, "4.491e-06")])
def test_the_rate_at_step_49_is_the_one_the_documents_log(training, printed: str) -> None:
    assert f"{learning_rate(training, 49):.4g}" == printed


def test_the_rate_peaks_after_the_warm_up_and_ends_at_its_minimum() -> None:
    assert learning_rate(LLAMA, LLAMA.warmup_steps) == LLAMA.peak_lr
    assert learning_rate(LLAMA, LLAMA.decay_steps) == pytest.approx(LLAMA.min_lr)
    assert learning_rate(LLAMA, 10 * LLAMA.decay_steps) == pytest.approx(LLAMA.min_lr)


@given(step=st.integers(0, 2_000_000))
def test_the_rate_stays_between_zero_and_its_peak(step: int) -> None:
    assert 0 < learning_rate(LLAMA, step) <= LLAMA.peak_lr


def test_one_adamw_step_equals_the_formula() -> None:
    """Loshchilov and Hutter, 2019, algorithm 2; norm weights are not decayed."""
    model = nn.ModuleDict({"linear": nn.Linear(3, 2, bias=False), "norm": nn.RMSNorm(3)})
    before = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    grads = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = grads[name].clone()
    optimizer_of(model).step()
    for name, parameter in model.named_parameters():
        gradient = grads[name].double()
        moment = gradient / (gradient.abs() + LLAMA.eps)  # both moments, corrected for their bias, after one step
        decay = LLAMA.weight_decay if parameter.ndim > 1 else 0.0
        expected = before[name] * (1 - LLAMA.peak_lr * decay) - LLAMA.peak_lr * moment
        torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-7)


def test_a_gradient_in_another_order_is_refused() -> None:
    """The kernel would take the values of other places."""
    model = nn.Linear(3, 2, bias=False)
    model.weight.grad = torch.randn(3, 2).T
    with pytest.raises(AssertionError):
        optimizer_of(model).step()


@pytest.mark.parametrize("largest", [1.0, 100.0])
def test_clipping_reports_the_norm_before_and_bounds_it_in_the_next_step(largest: float) -> None:
    models = [nn.Linear(4, 4) for _ in range(2)]
    clipped, plain = (optimizer_of(model) for model in models)
    models[1].load_state_dict(models[0].state_dict())
    true_norm = 3.0 * 20**0.5
    for model, gradient in zip(models, (3.0, 3.0 * min(1.0, largest / true_norm)), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
    norm = clip_gradients([clipped], largest)
    assert norm.item() == pytest.approx(true_norm)
    for optimizer in (clipped, plain):
        optimizer.step()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(clipped.state[ours][moment], plain.state[theirs][moment])
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_fp64_however_a_gradient_is_cut(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    whole = torch.randn(300, 1001).mul_(torch.logspace(-6, 3, 300).unsqueeze(1)).to(dtype)
    parts = [whole[:7], whole[7:150], whole[150:]]
    for cut in ([whole], parts, [part.t() for part in parts]):
        norm = gradient_norm([(part, 1) for part in cut])
        assert norm.item() == pytest.approx(whole.double().norm().item(), rel=1e-12)
