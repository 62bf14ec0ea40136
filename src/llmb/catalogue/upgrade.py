# SPDX-License-Identifier: Apache-2.0
"""Models in run folders and checkpoints of version 0.1, which named an architecture instead of its parts."""

from collections.abc import Mapping
from typing import Any

PARTS: dict[str, dict[str, str]] = {
    "llama": {"norm": "rmsnorm", "mlp": "swiglu"},
    "nemotron4": {"norm": "layernorm1p", "mlp": "squared-relu"},
    "llama4": {"norm": "rmsnorm", "mlp": "swiglu", "rotary_pairs": "interleaved"},
}
ROUTER = "sigmoid-scaled-inputs"
"""The only one that version 0.1 had."""


def upgraded_model(fields: Any) -> Any:  # noqa: ANN401 (any content of a file; other records pass unchanged)
    """The fields of a model with their current names."""
    if not isinstance(fields, Mapping) or fields.get("architecture") not in PARTS:
        return fields
    kept = {name: value for name, value in fields.items() if name not in ("architecture", "gated_mlp")}
    if kept.get("moe") is not None:
        kept["moe"] = {"router": ROUTER, **kept["moe"]}
    return {**PARTS[fields["architecture"]], **kept}
