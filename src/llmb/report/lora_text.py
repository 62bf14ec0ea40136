# SPDX-License-Identifier: Apache-2.0
"""Adapters in words."""

from llmb.catalogue.records import Lora, Model
from llmb.metrics.parameters import trainable_parameters


def lora_text(lora: Lora) -> str:
    return f"LoRA, rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, targets {lora.targets}"


def trained_text(model: Model, lora: Lora) -> str:
    """With the number of parameters."""
    return f"{trainable_parameters(model, lora):,} parameters: {lora_text(lora)}"
