# SPDX-License-Identifier: Apache-2.0
"""Packs runs into one file, without checkpoints or secrets in logs and records, and unpacks untrusted archives.

Only regular files that the manifest lists are unpacked. The tar format is parsed here rather than by ``tarfile``, which
would also accept links, devices and headers of any length. Limits are checked while an archive is read, so that it
cannot exhaust the disk or the memory.
"""

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from tarfile import GNU_FORMAT, REGTYPE, HeaderError, TarInfo
from typing import BinaryIO, Literal, Protocol, cast

from pydantic import ValidationError

from llmb import __version__
from llmb.base.errors import EnvironmentProblem, UsageError, pip_install
from llmb.base.input_files import check_values, open_file, open_regular
from llmb.base.record import first_problem
from llmb.base.secrets import HIDDEN, has_secret_in_log, secret_spans
from llmb.base.shown_text import counted
from llmb.base.trust import WORKLOADS
from llmb.catalogue.records import Record
from llmb.readers.profiles import NCCL_FOLDER, NSYS_FOLDER, TORCH_FOLDER
from llmb.runs.folder import RunFolder, new_file
from llmb.runs.record import Time, now, read_job_if_whole, read_record

ZSTD, GZIP = ".tar.zst", ".tar.gz"
ENDINGS = (ZSTD, GZIP)
"""Suffixes of archives; each selects a compression."""
MANIFEST = "manifest.json"
VERSION: Literal[1] = 1
MOST_VALUES = 1 << 20
"""The maximum number of JSON values in a manifest: with the maximum number of files, there are 0.8 million."""
TRACES = (TORCH_FOLDER, NSYS_FOLDER, NCCL_FOLDER)
_NAME = r"\w[\w.+=@,-]{0,199}"
_KEPT = re.compile(
    r"(?:run\.json|metrics\.jsonl|metrics-attempt\d{1,6}\.jsonl|rank_times\.jsonl|expert_load\.json|breakdown\.json"
    rf"|checkpoints\.jsonl|resources/{_NAME}\.jsonl|log-{_NAME}\.out|sbatch_{_NAME}\.out)",
    re.ASCII,
)
"""Results, logs and samples, but no batch script or job specification, because a retry would execute them."""
_TRACE = re.compile(rf"(?:{'|'.join(TRACES)})/(?:{_NAME}/){{0,3}}{_NAME}", re.ASCII)
_FOLDER = re.compile(rf"{WORKLOADS}/{_NAME}/experiments/({_NAME})/{_NAME}/\1(\.\d{{1,6}})?", re.ASCII)


class ArchivedFile(Record):
    """A file in the archive."""

    path: str
    size: int
    sha256: str


class ArchivedRun(Record):
    """A run and its former job, if any. ``folder`` is its path in the archive."""

    run_id: str
    folder: str
    campaign: str | None
    scheduler: str | None
    job_id: str | None


