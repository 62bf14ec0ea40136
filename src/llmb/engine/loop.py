# SPDX-License-Identifier: Apache-2.0
"""The training loop."""

import gc
import json
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from llmb.engine.data.synthetic import SyntheticData, micro_batches
from llmb.engine.device import memory
from llmb.engine.environment import describe_environment
from llmb.engine.model.decoder import Decoder, build_model
from llmb.engine.model.initialise import initialise
from llmb.engine.optimizer import build_optimizer, clip_gradients, learning_rate, reproducible, set_learning_rate
from llmb.engine.parallel.context_parallel import apply_context_parallel, rank_positions
from llmb.engine.parallel.data_parallel import accumulate, shard
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.tensor_parallel import apply_tensor_parallel
from llmb.engine.recompute import apply_recompute
from llmb.engine.reporter import Reporter
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.steps import Step

STEPS_BETWEEN_COLLECTIONS = 100


def train(plan: Plan, folder: RunFolder, ranks: Ranks) -> None:
    """Trains ``plan.steps`` steps, or up to the first loss or gradient that is not finite."""
    environment = describe_environment(ranks)
    if ranks.is_first:
        write_atomically(folder.environment, json.dumps(environment, indent=2) + "\n")
    reproducible(plan.seed)
    model = prepare_model(plan, ranks)
    optimizer = build_optimizer(model, plan.recipe.training)
    data = SyntheticData(
        vocab_size=plan.recipe.model.vocab_size,
        seq_len=plan.recipe.layout.seq_len,
        seed=plan.seed,
        distribution=plan.recipe.training.data,
    )
    with ExitStack() as stack:
        reporter = stack.enter_context(Reporter(folder, plan)) if ranks.is_first else None
        for number in range(plan.steps):
            step = timed_step(number, plan, model, optimizer, data, ranks)
            if reporter:
                reporter.report(step, memory(ranks.device))
            if not step.finite:
                break


def prepare_model(plan: Plan, ranks: Ranks) -> Decoder:
    """The sharded model with its initial values; no rank ever holds more than its share of it."""
    with torch.device("meta"):
        model = build_model(plan.recipe.model)
    apply_recompute(model, plan.recompute)
    apply_tensor_parallel(model, ranks.tp)
    apply_context_parallel(model, ranks.cp, plan.recipe.layout.seq_len)
    shard(model, ranks.fsdp, plan.recipe.dtype)
    model.to_empty(device=ranks.device)
    initialise(model, plan.recipe.model, plan.seed)
    return model


def train_step(
    model: Decoder, optimizer: AdamW, plan: Plan, data: SyntheticData, number: int, ranks: Ranks
) -> tuple[Tensor, Tensor]:
    """One optimizer step over all micro-batches: this rank's mean loss and the gradient norm of all ranks, both 0-d."""
    training = plan.recipe.training
    loss = add_gradients(model, plan, data, number, ranks)
    norm = clip_gradients(model, training.clip_grad)
    set_learning_rate(optimizer, learning_rate(training, number))
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def add_gradients(model: Decoder, plan: Plan, data: SyntheticData, number: int, ranks: Ranks) -> Tensor:
    """Forward and backward passes of one step: this rank's mean loss, 0-d fp64, and gradients of all ranks' mean."""
    layout = plan.recipe.layout
    positions = rank_positions(layout.seq_len, ranks.cp_rank, layout.cp, ranks.device)
    # fp64, because the mean of a few fp32 losses would depend on their order in its last digit.
    total = torch.zeros((), device=ranks.device, dtype=torch.float64)
    for index, (tokens, labels) in enumerate(micro_batches(data, layout, number, ranks.dp_rank, ranks.device)):
        accumulate(model, last=index == layout.ga - 1)
        loss = model(tokens[:, positions], labels[:, positions], positions)
        (loss / layout.ga).backward()
        total += loss.detach()
    return total / layout.ga


def timed_step(number: int, plan: Plan, model: Decoder, optimizer: AdamW, data: SyntheticData, ranks: Ranks) -> Step:
    """One step as all ranks saw it. Its time ends when every rank knows every rank's loss."""
    collect_garbage(number)
    began = time.perf_counter()
    loss, norm = train_step(model, optimizer, plan, data, number, ranks)
    local = [loss.item(), norm.item(), time.perf_counter() - began, float(memory(ranks.device).peak_bytes)]
    mine = torch.tensor(local, dtype=torch.float64, device=ranks.device)
    gathered = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(gathered, mine)
    losses, norms, times, peaks = torch.stack(gathered).T.tolist()
    return Step(
        step=number,
        step_time_s=time.perf_counter() - began,
        loss=sum(losses) / len(losses),
        grad_norm=norms[0],
        lr=learning_rate(plan.recipe.training, number),
        tokens=plan.recipe.layout.gbs * plan.recipe.layout.seq_len,
        peak_memory_bytes=int(max(peaks)),
        peak_memory_rank=peaks.index(max(peaks)),
        rank_step_time_s_min=min(times),
        rank_step_time_s_max=max(times),
        slowest_rank=times.index(max(times)),
    )


def collect_garbage(number: int) -> None:
    """Python's collector at the same step on all ranks: a pause of one rank at a time would stall all the others."""
    gc.disable()
    if number % STEPS_BETWEEN_COLLECTIONS == 0:
        gc.collect()
