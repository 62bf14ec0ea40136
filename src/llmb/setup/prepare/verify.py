# SPDX-License-Identifier: Apache-2.0
"""Verifies what fine-tuning needs: required and existing parts, and the commands that prepare the rest."""

import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from llmb.base.errors import UsageError
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.published import Source
from llmb.catalogue.records import Model
from llmb.catalogue.resolve import find_model, find_workload, releases_of, seq_lens_of, source_of
from llmb.catalogue.throughput import parameter_count
from llmb.launch.documents.documented_paths import NemoItem, nemo_items
from llmb.launch.documents.launch_scripts import find_launch_script
from llmb.runs.checkpoints.checkpoint import RECORD, model_differences, read_checkpoint
from llmb.runs.checkpoints.checkpoint_files import BLOCK, damaged_files, partial_path
from llmb.runs.checkpoints.conversion_request import OnProgress, finished_files
from llmb.runs.checkpoints.nemo_folder import is_nemo_folder
from llmb.runs.checkpoints.prepared_data import SPLITS, PackedDataset, PreparedFolders, Split
from llmb.setup.prepare.base_weights import PUBLISHED_BYTES
from llmb.setup.prepare.packed_files import read_packed
from llmb.setup.prepare.sample_files import SampleFiles, read_samples_record

State = Literal["complete", "missing", "incomplete", "damaged", "not needed"]


@dataclass(frozen=True, slots=True)
class Item:
    """A folder that preparations create; the command ``make`` completes it, and ``repair`` replaces a damaged one."""

    name: str
    path: Path
    state: State
    make: str = ""
    repair: str = ""
    bytes: int = 0
    documented_gib: float | None = None
    source: str | None = None
    """The source from which the folder was created."""
    problem: str | None = None
    """The problem of the existing files."""

    @property
    def command(self) -> str | None:
        """Return the command that completes the item; None if it is complete or not needed."""
        return {"missing": self.make, "incomplete": self.make, "damaged": self.repair}.get(self.state)


@dataclass(frozen=True, slots=True)
class Verification:
    """The state of all items; ``needed_bytes`` is an estimate of the space for weights that are not complete."""

    workload: str
    size: str
    folders: PreparedFolders
    items: tuple[Item, ...]
    free_bytes: int
    needed_bytes: int
    checksums: bool
    """True if all files were read; otherwise only their sizes were compared."""
    nemo: tuple[NemoItem, ...] = ()
    """The prepared checkpoint and dataset in NeMo's format; empty if no launch script trains this size."""

    @property
    def lacking(self) -> tuple[Item, ...]:
        return tuple(item for item in self.items if item.command)


@dataclass(frozen=True, slots=True)
class _Target:
    workload: str
    size: str
    source: Source
    model: Model
    folders: PreparedFolders

    def command(self, what: str, *options: str) -> str:
        local = "--source FOLDER" if what == "checkpoint" and self.source.page is None else ""
        words = ("llmb prepare", what, "-w", self.workload, "-s", self.size, local, *options)
        return " ".join(word for word in words if word)


def verify_prepared(
    catalogue: Catalogue, workload: str, size: str, folders: PreparedFolders, on_progress: OnProgress | None
) -> Verification:
    """Compare file sizes with records; with ``on_progress``, also checksums.

    Raise UsageError, or OSError or ValueError for an unreadable record.
    """
    source, model = source_of(catalogue, workload, size), find_model(catalogue, workload, size)
    target = _Target(workload, size, source, model, folders)
    documented = find_workload(catalogue, workload).checkpoints.get(size)
    dataset = target.source.dataset
    path = target.folders.dataset(dataset)
    results = [
        _checkpoint(target, documented.size_gb if documented else None),
        _dataset_item(target, f"datasets/{dataset}", path, read_samples_record, target.command("dataset", "--force")),
        *(_packed(target, split, length) for length in seq_lens_of(catalogue, workload, size) for split in SPLITS),
    ]
    if on_progress:
        results = list(_read(results, on_progress))
    items = (*(item for item, _ in results), *_others(target))
    left = PUBLISHED_BYTES * parameter_count(model)[0] - items[0].bytes
    existing = next(place for place in (folders.path, *folders.path.parents) if place.exists())
    return Verification(
        workload=workload,
        size=size,
        folders=folders,
        items=items,
        free_bytes=shutil.disk_usage(existing).free,
        needed_bytes=max(left, 0) if items[0].command else 0,
        checksums=on_progress is not None,
        nemo=_nemo_items(catalogue, target),
    )


