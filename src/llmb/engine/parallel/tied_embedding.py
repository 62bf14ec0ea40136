# SPDX-License-Identifier: Apache-2.0
"""Tied embeddings under pipeline parallelism: the first and the last stage hold the same matrix.

Both begin with the same values and add the sum of both stages' gradients, as in Megatron-LM's embedding group, so that
they stay equal. Without pipeline parallelism there is one parameter and nothing to do.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from llmb.engine.model.decoder import Decoder
from llmb.engine.model.local_shard import local_tensor


@torch.no_grad()
def reduce_tied_gradients(stages: Sequence[Decoder], pp: DeviceMesh) -> None:
    """Gives both copies of a tied matrix the sum of their gradients. All ranks of ``pp`` have to call it."""
    for stage in stages:  # of which at most one is an end of the pipeline
        if (gradient := tied_gradient(stage)) is not None:
            gradient.add_(received_for(gradient, pp))


def tied_gradient(stage: Decoder) -> Tensor | None:
    """This rank's part of the gradient of a tied embedding; None for a stage without one, or if it is frozen."""
    if not stage.model.tied_embeddings or stage.embed_tokens is None or not stage.embed_tokens.weight.requires_grad:
        return None
    gradient = stage.embed_tokens.weight.grad
    assert gradient is not None, "both ends of a pipeline use the embedding"
    return local_tensor(gradient)


def received_for(gradient: Tensor, pp: DeviceMesh) -> Tensor:
    """What the other end of the pipeline has in the place of ``gradient``."""
    group, last = pp.get_group(), pp.size() - 1
    other = last - pp.get_local_rank()
    received = torch.empty_like(gradient)
    exchanges = [
        dist.P2POp(dist.isend, gradient.contiguous(), group=group, group_peer=other),
        dist.P2POp(dist.irecv, received, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(exchanges):
        work.wait()
    return received
