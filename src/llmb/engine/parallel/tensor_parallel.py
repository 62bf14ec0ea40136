# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism (Megatron-LM; Korthikanti et al., 2022).

Attention and dense feed-forward layers are sharded by heads and by inner features, embedding, head and loss by the
vocabulary. Between them every rank holds its shard of the sequence, so that norms and residual stream are sharded
too; without sequence parallelism all ranks compute the same there.
A router is replicated on every rank and takes the tokens of its shard of the sequence; experts have their own mesh.

Parameters are DTensors, which the optimizer, gradient clipping, FSDP and checkpoints support; the forward pass uses
local tensors.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from llmb.engine.model.adapter import OWN, Adapter
from llmb.engine.model.adapter_dropout import Dropout
from llmb.engine.model.attention import Attention
from llmb.engine.model.biases import Bias
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.feedforward import GatedMLP, SquaredReluMLP
from llmb.engine.model.moe import Experts
from llmb.engine.model.norms import Norm
from llmb.engine.parallel.boundary import Boundary
from llmb.engine.parallel.collectives import group_of
from llmb.engine.parallel.vocab_parallel import VocabParallelEmbedding, VocabularyShard

OUTPUTS, INPUTS = 0, 1
SHARDED_DIM = {
    "embed_tokens": OUTPUTS,
    **dict.fromkeys(("q_bias", "k_bias", "v_bias", "gate_bias", "up_bias"), OUTPUTS),
    "q_proj": OUTPUTS,
    "k_proj": OUTPUTS,
    "v_proj": OUTPUTS,
    "o_proj": INPUTS,
    "gate_proj": OUTPUTS,
    "up_proj": OUTPUTS,
    "down_proj": INPUTS,
    "lm_head": OUTPUTS,
}
"""The sharded dimension of a layer's matrix or bias, by the layer's name; everything else is replicated."""

PER_HEAD = ("q_norm", "k_norm")


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Shards ``model`` in place over the ranks of ``mesh``; it then returns logits of this rank's vocabulary shard.

    A stage without an embedding takes, and a stage without a head returns, hidden states of this rank's shard of the
    sequence, or of the full sequence without ``sequence_parallel``.
    """
    if mesh.size() == 1:
        return
    boundary = Boundary(group_of(mesh), sequence_parallel)
    if model.embed_tokens is not None:
        model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, boundary)
    if model.lm_head is not None:
        model.lm_head.vocabulary = VocabularyShard(boundary.group, model.model.vocab_size)
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        name = path.rpartition(".")[2]
        shard_parameters(module, mesh, placement_of(path))
        if isinstance(module, Adapter) and placement_of(f"{path}.a").is_shard() and isinstance(module.dropout, Dropout):
            module.dropout.first_feature = mesh.get_local_rank() * module.a.in_features // mesh.size()
        if isinstance(module, Norm | Bias):
            # Ranks see different heads, whatever tokens they see.
            module.same_tokens = not sequence_parallel and name not in PER_HEAD
        elif isinstance(module, Attention | GatedMLP | SquaredReluMLP) or name == "lm_head":
            module.register_forward_pre_hook(partial(_enter, boundary))
        elif SHARDED_DIM.get(name) == INPUTS:
            module.register_forward_hook(partial(_leave, boundary))
    model.tie()


def placement_of(path: str) -> Placement:
    """How the parameters of the module at ``path`` are sharded.

    Of an adapter, the matrix on the side of its layer that is sharded; gradients of the other one are partial sums.
    """
    *_, layer, kind, name = ("", "", *path.split("."))
    if kind != OWN:
        return Shard(SHARDED_DIM[name]) if name in SHARDED_DIM else Replicate()
    dim = INPUTS if name == "a" else OUTPUTS
    return Shard(dim) if SHARDED_DIM[layer] == dim else Replicate()


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces the module's own parameters without communication: values are set later, or equal on all ranks."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _enter(boundary: Boundary, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Runs before a layer whose first input is hidden states."""
    return (boundary.enter(inputs[0]), *inputs[1:])


def _leave(boundary: Boundary, _layer: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Runs after a layer whose inputs are sharded, so that each rank's output is a partial sum."""
    return boundary.leave(output)
