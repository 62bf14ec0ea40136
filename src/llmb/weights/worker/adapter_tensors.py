# SPDX-License-Identifier: Apache-2.0
"""Adapters of a checkpoint as tensors in host memory, by the layers that they belong to."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from llmb.catalogue.records import Lora
from llmb.checkpoints.checkpoint import WEIGHTS
from llmb.engine.checkpoint.load import TensorReader, torch_message
from llmb.engine.checkpoint.state import MODEL
from llmb.errors import UsageError
from llmb.huggingface.adapter import adapted_layers, adapter_shapes, own_names
from llmb.huggingface.tensors import Shape


class LowRank(NamedTuple):
    """The adapter of one layer; layers that share an A have the same tensor."""

    a: Tensor
    b: Tensor

    def delta(self, lora: Lora) -> Tensor:
        """What it adds to the layer's weight, [outputs, inputs] fp32."""
        return self.b @ self.a * lora.scale


def read_adapters(path: Path, shapes: Mapping[str, Shape], lora: Lora) -> dict[str, LowRank]:
    """The adapters in the checkpoint at ``path``, fp32, by layer; ``shapes`` are those of the base's parameters.

    Raises UsageError if one is missing or cannot be read.
    """
    wanted: dict[str, Tensor] = {}
    layers = adapted_layers(shapes, lora.targets)
    for layer in layers:
        sizes = adapter_shapes(shapes[f"{layer}.weight"], lora.rank)
        for matrix, name in own_names(layer, lora).items():
            wanted.setdefault(MODEL + name, torch.empty(sizes[matrix]))
    try:
        load(wanted, storage_reader=TensorReader(path / WEIGHTS), no_dist=True)
    except (CheckpointException, OSError) as error:
        raise UsageError(f"the adapters cannot be read: {torch_message(error)}", where=str(path)) from error
    names = {layer: own_names(layer, lora) for layer in layers}
    return {layer: LowRank(*(wanted[MODEL + names[layer][matrix]] for matrix in "AB")) for layer in layers}
