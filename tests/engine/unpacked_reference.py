# SPDX-License-Identifier: Apache-2.0
"""Trains on one process on each document of a packed dataset by itself: what training on packs is compared with.

Arguments: a file with a plan as JSON, the file to write (as of ``layout_reference``), rank.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from layout_values import spread
from torch import Tensor

from llmb.engine.data.build import build_data
from llmb.engine.model.decoder import build_model
from llmb.engine.model.loss import IGNORED
from llmb.engine.optimizer import build_optimizer, clip_gradients, learning_rate
from llmb.engine.parallel.exchange import TrainedStage
from llmb.runs.plan import EnginePlan


def documents_of(plan: EnginePlan, step: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels of each document with labels of a step: [1, length] each."""
    gbs = plan.recipe.layout.gbs
    batch = build_data(plan).micro_batch(range(step * gbs, (step + 1) * gbs))
    found = []
    for tokens, labels, starts in zip(batch.tokens, batch.labels, batch.starts, strict=True):
        for start in starts.unique():
            own = starts == start
            if (labels[own] != IGNORED).any():
                found.append((tokens[own][None], labels[own][None]))
    return found


def train_unpacked(plan: EnginePlan) -> dict[str, Any]:
    model, training = build_model(plan.recipe.model), plan.recipe.training
    TrainedStage(model).initialize(plan.seed)
    spread(model)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(TrainedStage(model), training)
    gradients: dict[str, Tensor] = {}
    losses, norms = [], []
    for step in range(plan.steps):
        documents = documents_of(plan, step)
        count = sum(int((labels != IGNORED).sum()) for _, labels in documents)
        loss = 0.0
        for tokens, labels in documents:
            part = model(tokens, labels, count=count)
            part.backward()
            loss += part.item()
        gradients = gradients or {name: item.grad.clone() for name, item in model.named_parameters()}
        losses.append(loss)
        norms.append(clip_gradients([optimizer], training.clip_grad).item())
        optimizer.lr = learning_rate(training, step)
        optimizer.step()
        optimizer.zero_grad()
    return {"values": values, "gradients": gradients, "losses": losses, "norms": norms}


torch.save(train_unpacked(EnginePlan(**json.loads(Path(sys.argv[1]).read_text()))), sys.argv[2])
