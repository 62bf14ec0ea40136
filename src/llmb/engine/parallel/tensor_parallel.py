# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallel (Megatron-LM; Korthikanti et al., 2022).

Attention and dense feed-forward layers are cut by heads and by inner features, embedding, head and loss by the
vocabulary. Between them every rank holds its part of the sequence, so that norms and residual stream are cut too.
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
from llmb.engine.parallel.collectives import Group, all_gather, group_of, reduce_scatter
from llmb.engine.parallel.vocab_parallel import SEQUENCE, VocabParallelCrossEntropy, VocabParallelEmbedding

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


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Cuts ``model`` in place over the ranks of ``mesh``: then it returns logits of this rank's part of the vocabulary.

    A stage without an embedding takes, and one without a head returns, hidden states of this rank's part of the
    sequence.
    """
    if mesh.size() == 1:
        return
    group = group_of(mesh)
    if model.embed_tokens is not None:
        model.embed_tokens = VocabParallelEmbedding(model.embed_tokens, group)
    if model.loss is not None:
        model.loss = VocabParallelCrossEntropy(group)
    for path, module in model.named_modules():
        if isinstance(module, Experts):
            continue
        name = path.rpartition(".")[2]
        cut_parameters(module, mesh, Shard(CUT[name]) if name in CUT else Replicate())
        if isinstance(module, Attention | GatedMLP | SquaredReluMLP) or name == "lm_head":
            module.register_forward_pre_hook(partial(_gather_input, group))
        elif CUT.get(name) == INPUTS:
            module.register_forward_hook(partial(_scatter_output, group))


def cut_parameters(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Replaces the parameters that ``module`` itself owns. Communicates nothing: values come later, or are the same."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))


def _gather_input(group: Group, _layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Before a layer: its first input, of this rank's part of the sequence, becomes that of the whole sequence."""
    return (all_gather(inputs[0], SEQUENCE, group), *inputs[1:])


def _scatter_output(group: Group, _layer: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """After a layer whose inputs are cut: the ranks' outputs are summed, and each keeps its part of the sequence."""
    return reduce_scatter(output, SEQUENCE, group)
