# SPDX-License-Identifier: Apache-2.0
"""Has the engine count ranks of a run, in processes of their own: whoever asks never loads torch."""

import tempfile
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from llmb.errors import EnvironmentProblem
from llmb.processes.talking import run_talking
from llmb.runs.plan import EnginePlan
from llmb.runs.rank_account import PROGRAM, AccountJob, MemoryUse, RankAccount, countable

VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
"""Nothing is computed, on no device."""


def count_ranks(plan: EnginePlan, ranks: Sequence[int], say: Callable[[str], None]) -> MemoryUse:
    """What each of some ranks takes. Raises EnvironmentProblem without torch, and RunFailed."""
    if find_spec("torch") is None:
        raise EnvironmentProblem(
            "the engine counts its memory with torch, which this Python does not have", do="pip install 'llmb[engine]'"
        )
    counted, assumptions = countable(plan)
    found = []
    for number in ranks:
        say(f"counting rank {number} of {plan.recipe.layout.gpus}")
        found.append(count_rank(AccountJob(plan=counted, rank=number)))
    return MemoryUse(capacity_gib=plan.recipe.gpu_memory_gb, assumptions=assumptions, ranks=tuple(found))


def count_rank(job: AccountJob) -> RankAccount:
    with tempfile.TemporaryDirectory(prefix="llmb-memory-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(job.model_dump_json())
        lines: list[bytes] = []
        ended = run_talking(("-P", "-m", PROGRAM, str(path)), VARIABLES, lines.append, "nothing was counted")
    if ended.code or not lines:
        raise ended.failure(f"the program that counts rank {job.rank}")
    return RankAccount.model_validate_json(lines[-1])
