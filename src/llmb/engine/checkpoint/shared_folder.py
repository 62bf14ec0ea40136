# SPDX-License-Identifier: Apache-2.0
"""Tries, before the first step, whether every node can save to the folder of checkpoints and sees the others' files."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llmb.engine.parallel.mesh import Ranks
from llmb.errors import EnvironmentProblem
from llmb.runs.claim import PROBE, probe_file
from llmb.runs.disk_space import check_space
from llmb.runs.host import host_name
from llmb.runs.plan import Plan


@dataclass(frozen=True, slots=True)
class Tried:
    """What one rank found: the name of the file that it left, if it is the first of its node, or why it could not."""

    file: str | None = None
    problem: str | None = None


def check_shared_folder(plan: Plan, folder: Path, ranks: Ranks, group: dist.ProcessGroup) -> None:
    """A collective of ``group``: all ranks have to call it. Creates the folder.

    Raises EnvironmentProblem, on all ranks, if a node cannot write there or sees another folder, or if the disk is too
    small for the checkpoints of ``plan``.
    """
    mine = _leave_file(plan, folder, ranks)
    tried: list[Tried] = [mine] * ranks.world_size
    dist.all_gather_object(tried, mine, group=group)
    problems = [one.problem for one in tried if one.problem]
    if ranks.is_first and not problems:
        missing = [one.file for one in tried if one.file and not (folder / one.file).exists()]
        problems = [f"{missing[0]} of another node is not visible on {host_name()}"] if missing else []
    said = [problems]
    dist.broadcast_object_list(said, src=0, group=group)
    if mine.file:
        (folder / mine.file).unlink(missing_ok=True)
    if said[0]:
        advice = "give --checkpoint-dir a folder that all nodes share and can write to, or leave it out"
        raise EnvironmentProblem(f"checkpoints cannot be saved: {said[0][0]}", where=str(folder), do=advice)


def _leave_file(plan: Plan, folder: Path, ranks: Ranks) -> Tried:
    if int(os.environ.get("LOCAL_RANK", ranks.rank)):
        return Tried()
    name = f"{PROBE}-rank{ranks.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe_file(folder / name)
        if ranks.is_first:
            check_space(plan, folder)
    except OSError as error:
        return Tried(problem=f"rank {ranks.rank} on {host_name()}: {error.strerror}: {error.filename}")
    except EnvironmentProblem as error:
        return Tried(file=name, problem=error.what)
    return Tried(file=name)
