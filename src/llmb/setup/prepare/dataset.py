# SPDX-License-Identifier: Apache-2.0
"""Prepares the dataset for fine-tuning: samples, then packs for each sequence length, if they are missing."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from llmb.base.errors import UsageError, check_installed, itemized
from llmb.base.trust import check_links
from llmb.catalogue.catalogue import Catalogue
from llmb.catalogue.resolve import find_model, seq_lens_of, source_of
from llmb.jobs.locks import file_lock
from llmb.runs.checkpoints.checkpoint_files import damaged_files, file_checksum
from llmb.runs.checkpoints.prepared_data import RECORD, SPLITS, PackedDataset, PreparedFolders, Split
from llmb.runs.folder import writing
from llmb.setup.prepare.hub import DATASETS, OnBytes, fetch_dataset, fetch_model
from llmb.setup.prepare.packed_files import read_packed, tokenize, write_packed
from llmb.setup.prepare.sample_files import OnCount, SampleFiles, lines_file, read_samples_record, write_samples
from llmb.setup.prepare.tokenizer import LoadedTokenizer, checksum, load_tokenizer, tokenizer_file
from llmb.setup.prepare.training_samples import TEMPLATE, Files, split_files

Say = Callable[[str], object]
LOCK = ".lock"
PATIENCE_S = 2.0
MB = 10**6
FORCE = "pass --force to prepare the dataset again; without --source, its samples come from the hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """The dataset to prepare; None means the default."""

    workload: str
    size: str
    source: Path | None = None
    """A local file or folder; None for the hub."""
    tokenizer: Path | None = None
    """``tokenizer.json`` or its folder; None for the prepared model's tokenizer, else the hub's."""
    seq_lens: tuple[int, ...] = ()
    """The sequence lengths; empty for the lengths of all recipes of the size."""
    splits: tuple[Split, ...] = SPLITS
    force: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class PackedFolder:
    path: Path
    record: PackedDataset
    made: bool
    """False if an existing dataset is used."""


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    folder: Path
    samples: SampleFiles
    samples_made: bool
    packed: tuple[PackedFolder, ...]


def prepare_dataset(
    catalogue: Catalogue, request: DatasetRequest, folders: PreparedFolders, on_count: OnCount, say: Say
) -> PreparedDataset:
    """Prepare missing parts of a dataset, or all with ``force``.

    Raise UsageError, EnvironmentProblem, and errors as ``fetch_model`` does.
    """
    work = _Preparation(catalogue, request, folders, on_count, say)
    check_installed("preparing a dataset", "numpy", "tokenizers")
    if request.tokenizer is not None:
        tokenizer_file(request.tokenizer)  # raises before anything is downloaded
    check_links(work.folder)
    with file_lock(work.folder / LOCK, PATIENCE_S, "preparing this dataset"), writing(work.folder):
        samples, made = work.samples()
        return PreparedDataset(work.folder, samples, made, tuple(work.packed(samples)))


_CHECKSUMS = " (CRC-32 "


def local_source(path: Path, files: Files) -> str:
    """Describe a local source with the checksums of its files."""
    checksums = [file_checksum(file) for paths in files.values() for file in paths]
    return f"{path.absolute()}{_CHECKSUMS}{', '.join(checksums)})"


def _same_content(one: str, other: str) -> bool:
    contents = [text.partition(_CHECKSUMS)[2] for text in (one, other)]
    return one == other or (contents[0] != "" and contents[0] == contents[1])


class _Preparation:
    def __init__(
        self, catalogue: Catalogue, request: DatasetRequest, folders: PreparedFolders, on_count: OnCount, say: Say
    ) -> None:
        self.request, self.folders, self.on_count, self.say = request, folders, on_count, say
        self.vocab_size = find_model(catalogue, request.workload, request.size).vocab_size
        self.source = source_of(catalogue, request.workload, request.size)
        self.seq_lens = request.seq_lens or seq_lens_of(catalogue, request.workload, request.size)
        self.folder = folders.dataset(self.source.dataset)

    def samples(self) -> tuple[SampleFiles, bool]:
        """Return the samples, written if they do not exist or with ``force``, and whether they were written."""
        existing = None if self.request.force else read_samples_record(self.folder)
        if existing is not None:
            self._check_samples(existing)
            return existing, False
        if self.request.source is None:
            name = DATASETS[self.source.dataset].repository
            folder = fetch_dataset(self.source.dataset, self.folders, self._on_bytes(f"downloading {name}"))
            files, source = split_files(folder), f"{name}@{folder.name}"
        else:
            files = split_files(self.request.source)
            source = local_source(self.request.source, files)
        with self._temporary_folder() as temporary:
            return write_samples(self.folder, temporary, files, source, self.on_count), True

    def packed(self, samples: SampleFiles) -> Iterator[PackedFolder]:
        for split in dict.fromkeys(self.request.splits):
            folders = {
                length: self.folders.packed(self.source.dataset, self.source.model, split, length)
                for length in self.seq_lens
            }
            packed = {length: dataset for length, path in folders.items() if (dataset := self._kept(path, samples))}
            missing = {length: path for length, path in folders.items() if length not in packed}
            records = {**packed, **(self._pack(samples, split, missing) if missing else {})}
            for length, path in folders.items():
                yield PackedFolder(path, records[length], length in missing)

    def _on_bytes(self, what: str) -> OnBytes:
        return lambda done, total: self.on_count(f"{what}, MB", done // MB, -(-total // MB))

    @contextmanager
    def _temporary_folder(self) -> Iterator[Path]:
        path = self.folders.temporary / f"dataset-{self.source.dataset}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _check_samples(self, existing: SampleFiles) -> None:
        path, name = self.request.source, self.source.dataset
        if path is not None and not _same_content(local := local_source(path, split_files(path)), existing.source):
            what = f"{name} was prepared from {existing.source}, not from {local}"
            raise UsageError(what, where=str(self.folder), do=FORCE)
        if existing.template != TEMPLATE:
            what = f"{name} is prepared with the template {existing.template}, not {TEMPLATE}"
            raise UsageError(what, where=str(self.folder), do=FORCE)
        self._check_checksums(self.folder, existing.crc32)

    def _check_checksums(self, folder: Path, crc32: dict[str, str]) -> None:
        if self.request.verify and (damage := list(damaged_files(folder, crc32, threads=2))):
            raise UsageError(f"prepared files are damaged:{itemized(damage)}", where=str(folder), do=FORCE)

    def _kept(self, folder: Path, samples: SampleFiles) -> PackedDataset | None:
        record = None if self.request.force else read_packed(folder)
        if record is None:
            return None
        expected = {"source": samples.source, "template": samples.template}
        if file := self._local_tokenizer():
            expected["tokenizer"] = checksum(file)
        has = {"source": record.source, "template": record.template, "tokenizer": record.tokenizer.sha256}
        for name, value in expected.items():
            if has[name] != value:
                what = f"these packs were made with another {name}: {has[name]}, not {value}"
                raise UsageError(what, where=str(folder), do=FORCE)
        self._check_checksums(folder, record.crc32)
        return record

    def _local_tokenizer(self) -> Path | None:
        if self.request.tokenizer is not None:
            return tokenizer_file(self.request.tokenizer)
        context = self.folders.model(self.source.model) / "context"
        return tokenizer_file(context) if context.is_dir() else None

    @cached_property
    def _tokenizer(self) -> LoadedTokenizer:
        name, file = self.source.model, self._local_tokenizer()
        if file is None:
            on_bytes = self._on_bytes(f"downloading the tokenizer of {name}")
            folder = fetch_model(name, self.source.page, self.folders, on_bytes, weights=False)
            file = tokenizer_file(folder)
        return load_tokenizer(file, name, self.vocab_size)

    def _pack(self, samples: SampleFiles, split: Split, folders: Mapping[int, Path]) -> dict[int, PackedDataset]:
        loaded, total, made = self._tokenizer, samples.samples[split], {}
        lines = lines_file(self.folder, split)
        with self._temporary_folder() as temporary:
            documents = tokenize(
                lines, temporary, loaded, lambda done: self.on_count(f"tokenizing {split}", done, total)
            )
            for seq_len, place in folders.items():
                folder = place.resolve()  # a link to another disk stays
                if folder.is_dir():
                    (folder / RECORD).unlink(missing_ok=True)  # first: without it, the rest is not a dataset
                    shutil.rmtree(folder)
                self.say(f"packing {split} to {seq_len}")
                made[seq_len] = write_packed(folder, documents, samples, loaded, split, seq_len, self.source.dataset)
        return made
