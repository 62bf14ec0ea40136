# SPDX-License-Identifier: Apache-2.0
"""What an import has finished, so that a killed one resumes: a line of JSON for what is imported, then one a file."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from llmb import __version__
from llmb.catalogue.records import Model, Record
from llmb.checkpoints.checkpoint import WEIGHTS
from llmb.checkpoints.checksums import file_checksum
from llmb.shown_text import listed

JOURNAL = "import.jsonl"
Kind = TypeVar("Kind", bound=Record)


class SourceFile(Record):
    """A file that is imported; ``crc32`` only of small ones."""

    bytes: int
    modified_ns: int
    crc32: str | None = None


class ImportKey(Record):
    """All that the files of an import depend on."""

    llmb_version: str = __version__
    source: str
    source_files: dict[str, SourceFile]
    model: Model
    largest_file_bytes: int


class FinishedFile(Record):
    """A file of the checkpoint that is on disk; ``places`` are offset and length of each of its chunks."""

    name: str
    bytes: int
    crc32: str
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ImportJournal:
    """``finished`` are the files that an earlier import kept; ``restarted``, why it did not."""

    path: Path
    finished: dict[str, FinishedFile]
    restarted: str | None

    def add(self, file: FinishedFile) -> None:
        """Returns when it is on disk."""
        _append(self.path, file)


def source_file(path: Path, *, checksum: bool) -> SourceFile:
    """Raises OSError."""
    found = path.stat()
    crc32 = file_checksum(path) if checksum else None
    return SourceFile(bytes=found.st_size, modified_ns=found.st_mtime_ns, crc32=crc32)


def open_journal(folder: Path, key: ImportKey) -> ImportJournal:
    """The journal of the import into ``folder``; files of an import of something else are removed. Raises OSError."""
    path = folder / JOURNAL
    lines = _lines(path)
    earlier = _parsed(ImportKey, lines[0]) if lines else None
    if earlier != key:
        path.unlink(missing_ok=True)
        _remove_weights(folder, {})
        _append(path, key)
        return ImportJournal(path, {}, _difference(earlier, key) if lines else None)
    finished = {file.name: file for file in _finished(folder, lines[1:])}
    _remove_weights(folder, finished)
    # Rewritten: the last line may be incomplete.
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    for record in (key, *finished.values()):
        _append(temporary, record)
    temporary.replace(path)
    return ImportJournal(path, finished, None)


def has_finished_files(folder: Path) -> bool:
    """Whether an import into ``folder`` would resume."""
    return any(_finished(folder, _lines(folder / JOURNAL)[1:]))


def _finished(folder: Path, lines: list[bytes]) -> Iterator[FinishedFile]:
    for line in lines:
        file = _parsed(FinishedFile, line)
        if file and _size(folder / WEIGHTS / file.name) == file.bytes:
            yield file


def _parsed(kind: type[Kind], line: bytes) -> Kind | None:
    """None for a line that is incomplete, or of another version."""
    try:
        return kind.model_validate_json(line)
    except ValidationError:
        return None


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _remove_weights(folder: Path, kept: Mapping[str, FinishedFile]) -> None:
    for path in (folder / WEIGHTS).glob("*"):
        if path.name not in kept:
            path.unlink()


def _append(path: Path, record: Record) -> None:
    with path.open("a") as stream:
        stream.write(record.model_dump_json() + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _difference(earlier: ImportKey | None, key: ImportKey) -> str:
    """What keeps an import from resuming."""
    if earlier is None or earlier.llmb_version != key.llmb_version:
        return "the earlier import is of another version of llmb"
    if earlier.source != key.source:
        return f"the earlier import is of {earlier.source}"
    if earlier.model != key.model:
        return f"the earlier import is of the model {earlier.model.model} {earlier.model.size}, or its record changed"
    files = earlier.source_files.keys() | key.source_files.keys()
    changed = sorted(name for name in files if earlier.source_files.get(name) != key.source_files.get(name))
    if changed:
        return f"the source changed: {listed(changed, 1)}"
    return "the largest size of a file is another one"
