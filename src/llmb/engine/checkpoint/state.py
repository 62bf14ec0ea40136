# SPDX-License-Identifier: Apache-2.0
"""The content of a checkpoint: only tensors, under names that are the same for every layout.

Weights and optimizer state are DTensors with global shapes, or elements whose places in the full tensors are known, so
any number of ranks can read what any other wrote.
There are only tensors, because reading other objects means unpickling, which can run any code that a file contains.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from llmb.engine.checkpoint.parts import Places, place_of
from llmb.engine.model.decoder import Decoder
from llmb.engine.optimizer import AdamW
from llmb.engine.precision.step import scale_state

MODEL = "model."
OPTIMIZER = "optimizer."
RANDOM = "random."


def training_state(stages: Sequence[Decoder], optimizers: Sequence[AdamW], device: torch.device) -> dict[str, Tensor]:
    """This rank's shard of what is trained: fp32 weights, AdamW's moments and step counts; FP8 scales, random states.

    Weights, optimizer state and scales are the live tensors, so that reading into them restores them. Those of
    parameters of which this rank updates a part have the elements of that, whose places ``part_places`` has.
    """
    state = random_state(device)
    for stage, optimizer in zip(stages, optimizers, strict=True):
        state |= trained_state(stage) | optimizer_state(stage, optimizer)
    return state


def trained_state(stage: Decoder) -> dict[str, Tensor]:
    """Trained weights in fp32, and FP8 scales; not copied."""
    trained = {name for name, parameter in stage.named_parameters() if parameter.requires_grad}
    return {f"{MODEL}{name}": held for name, held in stage.named_values() if name in trained} | scale_state(stage)


def optimizer_state(stage: Decoder, optimizer: AdamW) -> dict[str, Tensor]:
    """AdamW's moments and step counts, not copied."""
    return {
        f"{OPTIMIZER}{name}.{kind}": value
        for name, parameter in stage.named_parameters()
        if parameter in optimizer.state
        for kind, value in optimizer.state[parameter].items()
    }


def part_places(stages: Sequence[Decoder]) -> Places:
    """Where those tensors of ``training_state`` are of which this rank has some elements."""
    parts = {name: place_of(part) for stage in stages for name, part in stage.named_parts() if part is not None}
    kinds = ("exp_avg", "exp_avg_sq")
    return {
        key: place
        for name, place in parts.items()
        for key in (f"{MODEL}{name}", *(f"{OPTIMIZER}{name}.{kind}" for kind in kinds))
    }


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {f"{RANDOM}cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: dict[str, Tensor], device: torch.device) -> None:
    """All ranks seed their generators with the same value, so one state is valid for all of them."""
    torch.set_rng_state(state[f"{RANDOM}cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[f"{RANDOM}cuda"], device)
