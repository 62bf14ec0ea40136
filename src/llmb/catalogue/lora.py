# SPDX-License-Identifier: Apache-2.0
"""The linear layers that have an adapter. Pure."""

from llmb.catalogue.records import LoraTargets

QKV = ("q_proj", "k_proj", "v_proj")
ATTENTION = (*QKV, "o_proj")
ADAPTED: dict[LoraTargets, tuple[str, ...]] = {
    "qkv": QKV,
    "qkv-split": QKV,
    "qv": ("q_proj", "v_proj"),
    "attention": ATTENTION,
    "all-linear": (*ATTENTION, "gate_proj", "up_proj", "down_proj"),
}
"""Names of the layers of a block that have an adapter; a feed-forward layer without a gate has no ``gate_proj``."""
