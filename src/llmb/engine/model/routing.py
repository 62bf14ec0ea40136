# SPDX-License-Identifier: Apache-2.0
"""Routers, which choose the experts of each token."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.catalogue.records import MixtureOfExperts
from llmb.catalogue.records import Router as RouterName
from llmb.engine.model.local_shard import local_shard

SCORES: dict[RouterName, Callable[[Tensor], Tensor]] = {
    "sigmoid-scaled-inputs": torch.sigmoid,
    "softmax-weighted-outputs": partial(torch.softmax, dim=-1),
}
"""Scores from the logits of the chosen experts, [n, top_k]; equal to a renormalized softmax over all experts."""


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token: [n, hidden] to scores and expert numbers, both [n, top_k]."""

    def __init__(self, hidden_size: int, moe: MixtureOfExperts) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, hidden_size))
        self.top_k = moe.top_k
        self.score = SCORES[moe.router]

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(tokens, local_shard(self.weight))
        chosen = self.choose(logits)
        return self.score(logits.gather(-1, chosen).float()).to(tokens.dtype), chosen

    def choose(self, logits: Tensor) -> Tensor:
        """Expert numbers, [n, top_k], from [n, experts]."""
        return logits.topk(self.top_k, dim=-1).indices

    def known_counts(self, choices: int) -> list[int] | None:  # noqa: ARG002
        """How many of that many choices are of each expert, if it does not depend on tokens."""
        return None


class BalancedRouter(Router):
    """Chooses experts round-robin, independent of the logits, so that all get the same number of tokens.

    ``place`` is the index of this rank among those that share experts: each continues after the previous one.
    """

    def __init__(self, router: Router, place: int) -> None:
        nn.Module.__init__(self)
        self.weight = router.weight
        self.top_k, self.score = router.top_k, router.score
        self.place = place
        self.experts = len(router.weight)

    def choose(self, logits: Tensor) -> Tensor:
        tokens, experts = logits.shape
        return turns(self.place, tokens * self.top_k, experts, logits.device).view(tokens, self.top_k)

    def known_counts(self, choices: int) -> list[int]:
        return balanced_counts(self.place, choices, self.experts)


def turns(place: int, choices: int, experts: int, device: torch.device) -> Tensor:
    """The consecutive experts that the rank at ``place`` chooses, the same number on each rank: [choices]."""
    first = place * choices
    return torch.arange(first, first + choices, device=device) % experts


def balanced_counts(place: int, choices: int, experts: int) -> list[int]:
    """How often the rank at ``place`` chooses each expert."""
    rounds, more = divmod(choices, experts)
    first = place * choices
    return [rounds + ((expert - first) % experts < more) for expert in range(experts)]