def _nemo_items(catalogue: Catalogue, target: _Target) -> tuple[NemoItem, ...]:
    releases = releases_of(find_workload(catalogue, target.workload), target.size)
    if not any(find_launch_script(target.workload, target.size, release) for release in releases):
        return ()
    lengths = seq_lens_of(catalogue, target.workload, target.size)
    documented = [nemo_items(target.folders, target.source.model, target.source.dataset, length) for length in lengths]
    checkpoint, dataset = max(documented, key=lambda items: items[1].state == "complete")
    return checkpoint, dataset


_Reading = tuple[Item, Mapping[str, str]]
"""An item, and the checksums of its files."""


def _checkpoint(target: _Target, documented_gib: float | None) -> _Reading:
    path, make = target.folders.model(target.source.model), target.command("checkpoint")
    repair = f"rm -r {shlex.quote(str(path))} && {make}"
    item = Item(f"models/{target.source.model}", path, "missing", make, repair, documented_gib=documented_gib)
    if not path.exists():
        partial = partial_path(path)
        if not finished_files(partial):
            return item, {}
        problem = "the import was interrupted; the command resumes it"
        return replace(item, state="incomplete", bytes=_size_of(partial), problem=problem), {}
    if is_nemo_folder(path) and not (path / RECORD).is_file():
        problem = "it is a checkpoint of NeMo, for the reference suite's own software"
        again = target.command("checkpoint", f"--source {shlex.quote(str(path))}")
        move = f"set LLMB_INSTALL to another folder, then: {again}"
        return replace(item, state="missing", make=move, bytes=_size_of(path), problem=problem), {}
    try:
        record = read_checkpoint(path).record
    except UsageError as error:
        return replace(item, state="damaged", bytes=_size_of(path), problem=" ".join(error.what.split())), {}
    size = sum(record.files.values())
    if differences := list(model_differences(target.model, record.model)):
        return replace(item, state="damaged", bytes=size, problem=f"it is another model: {differences[0]}"), {}
    source = record.imported_from.path if record.imported_from else f"a run of {record.workload}"
    return replace(item, state="complete", bytes=size, source=source), record.crc32


def _packed(target: _Target, split: Split, seq_len: int) -> _Reading:
    source = target.source
    path = target.folders.packed(source.dataset, source.model, split, seq_len)
    name = f"datasets/{source.dataset}/packed/{path.parent.name}/{path.name}"
    # Not --force: that makes the samples again, too, and from the hub if they came from elsewhere.
    only = target.command("dataset", f"--seq-len {seq_len}", f"--split {split}")
    return _dataset_item(target, name, path, read_packed, f"rm -r {shlex.quote(str(path))} && {only}")


def _dataset_item(
    target: _Target, name: str, path: Path, read: Callable[[Path], SampleFiles | PackedDataset | None], repair: str
) -> _Reading:
    item = Item(name, path, "missing", target.command("dataset"), repair)
    try:
        record = read(path)
    except UsageError as error:
        return replace(item, state="damaged", problem=error.what), {}
    if record is None:
        return item, {}
    size = sum(record.files.values())
    return replace(item, state="complete", bytes=size, source=record.source), record.crc32


def _others(target: _Target) -> Iterator[Item]:
    for path in (target.folders.hub, target.folders.temporary):
        yield Item(path.name, path, "not needed", bytes=_size_of(path))


def _read(items: list[_Reading], on_progress: OnProgress) -> Iterator[_Reading]:
    total = sum(item.bytes for item, checksums in items if checksums)
    read_bytes = 0

    def on_block() -> None:
        nonlocal read_bytes
        read_bytes = min(read_bytes + BLOCK, total - 1)  # the last block of a file is smaller
        on_progress(read_bytes, total)

    for item, checksums in items:
        damaged = list(damaged_files(item.path, checksums, threads=os.cpu_count() or 1, on_block=on_block))
        yield (_damaged(item, damaged) if damaged else item), checksums
    on_progress(total, total)


def _damaged(item: Item, damaged: list[str]) -> Item:
    more = f", and {len(damaged) - 1} more" if damaged[1:] else ""
    return replace(item, state="damaged", problem=f"{damaged[0]}{more}")


def _size_of(folder: Path) -> int:
    sizes = ((Path(place) / name).lstat().st_size for place, _, names in os.walk(folder) for name in names)
    return sum(sizes)
