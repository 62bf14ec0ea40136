# SPDX-License-Identifier: Apache-2.0
"""Which experts tokens go to, and how their number is told."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llmb.catalogue.records import MixtureOfExperts
from llmb.catalogue.records import Router as RouterName
from llmb.engine.model.moe import SCORES, BalancedRouter, Router, balanced_counts
from llmb.engine.timing import by_layer, summary


def router(experts: int, top_k: int, kind: RouterName = "sigmoid-scaled-inputs") -> Router:
    torch.manual_seed(1)
    made = Router(16, MixtureOfExperts(router=kind, experts=experts, top_k=top_k, ffn_hidden_size=8, interleave=1))
    torch.nn.init.normal_(made.weight)
    return made


@given(tokens=st.integers(1, 40), experts=st.integers(1, 9), top_k=st.integers(1, 3), ranks=st.integers(1, 5))
def test_forced_balance_gives_all_experts_the_same_number_of_tokens_over_all_ranks(
    tokens: int, experts: int, top_k: int, ranks: int
) -> None:
    free = router(experts, min(top_k, experts))
    chosen = [BalancedRouter(free, place)(torch.randn(tokens, 16))[1] for place in range(ranks)]
    counts = torch.stack(chosen).flatten().bincount(minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row)) == len(row) for row in torch.stack(chosen).flatten(0, 1).tolist())


@given(tokens=st.integers(0, 40), experts=st.integers(1, 9), top_k=st.integers(1, 3), place=st.integers(0, 5))
def test_how_many_tokens_each_expert_gets_is_known_where_balance_is_forced(
    tokens: int, experts: int, top_k: int, place: int
) -> None:
    forced = BalancedRouter(router(experts, min(top_k, experts)), place)
    _, chosen = forced(torch.randn(tokens, 16))
    counts = balanced_counts(place, chosen.numel(), experts)
    assert counts == chosen.flatten().bincount(minlength=experts).tolist()


@pytest.mark.parametrize("kind", SCORES)
def test_forced_balance_keeps_each_chosen_experts_own_score_and_its_gradient(kind: RouterName) -> None:
    free = router(4, 2, kind)
    tokens = torch.randn(6, 16)
    scores, chosen = BalancedRouter(free, place=1)(tokens)
    logits = (tokens @ free.weight.T).gather(1, chosen)
    torch.testing.assert_close(scores, logits.sigmoid() if kind == "sigmoid-scaled-inputs" else logits.softmax(1))
    scores.square().sum().backward()
    assert free.weight.grad is not None
    assert (free.weight.grad.abs().sum(1) > 0).all()


def test_a_free_router_takes_the_largest_logits() -> None:
    free = router(experts=8, top_k=2)
    tokens = torch.randn(30, 16)
    _, chosen = free(tokens)
    assert torch.equal(chosen, (tokens @ free.weight.T).argsort(dim=1, descending=True)[:, :2])


def test_load_is_that_of_the_worst_layer_and_leaves_dense_layers_out() -> None:
    load = summary(torch.tensor([[0, 0, 0, 0], [2, 2, 2, 2], [0, 6, 1, 1]]), torch.tensor([0, 1, 3]))
    assert load.tolist() == [pytest.approx(3.0), 1, 0.25]


def test_load_by_layer_is_that_of_experts_and_of_ranks() -> None:
    """The last layer has no token in this rank's count; in the second, all ranks compute as many rows."""
    counts = torch.tensor([[0, 6, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0]])
    rows = torch.tensor([[2 * 6, 8], [0, 0], [0, 0]])
    assert by_layer(counts, rows).tolist() == [[3.0, 1.0, 0.0], [1.5, 1.0, 1.0]]
