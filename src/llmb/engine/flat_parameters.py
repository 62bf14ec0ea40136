# SPDX-License-Identifier: Apache-2.0
"""The memory of parameters that no other rank shares: views into flat buffers, in the dtype that blocks compute in."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import Linear
from llmb.engine.model.local_shard import local_tensor


class FlatParameters:
    """Gives the parameters of ``stages``, which are on the meta device, memory without values, in place.

    Trained parameters get ``dtype`` and, if that is not fp32, fp32 masters of the same shape; frozen ones keep theirs.
    Each dtype has a buffer for each of both, with the parameters in the order of their names: the weights of layers
    that follow each other are one matrix. A tensor-parallel parameter's local shard is a view.
    """

    def __init__(self, stages: Sequence[Decoder], dtype: torch.dtype, device: torch.device) -> None:
        for stage in stages:
            placed: dict[nn.Parameter, nn.Parameter] = {}
            for (of_kind, trained), parameters in kinds(stage, dtype).items():
                views = flat_views(parameters, of_kind, device)
                new = [nn.Parameter(view, requires_grad=trained) for view in views]
                placed |= dict(zip(parameters, new, strict=True))
                if trained and of_kind is not torch.float32:
                    stage.masters |= dict(zip(new, flat_views(parameters, torch.float32, device), strict=True))
            replace_parameters(stage, placed)

    def joined(self, layers: Sequence[Linear]) -> Tensor:
        """The local shards of the weights of layers that follow each other as one matrix, [sum of outputs, inputs].

        A view. Raises ValueError if the layers do not follow each other.
        """
        parts = [local_tensor(layer.weight.detach()) for layer in layers]
        for part, following in pairwise(parts):
            shares = part.untyped_storage()._cdata == following.untyped_storage()._cdata
            if not shares or part.storage_offset() + part.numel() != following.storage_offset():
                raise ValueError("the weights are not adjacent in memory")
        return parts[0].as_strided((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].stride())


def kinds(stage: Decoder, dtype: torch.dtype) -> dict[tuple[torch.dtype, bool], list[nn.Parameter]]:
    """The parameters of each dtype, by whether they are trained, which makes it ``dtype``."""
    found: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in stage.parameters():
        trained = parameter.requires_grad
        found.setdefault((dtype if trained else parameter.dtype, trained), []).append(parameter)
    return found


@torch.no_grad()
def flat_views(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """A tensor for each of the parameters, sharded like it; their local shards are one contiguous buffer."""
    shapes = [local_tensor(parameter).shape for parameter in parameters]
    sizes = [shape.numel() for shape in shapes]
    parts = torch.split(torch.empty(sum(sizes), dtype=dtype, device=device), sizes)
    return [sharded_like(*each) for each in zip(parameters, map(Tensor.view, parts, shapes), strict=True)]


def sharded_like(parameter: Tensor, local: Tensor) -> Tensor:
    """The tensor that is sharded like ``parameter`` and has ``local`` as this rank's shard."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def replace_parameters(stage: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[parameter])
