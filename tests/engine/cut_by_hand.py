# SPDX-License-Identifier: Apache-2.0
"""Cuts a model over tensor-parallel ranks without the engine: for workers whose subject is not how it is cut."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from llmb.engine.model.decoder import Decoder


def tensor_dimension(name: str) -> int | None:
    """The dimension that tensor (or expert) parallelism cuts: outputs going into a layer, inputs coming out of it."""
    if any(part in name for part in ("q_proj", "up_proj", "lm_head", "experts")):
        return 0
    return 1 if "o_proj" in name or "mlp.down_proj" in name else None


def cut_tensors(decoder: Decoder, mesh: DeviceMesh) -> None:
    for path, owner in list(decoder.named_modules()):
        for name, parameter in list(owner.named_parameters(recurse=False)):
            dimension = tensor_dimension(f"{path}.{name}")
            placement = Replicate() if dimension is None else Shard(dimension)
            setattr(owner, name, nn.Parameter(distribute_tensor(parameter, mesh, [placement], src_data_rank=None)))
    decoder.tie()