class Manifest(Record):
    """The first file of an archive."""

    format: Literal["llmb-archive"] = "llmb-archive"
    version: Literal[1] = VERSION
    llmb_version: str
    created_at: Time
    traces: bool
    runs: tuple[ArchivedRun, ...]
    files: tuple[ArchivedFile, ...]

    @property
    def size(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def json_size(self) -> int:
        """Return the total size of all JSON files in bytes."""
        return sum(file.size for file in self.files if file.path.endswith((".json", ".jsonl")))


def is_archived(name: str) -> bool:
    """Return whether archives include the file with this path in a run folder; see ``is_trace`` for traces."""
    return bool(_KEPT.fullmatch(name))


def is_trace(name: str) -> bool:
    return bool(_TRACE.fullmatch(name))


def archived_folder(workload: str, folder: RunFolder, started_s: int) -> str:
    """Return a run's path in an archive; raise UsageError for an invalid name."""
    experiment = re.sub(r"\.\d+$", "", folder.name)
    group = folder.path.parent.name
    group = group if group.startswith(experiment) else f"{experiment}_{started_s}"
    path = f"{WORKLOADS}/{workload}/experiments/{experiment}/{group}/{folder.name}"
    if not _FOLDER.fullmatch(path):
        what = "archives accept only letters, digits and _.+=@,- in the names of a run's folders"
        raise UsageError(what, where=str(folder.path))
    return path


def read_manifest(text: bytes) -> Manifest:
    """Parse a manifest; raise ValueError if it is invalid."""
    check_values(text, MOST_VALUES)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        place, wrong = first_problem(error)
        if place == "version":
            raise ValueError(f"this llmb reads version {VERSION} only") from error
        raise ValueError(f"its manifest is damaged: {place}: {wrong}") from error
    for problem in _problems(manifest):
        raise ValueError(problem)
    return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    folders, names = [run.folder for run in manifest.runs], [file.path for file in manifest.files]
    if len({*folders}) < len(folders) or len({*names}) < len(names):
        yield "its manifest lists a name more than once"
    yield from (f"a run has an invalid folder: '{folder}'" for folder in folders if not _FOLDER.fullmatch(folder))
    members = {*folders}
    for file in manifest.files:
        folder = "/".join(file.path.split("/")[:6])
        name = file.path[len(folder) + 1 :]
        if folder not in members or not (is_archived(name) or is_trace(name)):
            yield f"it contains a file that belongs to no run: '{file.path}'"
        if file.size < 0:
            yield f"a file has a negative size: '{file.path}'"
    yield from (f"a run has no record: '{folder}'" for folder in folders if f"{folder}/run.json" not in {*names})


BLOCK = 512
"""Block size of a tar file in bytes."""
CHUNK = 1 << 20
LEVEL = 10
"""Compression level of zstd. Runs shrink to a twentieth; level 19 saves another quarter in seven times the time."""
_KEY_END = "-----END"
_TOLD = re.compile(r'"(?:reason|note)": "((?:[^"\\]|\\.)*+)"')
"""The fields of a record that may quote the log."""
_WORD = HIDDEN.encode()
_ENCODING = ("utf-8", "surrogateescape")
_Span = tuple[int, int]
"""Offsets of the first byte of a part of a file, and of the byte after its last."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that was written."""

    path: Path
    manifest: Manifest
    hidden: int
    """Number of parts, such as log lines, that were redacted because they may contain a secret."""


@dataclass(frozen=True, slots=True)
class _Packed:
    path: Path
    file: ArchivedFile
    hidden: tuple[_Span, ...]


def write_archive(folders: Sequence[Path], target: Path, *, traces: bool) -> Archive:
    """Pack the ended runs in these folders into ``target``, which appears only when it is complete.

    Raise UsageError if a run folder has an invalid name, EnvironmentProblem if a file changes, or access fails.
    """
    try:
        runs = [_archived_run(RunFolder(folder)) for folder in folders]
        packed = [
            _packed(path, f"{run.folder}/{name}")
            for folder, run in zip(folders, runs, strict=True)
            for name, path in _kept_files(folder, traces=traces)
        ]
    except OSError as error:
        raise EnvironmentProblem(f"the file cannot be read: {error.strerror}", where=str(error.filename)) from error
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
    """Yield the files to archive, the record first, each with its path in the run folder; skip symbolic links."""
    places = [folder, folder / "resources", *((folder / name for name in TRACES) if traces else ())]
    paths = {path for place in places for path in (place.rglob("*") if place.name in TRACES else place.glob("*"))}
    for path in sorted(paths, key=lambda path: (path.name != "run.json", path)):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and not path.is_symlink() and (is_archived(name) or (traces and is_trace(name))):
            yield name, path


def _packed(path: Path, name: str) -> _Packed:
    digest, size, place = hashlib.sha256(), 0, 0
    hidden = []
    for part, is_hidden in _searched(path):
        word = _WORD if is_hidden else part
        digest.update(word)
        size += len(word)
        hidden += [(place, place + len(part))] if is_hidden else []
        place += len(part)
    return _Packed(path, ArchivedFile(path=name, size=size, sha256=digest.hexdigest()), tuple(hidden))


def _searched(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield the parts of a file, each with True if the part has to be redacted."""
    with open_regular(path, buffering=CHUNK) as file:
        if path.suffix == ".out":
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
        elif path.name == "run.json":
            yield from _searched_text(file.read().decode(*_ENCODING))
        else:
            while block := file.read(CHUNK):
                yield block, False


def _searched_text(text: str) -> Iterator[tuple[bytes, bool]]:
    place = 0
    spans = [match.span(1) for match in _TOLD.finditer(text) if has_secret_in_log(match[1])]
    for first, end in sorted((*secret_spans(text), *spans)):
        if first < place:
            continue
        yield text[place:first].encode(*_ENCODING), False
        yield text[first:end].encode(*_ENCODING), True
        place = end
    yield text[place:].encode(*_ENCODING), False


def _content(each: _Packed) -> Iterator[bytes]:
    """Yield a file in blocks, with the parts to redact replaced; logs are not searched again, which would be slow."""
    with open_regular(each.path, buffering=CHUNK) as file:
        for first, end in each.hidden:
            while block := file.read(min(CHUNK, first - file.tell())):
                yield block
            yield _WORD
            file.seek(end)
        while block := file.read(CHUNK):
            yield block


def _write(target: Path, manifest: Manifest, packed: Sequence[_Packed]) -> None:
    with new_file(target) as partial, partial.open("wb") as file:  # noqa: SIM117 (the file is closed last)
        with _compressor(file, target) as out:
            text = manifest.model_dump_json(indent=1).encode()
            out.write(_header(MANIFEST, len(text)) + text + _padding(len(text)))
            for each in packed:
                out.write(_header(each.file.path, each.file.size))
                digest = hashlib.sha256()
                for block in _content(each):
                    digest.update(block)
                    out.write(block)
                if digest.hexdigest() != each.file.sha256:
                    do = "wait until no process writes to the run, then run the command again"
                    raise EnvironmentProblem("the file changed while it was read", where=str(each.path), do=do)
                out.write(_padding(each.file.size))
            out.write(bytes(2 * BLOCK))


def _compressor(file: BinaryIO, target: Path) -> AbstractContextManager[BinaryIO]:
    """Return a compressing stream into ``file``, which stays open; the suffix of ``target`` selects the compression."""
    if target.name.endswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile("", "wb", fileobj=file, mtime=0))
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    return cast(BinaryIO, compressor.stream_writer(file, closefd=False))


def _header(name: str, size: int) -> bytes:
    entry = TarInfo(name)
    entry.size = size
    return entry.tobuf(GNU_FORMAT, "utf-8", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


MOST_MANIFEST_BYTES = 1 << 26
MOST_JSON_RATIO = 100
"""Maximum bytes of the manifest, and of all JSON, per byte of the archive: JSON is read as a whole."""
ALWAYS_JSON_BYTES = 1 << 20
MOST_FILES = 200_000
MOST_BYTES = 1 << 36
"""Maximum total size of the files: 64 GiB."""
MOST_RATIO = 1000
"""Maximum bytes of the files per byte of the archive, which a zip bomb exceeds."""
ALWAYS_BYTES = 1 << 26
"""The number of bytes to which even the smallest archive may expand."""
MOST_WINDOW_BYTES = 1 << 27
LONGEST_NAME = 4096
TAR_RECORD = 20 * BLOCK
"""Tar programs pad their files with zeros to a multiple of this size in bytes."""
LONG_NAME = b"L"
"""Type of an entry that contains the name of the next entry."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Refused(ValueError):
    """Raised if an archive is invalid."""


def default_ending() -> str:
    """Return the suffix of zstd archives, which are smaller, if zstandard is installed, else of gzip archives."""
    return GZIP if find_spec("zstandard") is None else ZSTD


def check_library(path: Path) -> None:
    """Raise EnvironmentProblem if an archive with this name needs zstandard and it is not installed."""
    if not path.name.endswith(GZIP) and find_spec("zstandard") is None:
        do = f"{pip_install('export')}, or create the archive with a name that ends in {GZIP}"
        raise EnvironmentProblem(f"an archive that is not {GZIP} needs zstandard, which is not installed", do=do)


def unpack_archive(path: Path, into: Path) -> Manifest:
    """Unpack an archive into the empty folder ``into``, check each file against the manifest, and return the manifest.

    Raise UsageError if ``path`` is not a complete archive of ended runs; ``into`` must then not be used.
    Raise EnvironmentProblem if zstandard is needed but missing, OSError if a file cannot be read or written.
    """
    with open_file(path, do="pass a file written by 'llmb archive'") as file, _refusing(path):
        check_library(path)
        with _decompressed(file, path) as stream:
            manifest = _manifest(stream, path.stat().st_size)
            _unpack_files(stream, {one.path: one for one in manifest.files}, into)
        for run in manifest.runs:
            record = read_record(RunFolder(into / run.folder))
            if record.run_id != run.run_id or record.plan.recipe.workload != run.folder.split("/")[1]:
                raise _Refused(f"the record belongs to another run: '{run.folder}'")
            if record.status in ("queued", "running"):
                raise _Refused(f"a run has not ended: '{run.folder}'")
    return manifest


@contextmanager
def _decompressed(file: BinaryIO, path: Path) -> Iterator[_Stream]:
    """Yield a decompressing stream; raise _Refused, also while it is read, if the file is damaged or wrongly named."""
    if path.name.endswith(GZIP):
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                yield stream
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise _Refused(f"it is damaged or not compressed with gzip: {error}") from error
        return
    import zstandard

    try:
        with zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES).stream_reader(file, closefd=False) as stream:
            yield stream
    except zstandard.ZstdError as error:
        raise _Refused(f"it is damaged or not compressed with zstd: {error}") from error


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # also from reading the manifest and the records
        what = getattr(error, "what", str(error))
        do = f"create it again with 'llmb archive' of llmb {__version__} (as {GZIP} or of fewer runs beyond a limit)"
        raise UsageError(f"this archive is not accepted: {what}", where=str(path), do=do) from error


def _manifest(stream: _Stream, archive_bytes: int) -> Manifest:
    entry = _next_entry(stream)
    if entry is None or entry.name != MANIFEST or entry.type != REGTYPE:
        raise _Refused(f"it does not begin with {MANIFEST}")
    most_json = max(ALWAYS_JSON_BYTES, MOST_JSON_RATIO * archive_bytes)
    if entry.size > min(MOST_MANIFEST_BYTES, most_json):
        raise _Refused(f"its manifest of {entry.size:,} bytes is too large for an archive of this size")
    manifest = read_manifest(_exactly(stream, entry.size))
    _exactly(stream, -entry.size % BLOCK)
    if len(manifest.files) > MOST_FILES:
        raise _Refused(f"it contains {len(manifest.files):,} files; the limit is {MOST_FILES:,}")
    most = min(MOST_BYTES, max(ALWAYS_BYTES, MOST_RATIO * archive_bytes))
    if manifest.size > most:
        raise _Refused(f"its files have {manifest.size:,} bytes; the limit for an archive of this size is {most:,}")
    if (size := manifest.json_size) > most_json:
        raise _Refused(f"it has {size:,} bytes of JSON; the limit for an archive of this size is {most_json:,}")
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
            raise _Refused(f"the size of a file differs from the manifest: {entry.name!r}")
        target = into / described.path
        target.parent.mkdir(parents=True, exist_ok=True)
        digest, remaining = hashlib.sha256(), described.size
        with target.open("xb") as file:
            while remaining:
                block = _exactly(stream, min(remaining, CHUNK))
                digest.update(block)
                file.write(block)
                remaining -= len(block)
        if digest.hexdigest() != described.sha256:
            raise _Refused(f"the checksum of a file differs from the manifest: {described.path!r}")
        _exactly(stream, -described.size % BLOCK)
    if missing:
        lacks = counted(len(missing), "file")
        raise _Refused(f"it lacks {lacks} listed in its manifest, such as {next(iter(missing))!r}")
    rest = _at_most(stream, TAR_RECORD + 1)
    if len(rest) > TAR_RECORD or any(rest):
        raise _Refused("it has data after its end")


def _next_entry(stream: _Stream) -> TarInfo | None:
    """Read the header of the next entry, with its long name; return None at the end, which is two blocks of zeros."""
    block = _exactly(stream, BLOCK)
    if not any(block):
        if any(_exactly(stream, BLOCK)):
            raise _Refused("its end is damaged")
        return None
    entry = _read_header(block)
    if entry.type != LONG_NAME:
        return entry
    if entry.size > LONGEST_NAME:
        raise _Refused("it contains a name that is too long")
    name = _exactly(stream, entry.size).rstrip(b"\0").decode("utf-8", "backslashreplace")
    _exactly(stream, -entry.size % BLOCK)
    entry = _read_header(_exactly(stream, BLOCK))
    entry.name = name
    return entry


def _read_header(block: bytes) -> TarInfo:
    try:
        entry = TarInfo.frombuf(block, "utf-8", "backslashreplace")
    except HeaderError as error:
        raise _Refused(f"a header is damaged: {error}") from error
    if entry.size < 0:
        raise _Refused("an entry has a negative size")
    return entry


def _exactly(stream: _Stream, size: int) -> bytes:
    data = _at_most(stream, size)
    if len(data) < size:
        raise _Refused("it is truncated")
    return data


def _at_most(stream: _Stream, size: int) -> bytes:
    blocks = []
    while size and (block := stream.read(min(size, CHUNK))):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)
