# SPDX-License-Identifier: Apache-2.0
"""Recomputation changes what is kept, never what comes out."""

import pytest
import torch

from llmb.catalogue.catalogue import Catalogue
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.transformations import apply_recompute

MODEL = Catalogue().models[("llama3.1", "tiny")]


def gradients(mode: str) -> tuple[dict[str, torch.Tensor], int]:
    """Every parameter's gradient, and the bytes that the forward pass keeps for the backward pass."""
    decoder: Decoder = build_model(MODEL)
    TrainedStage(decoder).initialize(1)
    apply_recompute(decoder, mode)
    tokens = torch.arange(2 * 64).reshape(2, 64)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = decoder(tokens, tokens)
    loss.backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}, sum(kept.values())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_and_names_are_those_without_recomputation(mode: str) -> None:
    reference, _ = gradients("none")
    recomputed, _ = gradients(mode)
    assert recomputed.keys() == reference.keys()
    for name, gradient in reference.items():
        assert torch.equal(recomputed[name], gradient), name


def test_full_recomputation_keeps_less() -> None:
    assert gradients("full")[1] < 0.5 * gradients("none")[1]
