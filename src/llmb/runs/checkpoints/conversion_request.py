# SPDX-License-Identifier: Apache-2.0
"""The protocol of the program that converts weights: it reads one JSON document, and writes one per line."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from llmb.base.errors import EnvironmentProblem, LlmbError, RunFailed, UsageError
from llmb.catalogue.records import Lora, Model, Record
from llmb.runs.checkpoints.checkpoint import WEIGHTS, SourceFormat, StoredDtype
from llmb.runs.huggingface.model_config import ExportDtype

ERRORS = {kind.__name__: kind for kind in (UsageError, EnvironmentProblem, RunFailed)}
"""Errors that the program passes to the process that started it."""

FILE_BYTES = 10**9
"""Size limit in bytes of an imported checkpoint's files; a killed import loses at most one file per process."""

Checksums = dict[str, str]
"""CRC-32 by file name, as in ``checkpoint.json``."""
OnProgress = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""
OnNote = Callable[[str], None]


IMPORTED = "imported"
"""Folder in an unfinished import, with a record of its source and of each finished file."""


class FinishedFile(Record):
    """A complete file of an unfinished import; ``places`` are the offset and length in bytes of each of its chunks."""

    name: str
    bytes: int
    crc32: str
    places: tuple[tuple[int, int], ...]


def finished_files(folder: Path) -> list[FinishedFile]:
    """Return the complete files of an earlier import in ``folder``; raise ValueError or OSError for a broken record."""
    records = [FinishedFile.model_validate_json(path.read_bytes()) for path in (folder / IMPORTED).glob("*.distcp")]
    places = {record.name: folder / WEIGHTS / record.name for record in records}
    return [one for one in records if places[one.name].is_file() and places[one.name].stat().st_size == one.bytes]


class MergedAdapters(Record):
    """Adapters that are added to exported weights, and the checkpoint that contains them."""

    checkpoint: str
    lora: Lora


class ExportJob(Record):
    """A request to export ``checkpoint``'s weights to safetensors files in the existing folder ``folder``."""

    kind: Literal["export"] = "export"
    checkpoint: str
    folder: str
    model: Model
    dtype: ExportDtype
    largest_file_bytes: int
    merged: MergedAdapters | None = None


class AdapterExportJob(Record):
    """A request to export adapters to peft's files; ``base`` is the adapted model's name or path."""

    kind: Literal["export adapters"] = "export adapters"
    checkpoint: str
    folder: str
    model: Model
    lora: Lora
    base: str | None


class AdapterImportJob(Record):
    """A request to import peft's file in ``source`` into a checkpoint of adapters in the existing folder ``folder``."""

    kind: Literal["import adapters"] = "import adapters"
    source: str
    folder: str
    model: Model
    rank: int
    alpha: float
    dropout: float


class ImportJob(Record):
    """A request to import ``files`` in ``source`` into ``folder``; ``documents`` are the files that describe the
    weights.
    """

    kind: Literal["import"] = "import"
    format: SourceFormat = "huggingface"
    source: str
    files: tuple[str, ...]
    documents: tuple[str, ...] = ()
    folder: str
    model: Model
    largest_file_bytes: int = FILE_BYTES
    processes: int = 1


AnyJob = ExportJob | ImportJob | AdapterExportJob | AdapterImportJob
Job = Annotated[AnyJob, Field(discriminator="kind")]


class ErrorRecord(Record):
    """An LlmbError that the program passes to the process that started it."""

    kind: str
    what: str
    where: str | None = None
    choices: tuple[str, ...] = ()
    do: str | None = None


class ImportedWeights(Record):
    """The result of an import: ``checksums`` by file name, the tensors' dtypes, and ``lora`` for imported adapters."""

    checksums: Checksums
    dtypes: tuple[StoredDtype, ...]
    lora: Lora | None = None


class ConverterMessage(Record):
    """One line of the program's output, with one field set. ``progress`` is the bytes done and the total bytes."""

    progress: tuple[int, int] | None = None
    note: str | None = None
    imported: ImportedWeights | None = None
    error: ErrorRecord | None = None


def parse_job(text: str) -> AnyJob:
    job: AnyJob = TypeAdapter(Job).validate_json(text)
    return job


def error_record(error: LlmbError) -> ErrorRecord:
    return ErrorRecord(
        kind=type(error).__name__, what=error.what, where=error.where, choices=error.choices, do=error.do
    )


def error_from(record: ErrorRecord) -> LlmbError:
    return ERRORS[record.kind](record.what, where=record.where, choices=record.choices, do=record.do)
