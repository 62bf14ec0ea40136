# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallel (Megatron-LM; Korthikanti et al., 2022).

Attention and dense feed-forward layers are cut by heads and by inner features, embedding, head and loss by the
vocabulary. Between them every rank holds its part of the sequence, so that norms and residual stream are cut too;
without sequence parallelism all ranks hold, and compute, the same there.
A router is whole on every rank and takes the tokens of its part of the sequence; experts have a mesh of their own.

Parameters are DTensors, which optimizer, clipping, FSDP and checkpoints understand; the forward pass uses local
tensors.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.moe import Experts
from llmb.engine.model.norms import Norm
from llmb.engine.parallel.boundary import Boundary
from llmb.engine.parallel.collectives import group_of
from llmb.engine.parallel.vocab_parallel import VocabParallelEmbedding, VocabularyShare

OUTPUTS, INPUTS = 0, 1
CUT = {
    "embed_tokens": OUTPUTS,
    "q_proj": OUTPUTS,
    "k_proj": OUTPUTS,
    "v_proj": OUTPUTS,
    "o_proj": INPUTS,
    "gate_proj": OUTPUTS,
    "up_proj": OUTPUTS,
    "down_proj": INPUTS,
    "lm_head": OUTPUTS,
}
"""The dimension of a layer's matrix that is cut, by the layer's name; all else is whole on every rank."""

PER_HEAD = ("q_norm", "k_norm")


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cuts ``model`` in place over the ranks of ``mesh``: then it returns logits of this rank's part of the vocabulary.

    A stage without an embedding takes, and one without a head returns, hidden states of this rank's part of the
    sequence, or of all of it without ``sequence_parallel``.
    """
    if mesh.size() == 1:
        return
    boundary = Boundary(group_of(mesh), sequence_parallel)
    if model.embed_tokens is not None:
        model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, boundary)
    if model.lm_head is not None:
        model.lm_head.vocabulary = VocabularyShare(boundary.group, model.model.vocab_size)
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        name = path.rpartition(".")[2]
        cut_parameters(module, mesh, Shard(CUT[name]) if name in CUT else Replicate())
        if isinstance(module, Norm):
            # Ranks see different heads, whatever tokens they see.
            module.same_tokens = not sequence_parallel and name not in PER_HEAD
        elif isinstance(module, Attention | GatedMLP | SquaredReluMLP) or name == "lm_head":
            module.register_forward_pre_hook(partial(_enter, boundary))
        elif CUT.get(name) == INPUTS:
            module.register_forward_hook(partial(_leave, boundary))
    model.tie()


def cut_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces the parameters that ``module`` itself owns. Communicates nothing: values come later, or are the same."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _enter(boundary: Boundary, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a layer whose first input are hidden states."""
    return (boundary.enter(inputs[0]), *inputs[1:])


def _leave(boundary: Boundary, _layer: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """After a layer whose inputs are cut, so that each rank's output is a summand."""
    return boundary.leave(output)
