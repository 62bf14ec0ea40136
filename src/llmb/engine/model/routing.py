# SPDX-License-Identifier: Apache-2.0
"""Which expert a token goes to."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmb.engine.model.local import local


class Router(nn.Module):
    """Chooses ``top_k`` experts for each token: [n, hidden] to scores and expert numbers, both [n, top_k]."""

    def __init__(self, hidden_size: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.top_k = top_k

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = functional.linear(tokens, local(self.weight))
        chosen = self.choose(logits)
        return logits.gather(-1, chosen).float().sigmoid().to(tokens.dtype), chosen

    def choose(self, logits: Tensor) -> Tensor:
        """Expert numbers, [n, top_k], from [n, experts]."""
        return logits.topk(self.top_k, dim=-1).indices


class BalancedRouter(Router):
    """Takes the experts in turn, whatever the logits say, so that all get the same number of tokens.

    ``place`` is this rank's among those whose tokens meet: each goes on where the one before it stops.
    """

    def __init__(self, router: Router, place: int) -> None:
        nn.Module.__init__(self)
        self.weight = router.weight
        self.top_k = router.top_k
        self.place = place

    def choose(self, logits: Tensor) -> Tensor:
        tokens, experts = logits.shape
        return turns(self.place, tokens * self.top_k, experts, logits.device).view(tokens, self.top_k)


def turns(place: int, choices: int, experts: int, device: torch.device) -> Tensor:
    """The experts that the rank at ``place`` takes one after the other, each rank as many: [choices]."""
    first = place * choices
    return torch.arange(first, first + choices, device=device) % experts


def balanced_counts(place: int, choices: int, experts: int) -> Tensor:
    """How often the rank at ``place`` takes each expert, on the host: [experts]."""
    return turns(place, choices, experts, torch.device("cpu")).bincount(minlength=experts)
