# SPDX-License-Identifier: Apache-2.0
"""Gives a run's files the names and content that the recipe's document describes, so that its commands work; and checks
the checkpoints and datasets that the suite prepares in NeMo's format.

The log is a hard link if possible, because ``grep -r`` does not follow symbolic links.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.launch.jobspec.spec import JobSpec
from llmb.readers.profiles import NCCL_LOG_END
from llmb.runs.checkpoints.checkpoint import RECORD, saved_checkpoints
from llmb.runs.checkpoints.nemo_folder import BACKEND_FILE, MODEL_FILE, is_nemo_folder
from llmb.runs.checkpoints.prepared_data import PreparedFolders
from llmb.runs.experiment import recorded_suffix
from llmb.runs.folder import RunFolder
from llmb.runs.plan import Plan
from llmb.runs.record import RunRecord

COPIED_BYTES = 1 << 24
NO_ACCOUNT = "default"
"""The account in the log's name if the job specifies none."""


def add_documented_trace(folder: RunFolder, plan: Plan) -> None:
    """Append NCCL's logs to the log of a traced run if the recipe's document expects this; only warn if it fails."""
    document = plan.recipe.document
    if not plan.nccl_trace or document is None or not document.nccl_trace_in_log:
        return
    try:
        with folder.log.open("ab") as log:
            for trace in sorted(folder.nccl_trace.glob(f"*{NCCL_LOG_END}")):
                with trace.open("rb") as lines:
                    shutil.copyfileobj(lines, log, COPIED_BYTES)
    except OSError as error:
        sys.stderr.write(f"llmb: warning: {folder.log} does not have all of NCCL's logs: {error.strerror}\n")


def link_as_documented(folder: RunFolder, spec: JobSpec, record: RunRecord) -> None:
    """Link a started run's files below ``documented_root``, if it is set; only warn if a link cannot be created."""
    if spec.documented_root and record.attempts:
        # NeMo-Run's name: the suite's parser shows the part between the account and the number of the task.
        account, job_id = spec.flags.get("account") or NO_ACCOUNT, record.attempts[0].job.job_id
        log = f"log-{account}.{folder.path.name}_{job_id}_0.out"
        try:
            _link_missing(Path(spec.documented_root), folder, record.plan, log)
        except OSError as error:
            sys.stderr.write(f"llmb: warning: {error.filename2 or error.filename} is not linked: {error.strerror}\n")


def _link_missing(root: Path, folder: RunFolder, plan: Plan, log: str) -> None:
    document = plan.recipe.document
    if document is None or document.results is None:
        return
    results, recipe = document.results, plan.recipe
    names = recipe.model_dump(include={"workload", "size", "dtype", "release"}) | {
        "gpus": recipe.scale,
        "seconds": folder.path.parent.name.rpartition("_")[2],
        "recorded": recorded_suffix(plan),
    }
    names["experiment"] = results.experiment.format(**names)
    first, *others = (root / template.format(**names) for template in results.folders)
    folder.log.touch()
    for above in (first, *others):
        _link_file(above / log, folder.log)
    if results.nsys_profile and plan.profile:
        _link_folder(first / results.nsys_profile, folder.nsys_profile)
    if results.checkpoint:
        for saved in saved_checkpoints(folder.checkpoints_of(plan)):
            _link_folder(first / results.checkpoint.format(samples=saved.record.consumed_samples), saved.path)


def _link_file(link: Path, file: Path) -> None:
    if not os.path.lexists(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.hardlink_to(file)
        except OSError:  # a file system without hard links
            _link_folder(link, file)


def _link_folder(link: Path, target: Path) -> None:
    """Create a symbolic link that stays valid if the file system is mounted elsewhere."""
    if not os.path.lexists(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))


NemoState = Literal["complete", "missing", "incomplete", "of llmb"]
COMMON_FILE = "weights/common.pt"
"""Megatron-Core (0.7 to 0.18) writes it before the shards, and ``BACKEND_FILE`` last
(core/dist_checkpointing/serialization.py)."""
SAMPLES = ("training.jsonl", "validation.jsonl", "test.jsonl")


@dataclass(frozen=True, slots=True)
class NemoItem:
    """The state of a checkpoint or a dataset in NeMo's format."""

    name: str
    path: Path
    state: NemoState
    problem: str | None = None
    """The problem if the state is ``incomplete`` or ``of llmb``."""


def nemo_items(folders: PreparedFolders, model: str, dataset: str, seq_len: int) -> tuple[NemoItem, ...]:
    """Return the states of checkpoint ``model`` and of ``dataset``, packed to ``seq_len`` tokens for the model."""
    return _checkpoint(folders, model), _dataset(folders, model, dataset, seq_len)


def _checkpoint(folders: PreparedFolders, model: str) -> NemoItem:
    path, name = folders.model(model), f"models/{model}"
    if (path / RECORD).is_file():
        problem = "it is a checkpoint of llmb, which NeMo cannot read; use separate install roots for llmb and NeMo"
        return NemoItem(name, path, "of llmb", problem)
    if not is_nemo_folder(path):
        return NemoItem(name, path, "missing")
    if lacking := list(_lacking(path)):
        return NemoItem(name, path, "incomplete", f"without {', '.join(lacking)}: its import was aborted")
    return NemoItem(name, path, "complete")


def _lacking(path: Path) -> Iterator[str]:
    yield from (name for name in (MODEL_FILE, BACKEND_FILE, COMMON_FILE) if not (path / name).is_file())
    shards = list((path / "weights").glob("*.distcp"))
    if not shards:
        yield "weights/*.distcp"
    yield from (f"content in weights/{shard.name}" for shard in shards if not shard.stat().st_size)


def _dataset(folders: PreparedFolders, model: str, dataset: str, seq_len: int) -> NemoItem:
    """A dataset with any file of samples is incomplete, not missing, because NeMo can pack the samples."""
    path, packed = folders.dataset(dataset), f"packed/{model.replace('/', '--')}"
    name = f"datasets/{dataset}"
    files = (*SAMPLES, f"{packed}/training_{seq_len}.npy", f"{packed}/{seq_len}_metadata.jsonl")
    lacking = [item for item in files if not (path / item).is_file()]
    if not lacking:
        return NemoItem(name, path, "complete")
    if set(SAMPLES) <= set(lacking):
        return NemoItem(name, path, "missing")
    return NemoItem(name, path, "incomplete", f"without {', '.join(lacking)}")
