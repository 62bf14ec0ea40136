# SPDX-License-Identifier: Apache-2.0
"""The memory of parameters that a rank holds whole: views into flat buffers, in the dtype that blocks compute in."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.linear import Linear
from llmb.engine.model.local_shard import local_tensor, sharded_like
from llmb.engine.model.moe import Experts
from llmb.engine.parallel.exchange import Bucket, Exchange, Peers, cut, padded_size, sizes_of


class FlatParameters:
    """Gives the parameters of ``stages``, which are on the meta device, memory without values, in place.

    Trained parameters get ``dtype`` and, if that is not fp32, fp32 masters of the same shape; frozen ones keep theirs.
    Each dtype has a buffer for each of both, with the parameters in the order of their names: the weights of layers
    that follow each other are one matrix. A tensor-parallel parameter's local shard is a view.

    With an ``exchange``, ranks with the same parameters have a buffer for each block, its experts, and what is in no
    block. If each of them updates a piece, it has masters of that alone.
    """

    def __init__(
        self, stages: Sequence[Decoder], dtype: torch.dtype, device: torch.device, exchange: Exchange | None = None
    ) -> None:
        for stage in stages:
            placed: dict[nn.Parameter, nn.Parameter] = {}
            for layer, peers, unit in units(stage, exchange):
                for (of_kind, trained), parameters in kinds(unit, dtype).items():
                    pieces = peers.parts if peers and trained else 1
                    flat = empty(parameters, of_kind, device, pieces)
                    new = [nn.Parameter(view, requires_grad=trained) for view in views(parameters, flat)]
                    placed |= dict(zip(parameters, new, strict=True))
                    if peers and trained:
                        stage.buckets.append(Bucket(new, flat, peers, layer))
                    if trained and of_kind is not torch.float32 and pieces == 1:
                        masters = views(parameters, empty(parameters, torch.float32, device))
                        stage.masters |= dict(zip(new, masters, strict=True))
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


class Held(NamedTuple):
    """Parameters that have buffers of their own: the block that they are in, if any, and which ranks hold them too."""

    layer: str | None
    peers: Peers | None
    parameters: list[nn.Parameter]


def units(stage: Decoder, exchange: Exchange | None) -> Iterator[Held]:
    if exchange is None:
        yield Held(None, None, list(stage.parameters()))
        return
    within = {parameter for block in stage.layers.values() for parameter in block.parameters()}
    yield Held(None, exchange.dense, [parameter for parameter in stage.parameters() if parameter not in within])
    for layer, block in stage.layers.items():
        routed = {one: None for module in block.modules() if isinstance(module, Experts) for one in module.parameters()}
        yield Held(layer, exchange.dense, [parameter for parameter in block.parameters() if parameter not in routed])
        yield Held(layer, exchange.experts, list(routed))


def kinds(parameters: Sequence[nn.Parameter], dtype: torch.dtype) -> dict[tuple[torch.dtype, bool], list[nn.Parameter]]:
    """The parameters of each dtype, by whether they are trained, which makes it ``dtype``."""
    found: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        trained = parameter.requires_grad
        found.setdefault((dtype if trained else parameter.dtype, trained), []).append(parameter)
    return found


def empty(parameters: Sequence[nn.Parameter], dtype: torch.dtype, device: torch.device, pieces: int = 1) -> Tensor:
    """A buffer for the local shards of the parameters, padded for so many pieces of equal size."""
    return torch.empty(padded_size(sum(sizes_of(parameters)), pieces), dtype=dtype, device=device)


@torch.no_grad()
def views(parameters: Sequence[nn.Parameter], flat: Tensor) -> list[Tensor]:
    """A tensor for each of the parameters, sharded like it; their local shards follow each other in ``flat``."""
    shapes = [local_tensor(parameter).shape for parameter in parameters]
    parts = map(Tensor.view, cut(flat, sizes_of(parameters)), shapes)
    return [sharded_like(*each) for each in zip(parameters, parts, strict=True)]


def replace_parameters(stage: nn.Module, new: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[parameter])
