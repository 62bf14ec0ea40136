# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb.engine.account.one_rank JOB``: counts one rank of a run, on a CPU, without the others.

Tensors are fake: they have shapes and no values, and take no memory. The process group is fake, too. The rest is the
engine's own. A step of many micro-batches is counted from two of fewer: what each further round of micro-batches adds
is the same, once a pipeline is in its steady state.
"""

import gc
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed._tools.fake_collectives  # registers what collectives do with fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from llmb.catalogue.records import Layout
from llmb.engine.account.graphs import counting_backend
from llmb.engine.account.ledger import Ledger
from llmb.engine.account.operators import group_names, shown_group
from llmb.engine.attention_backend import attention_kernel
from llmb.engine.data.batches import Figures, MicroBatch, StepData
from llmb.engine.loop import do_step
from llmb.engine.model.decoder import Decoder
from llmb.engine.model.shards import local_tensor
from llmb.engine.optimizer import build_optimizer
from llmb.engine.parallel.alone import lone_rank
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.pipeline import build_passes
from llmb.engine.stages import give_memory, shape_stages
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_account import OWNERS, AccountJob, CollectiveCount, RankAccount

HOST = torch.device("cpu")
"""Stands for the device of the run."""


class SameBatches:
    """Micro-batches of the right shape, all values 0: each sequence is one document."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout, self.device = layout, device

    def step(self, number: int) -> StepData:  # noqa: ARG002 (every step has the same)
        shape = (self.layout.mbs, self.layout.seq_len)
        tokens, labels = (torch.zeros(shape, dtype=torch.int64, device=self.device) for _ in range(2))
        batches = [MicroBatch(tokens, labels, None)] * self.layout.ga
        return StepData(Figures(self.layout.ga * self.layout.mbs * self.layout.seq_len, 1, 0, 0), batches)


class MessageKind(NamedTuple):
    kind: str
    group: str


class Counts(NamedTuple):
    """What one step takes: FLOPs by kind; messages and their bytes by kind and group, in the order of the first."""

    peak: Counter[str]
    flops: Counter[str]
    messages: Counter[MessageKind]
    bytes: Counter[MessageKind]

    def extended(self, fewer: "Counts", rounds: int) -> "Counts":
        """With ``rounds`` more of what this step has more than ``fewer``."""
        pairs: Any = zip(self, fewer, strict=True)
        return Counts(
            *(Counter({key: size + rounds * (size - less[key]) for key, size in own.items()}) for own, less in pairs)
        )


def account_of(
    plan: EnginePlan, stages: Sequence[Decoder], ranks: Ranks, ledger: Ledger, *, extends: bool
) -> RankAccount:
    """What this rank takes in a step; within ``ledger``, which follows ``stages``. ``extends``: from fewer."""
    optimizers = [build_optimizer(stage, plan.recipe.training) for stage in stages]
    for each in tree_leaves([list(optimizer.state.values()) for optimizer in optimizers]):
        ledger.memory.give(local_tensor(each.detach()), "optimizer")

    def counts(number: int, micro_batches: int) -> Counts:
        layout = plan.recipe.layout
        fewer = layout.model_copy(update={"gbs": layout.mbs * layout.dp * micro_batches})
        short = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"layout": fewer})})
        passes = build_passes(list(stages), short, ranks)
        gc.collect()
        ledger.begin()
        do_step(number, short, passes, optimizers, SameBatches(short.recipe.layout, ranks.device), ranks)
        return counted(ledger, ranks)

    layout = plan.recipe.layout
    each, wanted = layout.pp, layout.ga
    # All is compiled then, also for gradients that are added to others; torch knows all shapes, and optimizers have
    # their state.
    counts(0, min(max(each, 2), wanted))
    rounds, remainder = divmod(wanted - 4 * each, each)
    if not extends or rounds <= 0 or remainder:
        found = counts(1, wanted)
    else:
        fewer = counts(1, 3 * each)
        found = counts(2, 4 * each).extended(fewer, rounds)
    return RankAccount(
        rank=ranks.rank,
        pp_stage=ranks.pp_rank,
        peak_bytes=found.peak.total(),
        bytes_by_owner={owner: found.peak[owner] for owner in OWNERS},
        flops=found.flops.total(),
        flops_by_kind=dict(found.flops),
        collectives=tuple(
            CollectiveCount(kind=of.kind, group=of.group, count=count, bytes=found.bytes[of])
            for of, count in found.messages.items()
        ),
    )


def counted(ledger: Ledger, ranks: Ranks) -> Counts:
    known = group_names(ranks)
    messages, size = Counter[MessageKind](), Counter[MessageKind]()
    for each in ledger.collectives:
        group = MessageKind(each.kind, shown_group(each.group, known))
        messages[group] += 1
        size[group] += each.bytes
    return Counts(Counter(ledger.memory.peak.by), ledger.flops.copy(), messages, size)


def fake_account(plan: EnginePlan, rank: int) -> tuple[RankAccount, Ledger]:
    """Counts one rank among as many as the plan has, none of which is there. The ledger has the last counted step.

    Works once in a process, as ``lone_rank`` does.
    """
    ranks = lone_rank(plan, rank, HOST)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    ledger = Ledger(fuses=plan.device == "cuda", mode=mode)
    stages = shape_stages(plan, ranks, counting_backend(ledger.called, ledger.run, fuses=ledger.fuses))
    with ExitStack() as stack:
        stack.enter_context(attention_kernel("math" if plan.attention_backend == "math" else "flash"))
        stack.enter_context(mode)
        stack.enter_context(ledger)
        give_memory(stages, plan, ranks)
        ledger.follow(stages)
        return account_of(plan, stages, ranks, ledger, extends=True), ledger


def main() -> None:
    job = AccountJob.model_validate_json(Path(sys.argv[1]).read_text())
    sys.stdout.write(fake_account(job.plan, job.rank)[0].model_dump_json() + "\n")


if __name__ == "__main__":
    main()
