# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints, asynchronously except for the last."""

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from llmb.checkpoints.checkpoint import WEIGHTS, checkpoint_name, partial_path
from llmb.checkpoints.times import add_checkpoint_time, checkpoint_time
from llmb.engine.checkpoint.finalize import await_discarded, discard, finalize
from llmb.engine.checkpoint.shared_folder import check_shared_folder
from llmb.engine.checkpoint.state import training_state
from llmb.engine.checkpoint.writer import Writer, cannot_save
from llmb.engine.model.decoder import Decoder
from llmb.engine.optimizer import AdamW
from llmb.engine.parallel.gloo import gloo_backend
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.watchdog.flight_recorder import CHECKPOINT_GROUP
from llmb.logs.checkpoint_line import SaveLine, format_save_line
from llmb.runs.folder import RunFolder
from llmb.runs.initial_weights import base_weights
from llmb.runs.plan import Plan

LONGEST_SAVE = timedelta(hours=6)
"""Time limit for the other ranks to finish writing."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save in progress. ``start_s`` is in seconds since 1970, ``began`` on the performance counter."""

    step: int
    path: Path
    start_s: float
    began: float


class Saver:
    """Saves the checkpoints of a plan. Every rank has one and calls it after the same steps.

    An asynchronous checkpoint is copied to host memory, which training waits for, and written by a thread; the ranks
    synchronize through their own process group, which never interferes with the collectives of training.
    """

    def __init__(
        self, plan: Plan, folder: RunFolder, ranks: Ranks, stages: Sequence[Decoder], optimizers: Sequence[AdamW]
    ) -> None:
        self.plan = plan
        self.base = base_weights(plan) if plan.save_checkpoint else None
        self.folder = folder.checkpoints_of(plan)
        self.times = folder.checkpoint_times
        self.ranks = ranks
        self.stages = stages
        self.optimizers = optimizers
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.pending: Future[SaveLine] | None = None
        if plan.save_checkpoint:
            self.group = dist.new_group(backend=gloo_backend(), timeout=LONGEST_SAVE, group_desc=CHECKPOINT_GROUP)
            # The folder in the run's own is made with the first checkpoint.
            check_shared_folder(plan, self.folder if plan.checkpoint_dir else folder.path, ranks, self.group)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self.pending is not None and not self.pending.done()

    def after_step(self, number: int) -> None:
        """Saves if the plan has a checkpoint after this step; raises if an earlier save failed."""
        if not self.busy:
            self.finish()
        if not self.plan.saves_after(number):
            return
        self.finish()
        path = self.folder / checkpoint_name(number + 1, self.plan.samples_before(number + 1))
        begun = Save(number + 1, path, time.time(), time.perf_counter())
        writer = Writer(partial_path(path) / WEIGHTS)
        state = training_state(self.stages, self.optimizers, self.ranks.device)
        if number == self.plan.last_step:
            self._report(self._write(begun, writer, state))
        else:
            self.pending = self.thread.submit(self._write, begun, writer, writer.stage(state))

    def finish(self) -> None:
        """Waits for the save in progress, if any, and logs it; raises if it failed."""
        if self.pending:
            pending, self.pending = self.pending, None
            self._report(pending.result())

    def _write(self, begun: Save, writer: Writer, state: dict[str, Tensor]) -> SaveLine:
        try:
            save(state, storage_writer=writer, process_group=self.group)
            if self.ranks.is_first:
                finalize(self.plan, begun.step, begun.path, writer.checksums, self.base)
        except (CheckpointException, OSError) as error:
            (discard if self.ranks.is_first else await_discarded)(begun.path)
            raise cannot_save(begun.path.name, error) from error
        return SaveLine(self.ranks.rank, begun.step, begun.start_s, time.perf_counter() - begun.began)

    def _report(self, line: SaveLine) -> None:
        if self.ranks.is_first:
            sys.stdout.write(format_save_line(line) + "\n")
            add_checkpoint_time(self.times, checkpoint_time("save", line.start_s, line.duration_s, line.iteration))
