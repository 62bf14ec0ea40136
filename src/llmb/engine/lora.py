# SPDX-License-Identifier: Apache-2.0
"""Freezes a model and adds adapters to it."""

import torch
from torch import nn

from llmb.catalogue.records import ADAPTED, Lora
from llmb.engine.model.adapter import OWN, Adapter, Dropout, FusedAdapter, TokenKeys
from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Decoder


def apply_lora(model: Decoder, lora: Lora, dtype: torch.dtype) -> None:
    """Freezes all parameters of ``model``, which are then held in ``dtype``, and adds fp32 adapters.

    In place, before parameters are sharded or have values.
    """
    freeze(model, dtype)
    names = ADAPTED[lora.targets]
    for block in model.layers.values():
        for owner in list(block.modules()):
            layers = {name: layer for name, layer in owner.named_children() if name in names}
            if lora.fused and isinstance(owner, Attention):
                owner.qkv_adapter = FusedAdapter(_linear(layers), lora)
            elif not lora.fused:
                for layer in _linear(layers).values():
                    setattr(layer, OWN, Adapter(layer, lora))


def add_dropout(model: Decoder, probability: float, seed: int) -> None:
    """Gives all adapters of ``model`` dropout of their inputs, with one ``TokenKeys`` for all."""
    tokens = TokenKeys()
    for name, module in model.named_modules():
        if isinstance(module, Adapter | FusedAdapter):
            module.dropout = Dropout(probability, name, seed, tokens)


def token_keys(model: Decoder) -> TokenKeys | None:
    """What the dropout of a model's adapters depends on; None without dropout."""
    return next((module.tokens for module in model.modules() if isinstance(module, Dropout)), None)


def freeze(model: Decoder, dtype: torch.dtype) -> None:
    """No gradients, and so neither optimizer state nor fp32 master weights: parameters have the dtype of their use."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
    model.tie()


def _linear(layers: dict[str, nn.Module]) -> dict[str, nn.Linear]:
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
