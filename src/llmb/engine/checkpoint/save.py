# SPDX-License-Identifier: Apache-2.0
"""Saves checkpoints in a folder that all nodes share: in the background, except after the last step."""

import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, futures
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from llmb import __version__
from llmb.base.errors import EnvironmentProblem
from llmb.engine.checkpoint.state import PartsSavePlanner, local_elements, part_places, shard_places, training_state
from llmb.engine.device import synchronize
from llmb.engine.optimizer import AdamW
from llmb.engine.parallel.exchange import Stages
from llmb.engine.parallel.mesh import Ranks
from llmb.engine.parallel.rendezvous import Hosts, ranks_of_node
from llmb.engine.watchdog import CHECKPOINT_GROUP
from llmb.readers.logs.step_line import SaveLine, format_save_line
from llmb.readers.samples.host import host_name
from llmb.runs.checkpoint_use import base_weights, check_space
from llmb.runs.checkpoints.checkpoint import (
    RECORD,
    WEIGHTS,
    CheckpointRecord,
    RankTransfer,
    add_checkpoint_time,
    checkpoint_name,
    checkpoint_time,
)
from llmb.runs.checkpoints.checkpoint_files import ChecksumWriter, flush_file, partial_path
from llmb.runs.checkpoints.origin import WeightsOrigin
from llmb.runs.experiment import PROBE, probe_file
from llmb.runs.folder import RunFolder, write_atomically
from llmb.runs.plan import Plan
from llmb.runs.record import now


@dataclass(frozen=True)
class ChecksummedWrite(WriteResult):
    """A written tensor, with the checksum of the file that contains it."""

    checksum: str


class ChecksumFileSystem(FileSystem):
    """Writes files to disk, and records the checksum of each."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:  # noqa: ARG002 (always "wb")
        with ChecksumWriter(Path(path)) as stream:
            yield stream
        self.checksums[Path(path).name] = stream.checksum


class Writer(FileSystemWriter):
    """Writes a rank's files, or raises OSError. After ``finish``, the coordinator's ``checksums`` are of all ranks'
    files."""

    def __init__(self, path: Path, **options: Any) -> None:  # noqa: ANN401 (those of torch)
        super().__init__(path, **options)
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self.checksums: dict[str, str] = {}

    def storage_meta(self) -> StorageMeta:
        """Return metadata without the folder: versions of Python pickle the type of a path under different names."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> futures.Future[list[WriteResult]]:
        try:
            written = super().write_data(plan, planner).value()
        except RuntimeError as error:
            raise next((cause for cause in causes(error) if isinstance(cause, OSError)), error) from error
        results: futures.Future[list[WriteResult]] = futures.Future()
        checksums = self.fs.checksums
        results.set_result(
            [
                ChecksummedWrite(each.index, each.size_in_bytes, place, checksums[place.relative_path])
                for each in written
                for place in (each.storage_data,)
            ]
        )
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        of_ranks = [result for written in results for result in written if isinstance(result, ChecksummedWrite)]
        self.checksums = {result.storage_data.relative_path: result.checksum for result in of_ranks}
        # The metadata was written under a temporary name.
        self.checksums |= {name.removesuffix(".tmp"): checksum for name, checksum in self.fs.checksums.items()}
        # torch 2.11 adds the written tensors only to a copy of the metadata.
        metadata.storage_data = {result.index: result.storage_data for written in results for result in written}


