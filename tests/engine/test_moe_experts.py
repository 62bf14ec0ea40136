# SPDX-License-Identifier: Apache-2.0
"""Routing, and grouped products against one product per expert."""

import megatron_moe
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from llmb.catalogue.records import MixtureOfExperts
from llmb.catalogue.records import Router as RouterName
from llmb.engine.model.moe import SCORES, MoELayer, grouped_matmul, loop_matmul, permute, runs_grouped

COUNTS = {"one-empty": [3, 0, 5, 4], "ends-empty": [0, 7, 5, 0], "all-in-one": [0, 0, 12, 0], "no-rows": [0, 0, 0, 0]}


def with_gradients(product, rows, weights, counts):
    rows, weights = rows.clone().requires_grad_(), weights.clone().requires_grad_()
    output = product(rows, weights, counts)
    output.square().sum().backward()
    return output, rows.grad, weights.grad


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_grouped_product_and_its_gradients_equal_one_product_per_expert(counts, dtype, tolerance):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), 16, generator=generator).to(dtype)
    weights = torch.randn(4, 16, 32, generator=generator).to(dtype)
    assert runs_grouped(rows, weights)
    grouped = with_gradients(grouped_matmul, rows, weights, torch.tensor(counts))
    looped = with_gradients(loop_matmul, rows, weights, torch.tensor(counts))
    for one, other in zip(grouped, looped, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert all(not gradient.any() for gradient, count in zip(grouped[2], counts, strict=True) if count == 0)


@pytest.mark.parametrize(("width", "dtype"), [(18, torch.float32), (20, torch.bfloat16), (16, torch.float64)], ids=str)
def test_operands_that_the_grouped_product_refuses_take_the_loop(width, dtype):
    rows, weights = torch.randn(12, width, dtype=dtype), torch.randn(4, width, 32, dtype=dtype)
    counts = torch.tensor([3, 0, 5, 4])
    assert not runs_grouped(rows, weights)
    assert torch.equal(grouped_matmul(rows, weights, counts), loop_matmul(rows, weights, counts))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_layer_adds_the_chosen_experts_of_the_scaled_input_to_the_shared_expert(top_k):
    torch.manual_seed(4)
    sizes = {"experts": 5, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 40, "interleave": 1}
    moe = MixtureOfExperts(router="sigmoid-scaled-inputs", top_k=top_k, **sizes)
    layer = MoELayer(32, moe)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hidden = torch.randn(2, 7, 32)

    expected = layer.shared_expert(hidden)
    for place in [(b, s) for b in range(2) for s in range(7)]:
        logits = layer.router.weight @ hidden[place]
        for expert in logits.topk(top_k).indices:
            scaled = hidden[place] * logits[expert].sigmoid()
            gate, up = (scaled @ layer.experts.gate_up_proj[expert].flatten(1)).chunk(2)
            expected[place] += (torch.nn.functional.silu(gate) * up) @ layer.experts.down_proj[expert]
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_layer_adds_the_outputs_of_the_chosen_experts_weighted_by_a_softmax_over_them(top_k):
    torch.manual_seed(4)
    sizes = {"experts": 5, "ffn_hidden_size": 24, "interleave": 1}
    layer = MoELayer(32, MixtureOfExperts(router="softmax-weighted-outputs", top_k=top_k, **sizes))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    hidden = torch.randn(2, 7, 32)

    expected = torch.zeros_like(hidden)
    for place in [(b, s) for b in range(2) for s in range(7)]:
        every_expert = (layer.router.weight @ hidden[place]).softmax(0)
        weights, chosen = every_expert.topk(top_k)
        for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (hidden[place] @ layer.experts.gate_up_proj[expert].flatten(1)).chunk(2)
            expected[place] += weight * (torch.nn.functional.silu(gate) * up) @ layer.experts.down_proj[expert]
    torch.testing.assert_close(layer(hidden), expected, rtol=1e-4, atol=1e-5)


def test_no_token_is_dropped_when_all_choose_the_same_expert():
    sizes = {"experts": 4, "ffn_hidden_size": 16, "shared_ffn_hidden_size": 16, "interleave": 1}
    moe = MixtureOfExperts(router="sigmoid-scaled-inputs", top_k=1, **sizes)
    layer = MoELayer(16, moe)
    torch.manual_seed(5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        layer.router.weight.copy_(torch.arange(4.0)[:, None].expand(4, 16))
        hidden = torch.rand(1, 50, 16)
        routed = layer(hidden) - layer.shared_expert(hidden)
    assert (routed.abs().amax(-1) > 0).all()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 3),
    factor=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    kind=st.sampled_from(sorted(SCORES)),
    seed=st.integers(0, 99),
)
def test_tokens_beyond_the_capacity_are_dropped_as_in_megatron(
    tokens: int, experts: int, top_k: int, factor: float, kind: RouterName, seed: int
) -> None:
    top_k = min(top_k, experts)
    assume(kind == "sigmoid-scaled-inputs" or top_k > 1)  # the softmax over one is 1: all tokens score alike
    factor = min(factor, experts / top_k)
    torch.manual_seed(seed)
    layer = MoELayer(16, MixtureOfExperts(router=kind, experts=experts, top_k=top_k, ffn_hidden_size=8, interleave=1))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.capacity_factor = factor
    hidden = torch.randn(1, tokens, 16, requires_grad=True)
    weights = [layer.router.weight, layer.experts.gate_up_proj, layer.experts.down_proj]

    expected, dropped = megatron_moe.routed(hidden[0], *weights, top_k, factor, sigmoid=kind == "sigmoid-scaled-inputs")
    parts = layer.dispatch(hidden)
    (routed,) = parts
    found = layer.combine(parts, layer.run_experts(layer.send(parts)), None)
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)
    given_back = torch.randn_like(expected)
    gradients = torch.autograd.grad(found[0], [hidden, *weights], given_back)
    for one, other in zip(gradients, torch.autograd.grad(expected, [hidden, *weights], given_back), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)

    capacity = megatron_moe.capacity_of(tokens, top_k, experts, factor)
    assert routed.counts.tolist() == [capacity] * experts == layer.host_counts(len(routed.rows), 0)
    assert (routed.places == len(routed.rows)).sum() == dropped
    padding = routed.order == tokens * top_k
    assert padding.sum() == experts * capacity - (tokens * top_k - dropped)
    assert not routed.rows[padding].any()


def test_rows_without_a_source_or_a_place_are_zeros_and_have_no_gradient():
    rows = torch.arange(1.0, 7.0).view(3, 2).requires_grad_()
    order, inverse = torch.tensor([2, 3, 0, 3]), torch.tensor([2, 4, 0])
    found = permute(rows, order, inverse, has_gaps=True)
    assert found.tolist() == [[5, 6], [0, 0], [1, 2], [0, 0]]
    (gradient,) = torch.autograd.grad(found, rows, torch.arange(10.0, 18.0).view(4, 2))
    assert gradient.tolist() == [[14, 15], [0, 0], [10, 11]]


def test_gradients_of_permuted_rows_are_those_of_autograd():
    """To the bit, without additions."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 4, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    order, given = torch.randperm(9, generator=generator), torch.randn(9, 4, generator=generator).bfloat16()
    found, expected = permute(rows, order, order.argsort()), rows.index_select(0, order)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(permuted, rows, given)[0] for permuted in (found, expected)]
    assert torch.equal(*gradients)
    assert "IndexSelect" not in type(found.grad_fn).__name__
