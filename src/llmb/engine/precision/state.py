# SPDX-License-Identifier: Apache-2.0
"""State of FP8 in checkpoints: delayed scaling resumes with any layout."""

from torch import Tensor, nn

from llmb.engine.precision.experts import Fp8Stack
from llmb.engine.precision.linear import Fp8Linear

FP8 = "fp8."


def scale_state(stage: nn.Module) -> dict[str, Tensor]:
    """The scales and histories of a stage's layers, not copied, equal on all its ranks; empty with current scaling."""
    return {
        f"{FP8}{name}.{kind}": tensor
        for name, layer in stage.named_modules()
        if isinstance(layer, Fp8Linear | Fp8Stack) and layer.layer_scales.scales.delayed
        for kind, tensor in (("scale", layer.layer_scales.scale), ("history", layer.layer_scales.history))
    }