class Staging:
    """Copies of a rank's tensors in host memory, pinned for a GPU. Each save overwrites the previous copies."""

    def __init__(self) -> None:
        self.copies: dict[str, Tensor] = {}

    def copy(self, state: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        for name, tensor in state.items():
            if name not in self.copies:
                self.copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[name].copy_(tensor, non_blocking=True)
        synchronize(device)
        return self.copies


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions that led to ``error``, the most recent first."""
    cause = error.__cause__ or error.__context__
    while cause:
        yield cause
        cause = cause.__cause__ or cause.__context__


def cannot_save(name: str, error: OSError) -> EnvironmentProblem:
    advice = "free some space, or set --checkpoint-dir to a folder on another disk that all nodes share"
    return EnvironmentProblem(f"the checkpoint cannot be saved: {error}", where=name, do=advice)


@dataclass(frozen=True, slots=True)
class FolderTrial:
    """The result of testing a folder on one rank: the file left there, and the problem, if any."""

    file: str | None = None
    problem: str | None = None


def check_shared_folder(plan: Plan, folder: Path, ranks: Ranks, hosts: Hosts) -> None:
    """Create the folder; raise EnvironmentProblem on all ranks if a node cannot use or share it. A collective of
    ``hosts``."""
    mine = _leave_file(plan, folder, ranks)
    problem = hosts.ask(lambda: mine, lambda tried: [_first_problem(tried, folder)] * len(tried))
    if mine.file:
        (folder / mine.file).unlink(missing_ok=True)
    if problem:
        advice = "set --checkpoint-dir to a folder with enough space that all nodes share and can write to"
        raise EnvironmentProblem(f"checkpoints cannot be saved: {problem}", where=str(folder), do=advice)


def _first_problem(tried: Sequence[FolderTrial], folder: Path) -> str | None:
    problems = [one.problem for one in tried if one.problem]
    missing = [one.file for one in tried if one.file and not problems and not (folder / one.file).exists()]
    return next(chain(problems, (f"{file} of another node is not visible on {host_name()}" for file in missing)), None)


def _leave_file(plan: Plan, folder: Path, ranks: Ranks) -> FolderTrial:
    if int(os.environ.get("LOCAL_RANK", ranks.rank)):
        return FolderTrial()
    name = f"{PROBE}-rank{ranks.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe_file(folder / name)
        if ranks.is_first:
            check_space(plan, folder)
    except OSError as error:
        return FolderTrial(problem=f"rank {ranks.rank} on {host_name()}: {error.strerror}: {error.filename}")
    except EnvironmentProblem as error:
        return FolderTrial(file=name, problem=error.what)
    return FolderTrial(file=name)


def finalize(plan: Plan, step: int, path: Path, checksums: Mapping[str, str], base: WeightsOrigin | None) -> None:
    """Complete a checkpoint on disk: save its record, delete other files and rename the folder; raise OSError if
    that fails."""
    partial = partial_path(path)
    sizes = {file.name: file.stat().st_size for file in (partial / WEIGHTS).iterdir()}
    if missing := sorted(checksums.keys() - sizes.keys()):
        raise OSError(f"{missing[0]} is missing: all nodes need to see the same folder")
    for left in sizes.keys() - checksums.keys():  # by a save that was interrupted, and had more ranks
        (partial / WEIGHTS / left).unlink()
    files = {f"{WEIGHTS}/{name}": sizes[name] for name in sorted(checksums)}
    crc32 = {f"{WEIGHTS}/{name}": checksum for name, checksum in sorted(checksums.items())}
    flush_file(partial / WEIGHTS)
    recipe = plan.recipe
    record = CheckpointRecord(
        llmb_version=__version__,
        saved_at=now(),
        workload=recipe.workload,
        size=recipe.size,
        dtype=recipe.dtype,
        model=recipe.model,
        layout=recipe.layout,
        training=recipe.training,
        seed=plan.seed,
        step=step,
        consumed_samples=plan.samples_before(step),
        dataset=plan.dataset.packed if plan.dataset else None,
        origin=plan.origin,
        lora=plan.lora,
        base=base,
        files=files,
        crc32=crc32,
    )
    write_atomically(partial / RECORD, record.model_dump_json(indent=2) + "\n")
    flush_file(partial)
    partial.rename(path)
    flush_file(path.parent)


LONGEST_SAVE = timedelta(hours=6)
"""Time limit for all ranks to finish writing."""


@dataclass(frozen=True, slots=True)
class Save:
    """A save in progress. ``start_s`` is in seconds since 1970, ``began`` on the performance counter."""

    step: int
    path: Path
    start_s: float
    began: float
    blocked_s: float | None = None
    """Seconds for which training waited for the copy; None if it waited for the whole save."""


@dataclass(frozen=True, slots=True)
class Written:
    """The results of a rank's writes, and their size and duration."""

    results: list[WriteResult]
    transfer: RankTransfer


class Saver:
    """Saves the checkpoints of a plan. Every rank calls its methods after the same steps; separate process groups
    synchronize them."""

    def __init__(
        self, plan: Plan, folder: RunFolder, ranks: Ranks, stages: Stages, optimizers: Sequence[AdamW]
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
        self.staging = Staging()
        self.metadata = Metadata({})
        """Metadata of all tensors, on the first rank."""
        self.transfers: tuple[RankTransfer, ...] = ()
        """Transfers of all ranks in the last save, on the first rank."""
        if plan.save_checkpoint:
            per_node = ranks_of_node(ranks.world_size)
            self.hosts = Hosts(ranks.rank, ranks.world_size, per_node, CHECKPOINT_GROUP, LONGEST_SAVE)
            # The default folder, which is in the run folder, is created with the first checkpoint.
            check_shared_folder(plan, self.folder if plan.checkpoint_dir else folder.path, ranks, self.hosts)
            self.pieces = self._plan_writes()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self.pending is not None and not self.pending.done()

    def after_step(self, number: int) -> None:
        """Save if the plan saves after this step; else only ``finish`` a save that has ended."""
        if not self.busy:
            self.finish()
        if not self.plan.saves_after(number):
            return
        self.finish()
        path = self.folder / checkpoint_name(number + 1, self.plan.samples_before(number + 1))
        begun = Save(number + 1, path, time.time(), time.perf_counter())
        writer = Writer(partial_path(path) / WEIGHTS)
        state = local_elements(training_state(self.stages, self.optimizers, self.ranks.device), self.places)
        if number == self.plan.last_step:
            self._report(self._write(begun, writer, state))
        else:
            copy = self.staging.copy(state, self.ranks.device)
            begun = replace(begun, blocked_s=time.perf_counter() - begun.began)
            self.pending = self.thread.submit(self._write, begun, writer, copy)

    def finish(self) -> None:
        """Wait for the save in progress, if any, and log it; raise EnvironmentProblem or OSError if either fails."""
        if self.pending:
            pending, self.pending = self.pending, None
            self._report(pending.result())

    def _write(self, begun: Save, writer: Writer, state: dict[str, Tensor]) -> SaveLine:
        planner = self._planner(writer, state)
        try:
            write = partial(self._write_own, begun, writer, planner, self.pieces)
            self.hosts.ask(write, partial(self._complete, begun, writer))
        except OSError as error:
            if self.ranks.is_first:  # frees the space of the incomplete checkpoint
                shutil.rmtree(partial_path(begun.path), ignore_errors=True)
            self.hosts.ask(lambda: None, list)  # as soon as one rank ends, the launcher ends all
            raise cannot_save(begun.path.name, error) from error
        return SaveLine(self.ranks.rank, begun.step, begun.start_s, time.perf_counter() - begun.began)

    def _plan_writes(self) -> SavePlan:
        """Plan the writes of all ranks; return this rank's plan. A collective."""
        state = training_state(self.stages, self.optimizers, self.ranks.device)
        self.places = {**shard_places(state), **part_places(self.stages)}
        writer = Writer(self.folder)
        planner = self._planner(writer, local_elements(state, self.places))
        pieces: SavePlan = self.hosts.ask(planner.create_local_plan, partial(self._settle, writer, planner))
        return pieces

    def _planner(self, writer: Writer, state: dict[str, Tensor]) -> PartsSavePlanner:
        planner = PartsSavePlanner(self.places)
        planner.set_up_planner(state, writer.storage_meta(), self.ranks.is_first)
        writer.set_up_storage_writer(self.ranks.is_first)
        return planner

    def _settle(self, writer: Writer, planner: DefaultSavePlanner, proposed: list[SavePlan]) -> list[SavePlan]:
        """Plan each rank's writes; only one of a tensor's replicas is written. This takes 10 s for 170,000 pieces."""
        plans, self.metadata = planner.create_global_plan(proposed)
        return writer.prepare_global_plan(plans)

    def _write_own(self, begun: Save, writer: Writer, planner: DefaultSavePlanner, pieces: SavePlan) -> Written:
        began = time.perf_counter()
        results = _write_pieces(writer, planner, pieces)
        took_s, size = time.perf_counter() - began, sum(result.size_in_bytes for result in results)
        transfer = RankTransfer(rank=self.ranks.rank, size_bytes=size, duration_s=took_s, blocked_s=begun.blocked_s)
        return Written(results, transfer)

    def _complete(self, begun: Save, writer: Writer, written: list[Written]) -> list[None]:
        writer.finish(self.metadata, [each.results for each in written])
        self.transfers = tuple(each.transfer for each in written)
        finalize(self.plan, begun.step, begun.path, writer.checksums, self.base)
        return [None] * len(written)

    def _report(self, line: SaveLine) -> None:
        if self.ranks.is_first:
            sys.stdout.write(format_save_line(line) + "\n")
            took = checkpoint_time("save", line.start_s, line.duration_s, line.iteration, self.transfers)
            add_checkpoint_time(self.times, took)


def _write_pieces(writer: Writer, planner: DefaultSavePlanner, pieces: SavePlan) -> list[WriteResult]:
    return writer.write_data(planner.finish_plan(writer.prepare_local_plan(pieces)), planner).value()
