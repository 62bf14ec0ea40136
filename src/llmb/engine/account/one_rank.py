# SPDX-License-Identifier: Apache-2.0
"""``python -m llmb.engine.account.one_rank JOB``: counts one rank of a run, on a CPU, without the others.

Tensors are fake: they have shapes and no values, and take no memory. The process group is fake, too. The rest is the
engine's own.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed._tools.fake_collectives  # registers what collectives do with fake tensors
from torch._subclasses.fake_tensor import FakeTensorMode

from llmb.engine.account.graphs import counting_backend
from llmb.engine.account.ledger import Ledger
from llmb.engine.account.step import account_of
from llmb.engine.attention_backend import attention_kernel
from llmb.engine.loop import give_memory, shape_stages
from llmb.engine.parallel.alone import lone_rank
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_account import AccountJob, RankAccount

HOST = torch.device("cpu")
"""Stands for the device of the run."""


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
