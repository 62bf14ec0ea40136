# SPDX-License-Identifier: Apache-2.0
"""The samples of a dataset on disk: one JSON line each, in three splits, with indexes, as in NeMo's SQuAD."""

import json
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Literal, TypeVar

from pydantic import ValidationError

from llmb import __version__
from llmb.base.errors import UsageError
from llmb.base.input_files import MOST_JSON_BYTES, read_regular
from llmb.catalogue.records import Record
from llmb.runs.checkpoints.checkpoint_files import ChecksumWriter, file_checksum
from llmb.runs.checkpoints.prepared_data import SPLITS, PackedDataset, Split, incomplete_files
from llmb.runs.record import now
from llmb.setup.prepare.training_samples import TEMPLATE, DatasetSample, Files, read_samples

RECORD = "samples.json"
SEED = 1234
"""Seed of the permutation that splits are drawn with, as in NeMo: the same source yields the same files."""
SHARE = 20
"""One in this many training samples is held out for each other split that is drawn from them."""
EVERY = 1000
"""Number of samples between two reports of progress."""
NEWLINE = 10
INDEX_VERSION = "0.2"
OnCount = Callable[[str, int, int | None], object]
"""A function that is called with the activity, the number of samples or megabytes done, and the total, if known."""


class SampleFiles(Record):
    """The content of ``samples.json``, which is written last."""

    schema_version: Literal[1] = 1
    llmb_version: str
    prepared_at: str
    source: str
    template: str
    split_rule: str
    samples: dict[Split, int]
    without_answer: int
    """The number of samples that were dropped because the source has no answer for them."""
    files: dict[str, int]
    """The size of each file in bytes, by name."""
    crc32: dict[str, str]


def lines_file(folder: Path, split: Split) -> Path:
    return folder / f"{split}.jsonl"


def read_samples_record(folder: Path) -> SampleFiles | None:
    return read_prepared(folder / RECORD, SampleFiles)


Prepared = TypeVar("Prepared", SampleFiles, PackedDataset)


def read_prepared(path: Path, shape: type[Prepared]) -> Prepared | None:
    """Read a record, if any. Raise UsageError if it is invalid or its files are incomplete, OSError if unreadable."""
    if not path.is_file():
        return None
    do = "run 'llmb prepare dataset' again with --force and the same --source"
    try:
        record = shape.model_validate_json(read_regular(path, MOST_JSON_BYTES))
    except ValidationError as error:
        raise UsageError("this version of llmb cannot read the record", where=str(path), do=do) from error
    for problem in incomplete_files(path.parent, record.files):
        raise UsageError(problem, where=str(path.parent), do=do)
    return record


def write_samples(folder: Path, temporary: Path, files: Files, source: str, on_count: OnCount) -> SampleFiles:
    """Write the samples of ``files``; ``temporary`` is an empty folder.

    Raise UsageError for invalid samples, EnvironmentProblem without a package, OSError.
    """
    (folder / RECORD).unlink(missing_ok=True)  # until the end, the files are inconsistent
    roles, rule = roles_of(files)
    without_answer = 0
    samples: dict[Split, int] = {}
    sizes: dict[str, int] = {}
    checksums: dict[str, str] = {}
    for origin, parts in roles.items():
        collected = temporary / f"{origin}.jsonl"
        starts, unanswered = _collect(files[origin], collected, on_count)
        without_answer += unanswered
        for split, order in _drawn(parts, len(starts) - 1).items():
            if not len(order):
                what = f"no sample is left for {split}: the number of samples with an answer is only {len(starts) - 1}"
                raise UsageError(what, where=", ".join(map(str, files[origin])))
            path = lines_file(folder, split)
            samples[split] = len(order)
            checksums[path.name] = _write_lines(path, _picked(collected, starts, order), split)
            checksums |= _write_index(path)
        collected.unlink()
    for name in checksums:
        sizes[name] = (folder / name).stat().st_size
    record = SampleFiles(
        llmb_version=__version__,
        prepared_at=now(),
        source=source,
        template=TEMPLATE,
        split_rule=rule,
        samples={split: samples[split] for split in SPLITS},
        without_answer=without_answer,
        files=sizes,
        crc32=checksums,
    )
    with ReplacingFile(folder / RECORD) as stream:  # a random temporary name would remain after a kill
        stream.write((record.model_dump_json(indent=2) + "\n").encode())
    return record


