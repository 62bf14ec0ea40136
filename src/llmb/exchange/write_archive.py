# SPDX-License-Identifier: Apache-2.0
"""Packs runs into one file, without checkpoints and without secrets."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tarfile import GNU_FORMAT, TarInfo
from typing import BinaryIO

from llmb import __version__
from llmb.errors import EnvironmentProblem
from llmb.exchange.manifest import (
    MANIFEST,
    TRACES,
    ArchivedFile,
    ArchivedRun,
    Manifest,
    archived_folder,
    is_kept,
    is_trace,
)
from llmb.input_files import open_regular
from llmb.runs.folder import RunFolder, new_file
from llmb.runs.record import now, read_job_if_whole, read_record
from llmb.secrets import HIDDEN, has_secret_in_log, secret_spans

BLOCK = 512
"""Bytes that parts of a tar file are multiples of."""
CHUNK = 1 << 20
LEVEL = 10
"""Effort of zstd. Runs take a twentieth of their size; with 19 a quarter less, in seven times the time."""
_KEY_END = "-----END"
_TOLD = re.compile(r'"(?:reason|note)": "((?:[^"\\]|\\.)*+)"')
"""What a record says of its end, which may be a line of its log."""
_WORD = HIDDEN.encode()
_ENCODING = ("utf-8", "surrogateescape")
_Span = tuple[int, int]
"""The first byte of a part of a file, and the one after it."""


@dataclass(frozen=True, slots=True)
class Archive:
    """What was written."""

    path: Path
    manifest: Manifest
    hidden: int
    """Lines of logs that may have held a secret, and now hold the word for one."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A file, how it is described in the archive, and which parts of it are hidden there."""

    path: Path
    file: ArchivedFile
    hidden: tuple[_Span, ...]


def write_archive(folders: Sequence[Path], target: Path, *, traces: bool) -> Archive:
    """Packs the runs of these folders, which have ended, into ``target``, which is complete when it appears.

    Raises EnvironmentProblem if something cannot be read or written.
    """
    try:
        runs = [_archived_run(RunFolder(folder)) for folder in folders]
        packed = [
            _packed(path, f"{run.folder}/{name}")
            for folder, run in zip(folders, runs, strict=True)
            for name, path in _kept_files(folder, traces=traces)
        ]
    except OSError as error:
        raise EnvironmentProblem(f"cannot be read: {error.strerror}", where=str(error.filename)) from error
    manifest = Manifest(
        llmb_version=__version__,
        created_at=now(),
        traces=traces,
        runs=tuple(runs),
        files=tuple(each.file for each in packed),
    )
    _write(target, manifest, packed)
    return Archive(target, manifest, sum(len(each.hidden) for each in packed))


def _archived_run(folder: RunFolder) -> ArchivedRun:
    record, job = read_record(folder), read_job_if_whole(folder)
    started_s = int(datetime.fromisoformat(record.started_at).timestamp()) if record.started_at else 0
    return ArchivedRun(
        run_id=record.run_id,
        folder=archived_folder(record.plan.recipe.workload, folder, started_s),
        campaign=job.campaign if job else None,
        scheduler=job.scheduler if job else None,
        job_id=job.job_id if job else None,
    )


def _kept_files(folder: Path, *, traces: bool) -> Iterator[tuple[str, Path]]:
    """By their names in the folder of the run, the record first. Links are not followed."""
    places = [folder, folder / "resources", *((folder / name for name in TRACES) if traces else ())]
    found = {path for place in places for path in (place.rglob("*") if place.name in TRACES else place.glob("*"))}
    for path in sorted(found, key=lambda path: (path.name != "run.json", path)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and (is_kept(name) or (traces and is_trace(name))):
            yield name, path


def _packed(path: Path, name: str) -> _Packed:
    digest, size, place = hashlib.sha256(), 0, 0
    hidden = []
    for part, is_hidden in _searched(path):
        shown = _WORD if is_hidden else part
        digest.update(shown)
        size += len(shown)
        hidden += [(place, place + len(part))] if is_hidden else []
        place += len(part)
    return _Packed(path, ArchivedFile(path=name, size=size, sha256=digest.hexdigest()), tuple(hidden))


def _searched(path: Path) -> Iterator[tuple[bytes, bool]]:
    """A file part by part, and whether each is hidden: lines of logs; in a record only what is a secret by its form."""
    with open_regular(path, buffering=CHUNK) as file:
        if path.suffix == ".out":
            yield from _searched_lines(file)
        elif path.name == "run.json":
            yield from _searched_text(file.read().decode(*_ENCODING))
        else:
            while block := file.read(CHUNK):
                yield block, False


def _searched_lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    in_key = False
    while line := file.readline(CHUNK):
        text = line.decode(*_ENCODING)
        begins = "PRIVATE KEY-----" in text
        if in_key or begins or has_secret_in_log(text):
            bare = line.rstrip(b"\n")
            yield bare, True
            yield line[len(bare) :], False
        else:
            yield line, False
        in_key = (in_key or begins) and _KEY_END not in text


def _searched_text(text: str) -> Iterator[tuple[bytes, bool]]:
    place = 0
    told = [found.span(1) for found in _TOLD.finditer(text) if has_secret_in_log(found[1])]
    for first, end in sorted((*secret_spans(text), *told)):
        if first < place:
            continue
        yield text[place:first].encode(*_ENCODING), False
        yield text[first:end].encode(*_ENCODING), True
        place = end
    yield text[place:].encode(*_ENCODING), False


def _content(each: _Packed) -> Iterator[bytes]:
    """A file in blocks, with a word for each part that is hidden; searching logs again would take most of the time."""
    with open_regular(each.path, buffering=CHUNK) as file:
        for first, end in each.hidden:
            while block := file.read(min(CHUNK, first - file.tell())):
                yield block
            yield _WORD
            file.seek(end)
        while block := file.read(CHUNK):
            yield block


def _write(target: Path, manifest: Manifest, packed: Sequence[_Packed]) -> None:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    with new_file(target) as partial, partial.open("wb") as file:  # noqa: SIM117 (the file is closed last)
        with compressor.stream_writer(file, closefd=False) as out:
            text = manifest.model_dump_json(indent=1).encode()
            out.write(_header(MANIFEST, len(text)) + text + _padding(len(text)))
            for each in packed:
                out.write(_header(each.file.path, each.file.size))
                digest = hashlib.sha256()
                for block in _content(each):
                    digest.update(block)
                    out.write(block)
                if digest.hexdigest() != each.file.sha256:
                    do = "wait until nothing writes to the run, and repeat"
                    raise EnvironmentProblem("the file has changed meanwhile", where=str(each.path), do=do)
                out.write(_padding(each.file.size))
            out.write(bytes(2 * BLOCK))


def _header(name: str, size: int) -> bytes:
    entry = TarInfo(name)
    entry.size = size
    return entry.tobuf(GNU_FORMAT, "utf-8", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)
