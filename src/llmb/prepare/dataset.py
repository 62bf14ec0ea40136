# SPDX-License-Identifier: Apache-2.0
"""Prepares the dataset of a fine-tuning: samples, then packs for each sequence length, or finds both prepared."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llmb.catalogue.load import Catalogue
from llmb.catalogue.published import Source
from llmb.catalogue.resolve import find_model, find_workload
from llmb.checkpoints.checksums import damaged_files, file_checksum
from llmb.errors import UsageError, itemized
from llmb.jobs.locks import file_lock
from llmb.prepare.hub import DATASETS, OnBytes, fetch_dataset, fetch_tokenizer
from llmb.prepare.needed import check_installed
from llmb.prepare.packed_files import read_packed, tokenize, write_packed
from llmb.prepare.sample_files import OnCount, SampleFiles, lines_file, read_samples_record, write_samples
from llmb.prepare.samples import TEMPLATE
from llmb.prepare.sources import Files, split_files
from llmb.prepare.tokenizer import LoadedTokenizer, checksum, load_tokenizer, tokenizer_file
from llmb.prepared.folders import PreparedFolders
from llmb.prepared.packed_dataset import RECORD, SPLITS, PackedDataset, Split
from llmb.runs.folder import cannot_write
from llmb.trust import check_links

Say = Callable[[str], object]
LOCK = ".lock"
PATIENCE_S = 2.0
MB = 10**6
FORCE = "--force prepares it again, and replaces what exists"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRequest:
    """What to prepare; None means the default."""

    workload: str
    size: str
    source: Path | None = None
    """A local file or folder; None for the hub."""
    tokenizer: Path | None = None
    """``tokenizer.json`` or its folder; None for that of the prepared model, else of the hub."""
    seq_lens: tuple[int, ...] = ()
    """Empty for those of all recipes of the size."""
    splits: tuple[Split, ...] = SPLITS
    force: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class PackedFolder:
    path: Path
    record: PackedDataset
    made: bool
    """False if it had been prepared before."""


@dataclass(frozen=True, slots=True)
class PreparedDataset:
    folder: Path
    samples: SampleFiles
    samples_made: bool
    packed: tuple[PackedFolder, ...]


@dataclass(frozen=True, slots=True)
class _Work:
    """A request with all that is derived from it."""

    request: DatasetRequest
    source: Source
    folders: PreparedFolders
    seq_lens: tuple[int, ...]
    vocab_size: int
    on_count: OnCount
    say: Say

    @property
    def folder(self) -> Path:
        return self.folders.dataset(self.source.dataset)

    def on_bytes(self, what: str) -> OnBytes:
        return lambda done, total: self.on_count(f"{what}, MB", done // MB, -(-total // MB))

    def packed(self, split: Split, seq_len: int) -> Path:
        return self.folders.packed(self.source.dataset, self.source.model, split, seq_len)


def source_of(catalogue: Catalogue, workload: str, size: str) -> Source:
    """Where data and weights of a fine-tuning come from. Raises UsageError for a workload without."""
    sources = find_workload(catalogue, workload).sources
    if size not in sources:
        fine_tuning = [name for name, found in catalogue.workloads.items() if found.sources]
        what = f"{workload} {size} starts from nothing prepared: it is not fine-tuning"
        raise UsageError(what, choices=fine_tuning, do="give one of these with --workload")
    return sources[size]


def seq_lens_of(catalogue: Catalogue, workload: str, size: str) -> tuple[int, ...]:
    """Sequence lengths of all recipes of a size, from the shortest."""
    tables = find_workload(catalogue, workload).layouts
    return tuple(sorted({table.seq_len for table in tables if table.size == size}))


def prepare_dataset(
    catalogue: Catalogue, request: DatasetRequest, folders: PreparedFolders, on_count: OnCount, say: Say
) -> PreparedDataset:
    """Makes what is missing; what is prepared already is checked and kept, unless ``force`` is set.

    Raises UsageError for a source, a tokenizer or prepared files that are not what they should be, and
    EnvironmentProblem if writing fails or another process prepares the same dataset.
    """
    model = find_model(catalogue, request.workload, request.size)
    check_installed("preparing a dataset", "numpy", "tokenizers")
    if request.tokenizer is not None:
        tokenizer_file(request.tokenizer)  # is there, before anything is downloaded
    work = _Work(
        request=request,
        source=source_of(catalogue, request.workload, request.size),
        folders=folders,
        seq_lens=request.seq_lens or seq_lens_of(catalogue, request.workload, request.size),
        vocab_size=model.vocab_size,
        on_count=on_count,
        say=say,
    )
    check_links(work.folder)
    with file_lock(work.folder / LOCK, PATIENCE_S, "preparing this dataset"):
        try:
            samples, made = _samples(work)
            return PreparedDataset(work.folder, samples, made, _all_packed(work, samples))
        except OSError as error:
            raise cannot_write(work.folder, error) from error


@contextmanager
def _temporary_folder(work: _Work) -> Iterator[Path]:
    """Without what a killed process left in it; removed in the end. Made only where there is something to write."""
    path = work.folders.temporary / f"dataset-{work.source.dataset}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _samples(work: _Work) -> tuple[SampleFiles, bool]:
    """The samples, and whether they were made now."""
    request = work.request
    existing = None if request.force else read_samples_record(work.folder)
    if existing is not None:
        _check_samples(work, existing)
        return existing, False
    if request.source is None:
        name = DATASETS[work.source.dataset].repository
        folder = fetch_dataset(work.source.dataset, work.folders, work.on_bytes(f"downloading {name}"), work.say)
        files, source = split_files(folder), f"{name}@{folder.name}"
    else:
        files = split_files(request.source)
        source = local_source(request.source, files)
    with _temporary_folder(work) as temporary:
        return write_samples(work.folder, temporary, files, source, work.on_count), True


_CHECKSUMS = " (CRC-32 "


def local_source(path: Path, files: Files) -> str:
    """A local source with the checksums of its files: another content is another source."""
    checksums = [file_checksum(file) for named in files.values() for file in named]
    return f"{path.absolute()}{_CHECKSUMS}{', '.join(checksums)})"


def _same_content(one: str, other: str) -> bool:
    """Whether two sources are equal, or local ones of the same content at two paths."""
    contents = [text.partition(_CHECKSUMS)[2] for text in (one, other)]
    return one == other or (contents[0] != "" and contents[0] == contents[1])


def _check_samples(work: _Work, existing: SampleFiles) -> None:
    """Raises UsageError if they were made from something else, or are damaged."""
    given = work.request.source
    if given is not None and not _same_content(wanted := local_source(given, split_files(given)), existing.source):
        what = f"{work.source.dataset} is prepared from {existing.source}, not from {wanted}"
        raise UsageError(what, where=str(work.folder), do=FORCE)
    if existing.template != TEMPLATE:
        what = f"{work.source.dataset} is prepared with the template {existing.template}, not {TEMPLATE}"
        raise UsageError(what, where=str(work.folder), do=FORCE)
    _check_checksums(work, work.folder, existing.crc32)


def _check_checksums(work: _Work, folder: Path, crc32: dict[str, str]) -> None:
    if work.request.verify and (damage := list(damaged_files(folder, crc32, threads=2))):
        raise UsageError(f"prepared files are damaged:{itemized(damage)}", where=str(folder), do=FORCE)


def _all_packed(work: _Work, samples: SampleFiles) -> tuple[PackedFolder, ...]:
    found, tokenizer = [], _Tokenizer(work)
    for split in dict.fromkeys(work.request.splits):
        existing = {n: work.packed(split, n) for n in work.seq_lens}
        kept = {n: _kept(work, folder, samples, tokenizer) for n, folder in existing.items()}
        missing = [n for n, record in kept.items() if record is None]
        made = _pack_split(work, samples, tokenizer, split, missing) if missing else {}
        for n, folder in existing.items():
            found.append(PackedFolder(folder, made.get(n) or kept[n], n in made))  # type: ignore[arg-type]
    return tuple(found)


def _kept(work: _Work, folder: Path, samples: SampleFiles, tokenizer: "_Tokenizer") -> PackedDataset | None:
    """The packed dataset in ``folder`` if it is complete and made from ``samples``. Raises UsageError if made from
    something else, or if damaged.
    """
    record = None if work.request.force else read_packed(folder)
    if record is None:
        return None
    wanted = {"source": samples.source, "template": samples.template}
    if tokenizer.file is not None:
        wanted["tokenizer"] = checksum(tokenizer.file)
    has = {"source": record.source, "template": record.template, "tokenizer": record.tokenizer.sha256}
    for name, value in wanted.items():
        if has[name] != value:
            what = f"these packs were made from another {name}: {has[name]}, not {value}"
            raise UsageError(what, where=str(folder), do=FORCE)
    _check_checksums(work, folder, record.crc32)
    return record


@dataclass(slots=True)
class _Tokenizer:
    """The tokenizer of the request, loaded when it is first needed."""

    work: _Work
    loaded: LoadedTokenizer | None = field(default=None)

    @property
    def file(self) -> Path | None:
        """None if it has to come from the hub."""
        if self.work.request.tokenizer is not None:
            return tokenizer_file(self.work.request.tokenizer)
        context = self.work.folders.model(self.work.source.model) / "context"
        return tokenizer_file(context) if context.is_dir() else None

    def load(self) -> LoadedTokenizer:
        if self.loaded is None:
            file = self.file
            if file is None:
                name = self.work.source.model
                on_bytes = self.work.on_bytes(f"downloading the tokenizer of {name}")
                folder = fetch_tokenizer(name, self.work.source.page, self.work.folders, on_bytes, self.work.say)
                file = tokenizer_file(folder)
            self.loaded = load_tokenizer(file, self.work.source.model, self.work.vocab_size)
        return self.loaded


def _pack_split(
    work: _Work, samples: SampleFiles, tokenizer: _Tokenizer, split: Split, seq_lens: list[int]
) -> dict[int, PackedDataset]:
    loaded, total = tokenizer.load(), samples.samples[split]
    path = lines_file(work.folder, split)
    made = {}
    with _temporary_folder(work) as temporary:
        documents = tokenize(path, temporary, loaded, lambda done: work.on_count(f"tokenizing {split}", done, total))
        for seq_len in seq_lens:
            folder = work.packed(split, seq_len).resolve()  # a link to another disk stays
            if folder.is_dir():
                (folder / RECORD).unlink(missing_ok=True)  # first: without it, the rest is not a dataset
                shutil.rmtree(folder)
            work.say(f"packing {split} to {seq_len}")
            made[seq_len] = write_packed(folder, documents, samples, loaded, split, seq_len, work.source.dataset)
    return made