def roles_of(splits: Iterable[Split]) -> tuple[dict[Split, tuple[Split, ...]], str]:
    """Return the splits to draw from each split of a source, as NeMo does, and a description of this rule."""
    match sorted(splits):
        case ["test", "training", "validation"]:
            return {split: (split,) for split in SPLITS}, "splits are those of the source"
        case ["training", "validation"]:
            rule = f"test is the source's validation; validation is one in {SHARE} of its training samples"
            return {"training": ("validation", "training"), "validation": ("test",)}, rule
        case ["test", "training"]:
            rule = f"validation is one in {SHARE} of the source's training samples"
            return {"training": ("validation", "training"), "test": ("test",)}, rule
        case _:
            rule = f"validation and test are one in {SHARE} of the source's samples each"
            return {"training": ("validation", "test", "training")}, rule


def _collect(paths: Iterable[Path], target: Path, on_count: OnCount) -> tuple[list[int], int]:
    starts, unanswered = [0], 0
    with target.open("wb") as stream:
        for path in paths:
            for sample in read_samples(path):
                if sample is None:
                    unanswered += 1
                    continue
                starts.append(starts[-1] + stream.write(_line(sample, "test")))
                if len(starts) % EVERY == 0:
                    on_count("reading samples", len(starts) - 1, None)
    return starts, unanswered


def _drawn(parts: tuple[Split, ...], count: int) -> Mapping[Split, Sequence[int]]:
    """The permutation and the rounding are as in ``datasets.Dataset.train_test_split``, which NeMo calls."""
    import numpy as np

    if len(parts) == 1:
        return {parts[0]: range(count)}
    order = np.random.default_rng(SEED).permutation(count).tolist()
    share = -(-count // SHARE)
    places = {split: order[n * share : (n + 1) * share] for n, split in enumerate(parts[:-1])}
    return {**places, parts[-1]: order[share * (len(parts) - 1) :]}


def _picked(path: Path, starts: list[int], order: Iterable[int]) -> Iterator[DatasetSample]:
    with path.open("rb") as stream:
        for number in order:
            stream.seek(starts[number])
            yield parse_line(stream.read(starts[number + 1] - starts[number]))


def _line(sample: DatasetSample, split: Split) -> bytes:
    """Format a sample as NeMo does: only the test split keeps alternative answers."""
    values: dict[str, object] = {"input": sample.input, "output": sample.output}
    if split == "test" and sample.original_answers:
        values["original_answers"] = sample.original_answers
    return json.dumps(values).encode() + b"\n"


def parse_line(line: bytes) -> DatasetSample:
    """Parse a line that ``_line`` formatted."""
    values = json.loads(line)
    return DatasetSample(values["input"], values["output"], tuple(values.get("original_answers", ())))


def _write_lines(path: Path, samples: Iterable[DatasetSample], split: Split) -> str:
    with ReplacingFile(path) as stream:
        for sample in samples:
            stream.write(_line(sample, split))
    return stream.checksum


def _write_index(path: Path) -> dict[str, str]:
    """The metadata has NeMo's form: a pickled dictionary."""
    import numpy as np

    lengths = np.fromiter(map(len, _read_lines(path)), dtype=np.int64)
    array, info = path.with_name(f"{path.name}.idx.npy"), path.with_name(f"{path.name}.idx.info")
    with ReplacingFile(array) as stream:
        np.save(stream, np.cumsum(lengths) - 1)
    with ReplacingFile(info) as noted:
        pickle.dump({"newline_int": NEWLINE, "version": INDEX_VERSION}, noted)
    return {array.name: file_checksum(array), info.name: noted.checksum}


def _read_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield from stream


class ReplacingFile(ChecksumWriter):
    """A file written next to ``path``, and renamed to it when the block ends and the content is on disk."""

    def __init__(self, path: Path) -> None:
        self.target, self.partial = path, path.with_name(f".{path.name}.partial")
        super().__init__(self.partial)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with closing(self.raw):
                if kind is None:
                    self.flush()
                    os.fsync(self.fileno())
            if kind is None:
                self.partial.replace(self.target)
        finally:
            self.partial.unlink(missing_ok=True)
