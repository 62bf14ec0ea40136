# SPDX-License-Identifier: Apache-2.0
"""Trains on one process, with none of the engine's ways to spread a model: what layouts are compared with.

Arguments: a file with a plan as JSON, the file to write (initial values, the first step's gradients, and the loss and
gradient norm of each step), into how many parts the ranks to compare with cut a sequence, rank.
"""

import json
import sys
from functools import partial
from pathlib import Path

import megatron_moe
import torch
from layout_values import spread
from torch import Tensor

from llmb.engine.data.build import build_data
from llmb.engine.model.attention import Documents, Rotary
from llmb.engine.model.decoder import MoEBlock, build_model
from llmb.engine.optimizer import build_optimizer, clip_gradients, learning_rate
from llmb.engine.parallel.exchange import TrainedStage
from llmb.engine.transformations import add_dropout, apply_lora, token_keys
from llmb.runs.plan import EnginePlan


def drop_tokens(
    block: MoEBlock, factor: float, parts: int, hidden: Tensor, rotary: Rotary, documents: Documents | None
) -> Tensor:
    """In place of the block's forward pass: every rank drops among the tokens that it has."""
    after_attention = hidden + block.self_attn(block.input_layernorm(hidden), rotary, documents)
    hidden, layer = block.post_attention_layernorm(after_attention), block.mlp
    experts, moe = layer.experts, layer.moe
    weights = layer.router.weight, experts.gate_up_proj, experts.down_proj
    sigmoid = moe.router == "sigmoid-scaled-inputs"
    summed = [
        megatron_moe.routed(part, *weights, moe.top_k, factor, sigmoid=sigmoid)[0]
        for sample in hidden
        for part in sample.chunk(parts)
    ]
    output = torch.cat(summed).view_as(hidden)
    shared = 0.0 if layer.shared_expert is None else layer.shared_expert(hidden)
    return after_attention + output + shared


def train(plan: EnginePlan, parts: int) -> dict[str, object]:
    model, training = build_model(plan.recipe.model), plan.recipe.training
    if plan.lora:
        apply_lora(model, plan.lora, torch.float32)
        add_dropout(model, plan.lora.dropout, plan.seed)
    for number in model.moe_layers() if plan.capacity_factor else ():
        block = model.layers[str(number)]
        block.forward = partial(drop_tokens, block, plan.capacity_factor, parts)
    TrainedStage(model).initialize(plan.seed)
    spread(model)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients: dict[str, torch.Tensor] = {}
    optimizer, data, gbs = build_optimizer(TrainedStage(model), training), build_data(plan), plan.recipe.layout.gbs
    losses, norms = [], []
    for number in range(plan.steps):
        samples = range(number * gbs, (number + 1) * gbs)
        if (keys := token_keys(model)) is not None:
            length = plan.recipe.layout.seq_len
            keys.set(samples, torch.arange(length), length)
        batch = data.micro_batch(samples)
        loss = model(batch.tokens, batch.labels, starts=batch.starts)
        loss.backward()
        trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        gradients = gradients or {name: item.grad.clone() for name, item in trained.items()}
        losses.append(loss.item())
        norms.append(clip_gradients([optimizer], training.clip_grad).item())
        optimizer.lr = learning_rate(training, number)
        optimizer.step()
        optimizer.zero_grad()
    return {"values": values, "gradients": gradients, "losses": losses, "norms": norms}


torch.save(train(EnginePlan(**json.loads(Path(sys.argv[1]).read_text())), int(sys.argv[3])), sys.argv[2])
