# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallelism (Megatron-LM; Korthikanti et al., 2022)."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from llmb.engine.collectives import Group, all_gather, gradient_sum, group_of, rank_sum, reduce_scatter
from llmb.engine.model.adapter import OWN, Adapter, Dropout, FusedAdapter
from llmb.engine.model.attention import Attention
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.layers import Bias, GatedMLP, Norm, SquaredReluMLP
from llmb.engine.model.linear import SEQUENCE, Linear, local_shard
from llmb.engine.model.loss import Vocabulary
from llmb.engine.model.moe import Experts

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
"""The sharded dimension of a layer's matrix or bias, by the layer's name. Adapters and experts have other rules."""
PER_HEAD = ("q_norm", "k_norm")


class Boundary(NamedTuple):
    """Boundaries of sharded layers: Korthikanti et al., 2022, section 4.2; without sequence parallelism, Shoeybi et
    al., 2019, section 3."""

    group: Group
    sequence_parallel: bool

    def enter(self, hidden: Tensor) -> Tensor:
        """Return the full sequence, gathered if it is sharded."""
        if self.sequence_parallel:
            return all_gather(hidden, SEQUENCE, self.group)
        return gradient_sum(hidden, self.group)

    def leave(self, hidden: Tensor) -> Tensor:
        """Reduce the partial sums of all ranks, each of the full sequence; scatter the sequence if it is sharded."""
        if self.sequence_parallel:
            return reduce_scatter(hidden, SEQUENCE, self.group)
        return rank_sum(hidden, self.group)


class VocabParallelEmbedding(nn.Embedding):
    """Maps tokens of full sequences, [batch, seq], to hidden states, sharded with sequence parallelism."""

    def __init__(self, full: nn.Embedding, boundary: Boundary) -> None:
        super().__init__(full.num_embeddings, full.embedding_dim, _weight=full.weight)
        self.weight.requires_grad_(full.weight.requires_grad)
        self.boundary = boundary

    def forward(self, tokens: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        rows, held = held_rows(tokens, weight.shape[0], self.boundary.group)
        hidden = functional.embedding(rows, weight) * held.unsqueeze(-1)
        return self.boundary.leave(hidden)


def held_rows(tokens: Tensor, size: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return tokens' indices, clamped to this rank's ``size`` rows of the embedding, and True for tokens with a row."""
    rows = tokens - group.rank * size
    held = (rows >= 0) & (rows < size)
    return rows.clamp(0, size - 1), held


class VocabularyShard(Vocabulary):
    """This rank's shard of a vocabulary with ``size`` columns; all shards have the same size."""

    def __init__(self, group: Group, size: int) -> None:
        self.group = group
        self.first = group.rank * size // group.size

    def combine(self, log_sums: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``statistics`` over all shards, with one collective; ranks without the label have 0 for its logit."""
        gathered = all_gather(torch.stack((log_sums, label)).unsqueeze(0), 0, self.group)
        return gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)


def apply_tensor_parallel(
    model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool, sums_in_products: bool = False, fused: bool = False
) -> None:
    """Shard ``model`` in place over ``mesh``; it then returns logits of this rank's vocabulary shard. ``fused``: see
    ``Group``."""
    if mesh.size() == 1:
        return
    boundary = Boundary(group_of(mesh)._replace(fused=fused), sequence_parallel)
    if model.embed_tokens is not None:
        model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, boundary)
    if model.lm_head is not None:
        model.lm_head.vocabulary = VocabularyShard(boundary.group, model.model.vocab_size)
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        placement = placement_of(path)
        shard_parameters(module, mesh, placement)
        if sums_in_products and placement == Shard(INPUTS) and isinstance(module, Linear):
            module.summed_over = boundary.group
        else:
            connect(module, path, boundary)
    model.tie()


def connect(module: nn.Module, path: str, boundary: Boundary) -> None:
    """Set up ``module`` for its shard: collectives, gradients of replicas, and the part of dropout that it computes."""
    name, (group, sequence_parallel) = path.rpartition(".")[2], boundary
    if isinstance(module, Norm | Bias):
        # Ranks see different heads, whatever tokens they see.
        module.same_tokens = not sequence_parallel and name not in PER_HEAD
    elif isinstance(module, Adapter | FusedAdapter) and isinstance(module.dropout, Dropout):
        if placement_of(f"{path}.a").is_shard():
            module.dropout.first_feature = group.rank * module.a.in_features // group.size
        elif sequence_parallel:
            module.dropout.group = group
    elif name == "lm_head" or (not sequence_parallel and isinstance(module, Attention | GatedMLP | SquaredReluMLP)):
        module.register_forward_pre_hook(partial(_enter, boundary))
    elif SHARDED_DIM.get(name) == INPUTS:
        module.register_forward_hook(partial(_leave, boundary))
    elif sequence_parallel and isinstance(module, Linear) and placement_of(path) == Shard(OUTPUTS):
        module.group = group


def placement_of(path: str) -> Placement:
    """Return the placement of the parameters of the module at ``path``."""
    *_, layer, kind, name = ("", "", *path.split("."))
    if kind != OWN:
        return Shard(SHARDED_DIM[name]) if name in SHARDED_DIM else Replicate()
    dim = INPUTS if name == "a" else OUTPUTS
    return Shard(dim) if SHARDED_DIM[layer] == dim else Replicate()


def shard_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Shard the module's own parameters, without communication: values are set later, or equal on all ranks."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _enter(boundary: Boundary, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return (boundary.enter(inputs[0]), *inputs[1:])


def _leave(boundary: Boundary, _layer: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return boundary.leave(output)
