# SPDX-License-Identifier: Apache-2.0
"""Unpacks an archive that anyone may have made: nothing but regular files of runs, as the manifest has them.

The tar format is read here, and not by ``tarfile``, which follows what an archive says: links, devices, headers of any
length. Limits hold while it is read, so that no archive takes more of the disk or the memory than they allow.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tarfile import REGTYPE, HeaderError, TarInfo
from typing import Protocol

from llmb.errors import EnvironmentProblem, UsageError
from llmb.exchange.manifest import MANIFEST, ArchivedFile, Manifest, read_manifest
from llmb.input_files import open_file
from llmb.runs.folder import RunFolder
from llmb.runs.record import read_record

MOST_MANIFEST_BYTES = 1 << 26
MOST_JSON_RATIO = 100
"""Bytes of the manifest, and of all JSON together, over bytes of the archive: they are read as a whole."""
ALWAYS_JSON_BYTES = 1 << 20
MOST_FILES = 200_000
MOST_BYTES = 1 << 36
"""Size of all files together: 64 GiB."""
MOST_RATIO = 1000
"""Bytes of the files over bytes of the archive; steps and logs have some ten, and what only fills a disk far more."""
ALWAYS_BYTES = 1 << 26
"""So much may come out of an archive of any size."""
MOST_WINDOW_BYTES = 1 << 27
LONGEST_NAME = 4096
BLOCK = 512
TAR_RECORD = 20 * BLOCK
"""Programs that write tar files fill the last of these with zeros."""
CHUNK = 1 << 20
LONG_NAME = b"L"
"""Type of an entry that holds the name of the next one."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Refused(ValueError):
    """The archive is not what it should be."""


def needs_zstandard() -> None:
    """Raises EnvironmentProblem if the library is not installed."""
    if find_spec("zstandard") is None:
        raise EnvironmentProblem("archives need zstandard, which is not installed", do="pip install 'llmb[export]'")


def unpack_archive(path: Path, into: Path) -> Manifest:
    """Writes the files of an archive below the empty folder ``into``, and checks each with the manifest.

    Raises UsageError for anything that is not a complete archive of runs that have ended; what ``into`` then holds
    must not be used. Raises OSError if it cannot be written.
    """
    with open_file(path, do="give the file that 'llmb archive' wrote") as file, _refusing(path):
        needs_zstandard()
        import zstandard

        size = path.stat().st_size
        try:
            decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
            with decompressor.stream_reader(file, closefd=False) as stream:
                manifest = _manifest(stream, size)
                _unpack_files(stream, {one.path: one for one in manifest.files}, into)
        except zstandard.ZstdError as error:
            raise _Refused(f"it is not compressed by zstd, or damaged: {error}") from error
        _check_records(manifest, into)
    return manifest


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # also of what reads the manifest and the records
        what = getattr(error, "what", str(error))
        do = "have it made again by 'llmb archive', and compare the checksum of the file after copying"
        raise UsageError(f"this archive is not accepted: {what}", where=str(path), do=do) from error


def _manifest(stream: _Stream, archive_bytes: int) -> Manifest:
    entry = _next_entry(stream)
    if entry is None or entry.name != MANIFEST or entry.type != REGTYPE:
        raise _Refused(f"it does not begin with {MANIFEST}")
    most_json = max(ALWAYS_JSON_BYTES, MOST_JSON_RATIO * archive_bytes)
    if entry.size > min(MOST_MANIFEST_BYTES, most_json):
        raise _Refused(f"its manifest of {entry.size:,} bytes is too large for an archive of its size")
    manifest = read_manifest(_exactly(stream, entry.size))
    _exactly(stream, -entry.size % BLOCK)
    if len(manifest.files) > MOST_FILES:
        raise _Refused(f"it has {len(manifest.files):,} files; {MOST_FILES:,} are the most")
    most = min(MOST_BYTES, max(ALWAYS_BYTES, MOST_RATIO * archive_bytes))
    if manifest.size > most:
        raise _Refused(f"its {manifest.size:,} bytes are more than an archive of its size may have ({most:,})")
    if (size := manifest.json_size) > most_json:
        raise _Refused(f"its {size:,} bytes of JSON are more than an archive of its size may have ({most_json:,})")
    return manifest


def _unpack_files(stream: _Stream, expected: Mapping[str, ArchivedFile], into: Path) -> None:
    missing = dict(expected)
    while entry := _next_entry(stream):
        if entry.type != REGTYPE:
            raise _Refused(f"an entry is not a regular file: {entry.name!r}")
        described = missing.pop(entry.name, None)
        if described is None:
            raise _Refused(f"an entry is repeated, or not in the manifest: {entry.name!r}")
        if entry.size != described.size:
            raise _Refused(f"a file has another size than the manifest has: {entry.name!r}")
        _unpack_file(stream, described, into / described.path)
    if missing:
        raise _Refused(f"{len(missing)} files of the manifest are missing, such as {next(iter(missing))!r}")
    rest = _at_most(stream, TAR_RECORD + 1)
    if len(rest) > TAR_RECORD or any(rest):
        raise _Refused("something follows its end")


def _unpack_file(stream: _Stream, described: ArchivedFile, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, left = hashlib.sha256(), described.size
    with target.open("xb") as file:
        while left:
            block = _exactly(stream, min(left, CHUNK))
            digest.update(block)
            file.write(block)
            left -= len(block)
    if digest.hexdigest() != described.sha256:
        raise _Refused(f"a file has another checksum than the manifest has: {described.path!r}")
    _exactly(stream, -described.size % BLOCK)


def _next_entry(stream: _Stream) -> TarInfo | None:
    """The header of an entry, with its long name; None at the end, which is two blocks of zeros."""
    block = _exactly(stream, BLOCK)
    if not any(block):
        if any(_exactly(stream, BLOCK)):
            raise _Refused("its end is damaged")
        return None
    entry = _header(block)
    if entry.type != LONG_NAME:
        return entry
    if entry.size > LONGEST_NAME:
        raise _Refused("it has a name that is too long")
    name = _exactly(stream, entry.size).rstrip(b"\0").decode("utf-8", "backslashreplace")
    _exactly(stream, -entry.size % BLOCK)
    entry = _header(_exactly(stream, BLOCK))
    entry.name = name
    return entry


def _header(block: bytes) -> TarInfo:
    try:
        entry = TarInfo.frombuf(block, "utf-8", "backslashreplace")
    except HeaderError as error:
        raise _Refused(f"a header is damaged: {error}") from error
    if entry.size < 0:
        raise _Refused("an entry has no size")
    return entry


def _exactly(stream: _Stream, size: int) -> bytes:
    found = _at_most(stream, size)
    if len(found) < size:
        raise _Refused("it is truncated")
    return found


def _at_most(stream: _Stream, size: int) -> bytes:
    """So many bytes, of which few are asked for at once; fewer at the end of the stream."""
    blocks = []
    while size and (block := stream.read(min(size, CHUNK))):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)


def _check_records(manifest: Manifest, into: Path) -> None:
    """Each record is of the run that the manifest says, which has ended."""
    for run in manifest.runs:
        record = read_record(RunFolder(into / run.folder))
        if record.run_id != run.run_id or record.plan.recipe.workload != run.folder.split("/")[1]:
            raise _Refused(f"the record is of another run: '{run.folder}'")
        if record.status in ("queued", "running"):
            raise _Refused(f"a run has not ended: '{run.folder}'")
