# SPDX-License-Identifier: Apache-2.0
"""Images of containers: where one comes from, its names, and its import into a folder that all nodes share.

An image has its name only when it is complete.
"""

import glob
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from llmb.catalogue.data_files import read_file
from llmb.catalogue.records import Record
from llmb.errors import (
    EnvironmentProblem,
    InfrastructureError,
    LlmbError,
    RunFailed,
    UsageError,
    UserInterrupt,
    unknown,
)
from llmb.jobs.locks import file_lock
from llmb.processes.families import started_program
from llmb.processes.signals import Interrupted
from llmb.runs.checkpoint_disk import check_room
from llmb.runs.folder import writing
from llmb.secrets import has_secret, redacted

Scheme = Literal["docker", "dockerd", "podman"]
Runtime = Literal["pyxis", "apptainer"]

SUFFIXES: dict[str, str] = {"pyxis": ".sqsh", "apptainer": ".sif"}
FORM = "[docker://][REGISTRY/]NAME[:TAG], dockerd://NAME:TAG, or the path of a file"
CREDENTIALS = "keep it in ~/.config/enroot/.credentials, or log in with 'apptainer registry login'"
SCHEMES = ("docker", "dockerd", "podman")
_DAEMON = ("dockerd", "podman")
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_NAME = re.compile(
    r"((?P<user>[^@/#\s]+)@)?((?P<registry>[\w.-]+(:\d+)?)#)?"
    r"(?P<path>[\w.-]+(:\d+(?=/))?(/[\w.-]+)*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class RegistryImage:
    """An image of a registry, or of Docker's or Podman's store on this machine."""

    scheme: Scheme
    user: str | None
    registry: str | None
    """None for Docker Hub, and without a registry."""
    path: str
    tag: str
    """Or a digest, ``sha256:...``."""

    @property
    def for_enroot(self) -> str:
        user = f"{self.user}@" if self.user else ""
        registry = f"{self.registry}#" if self.registry else ""
        return f"{self.scheme}://{user}{registry}{self.path}:{self.tag}"

    @property
    def for_apptainer(self) -> str:
        """Raises UsageError for what Apptainer does not read."""
        if self.scheme == "podman":
            do = "save it with 'podman save --format oci-archive -o FILE', and give FILE"
            raise UsageError("Apptainer does not read the store of Podman", do=do)
        registry = f"{self.registry}/" if self.registry else ""
        behind = "@" if self.tag.startswith("sha256:") else ":"
        scheme = "docker-daemon" if self.scheme == "dockerd" else "docker"
        return f"{scheme}://{registry}{self.path}{behind}{self.tag}"


def image_source(text: str) -> RegistryImage | Path:
    """What ``text`` names: an image of a registry, or a file. Raises UsageError."""
    if text.startswith(("/", "./", "../", "~")) or text.endswith((*SUFFIXES.values(), ".tar")):
        return Path(text).expanduser().absolute()
    scheme, rest = _split(text)
    found = _NAME.fullmatch(rest)
    if found is None:
        raise UsageError(f"this names no image: '{text}'", do=f"give {FORM}")
    user, registry, path = found["user"], found["registry"], found["path"]
    if user and (":" in user or has_secret(user)):
        raise UsageError("a password is not given on the command line, where others see it", do=CREDENTIALS)
    first, slash, inner = path.partition("/")
    if scheme == "docker" and registry is None and slash and ("." in first or ":" in first or first == "localhost"):
        registry, path = first, inner  # as Docker reads it; Enroot wants a # behind the registry
    return RegistryImage(scheme, user, registry, path, found["digest"] or found["tag"] or "latest")


def source_problem(text: str) -> str | None:
    """What is wrong with an answer that names an image."""
    try:
        source = image_source(text)
    except UsageError as error:
        return f"{error.what}: {error.do}"
    return f"there is no file {source}" if isinstance(source, Path) and not source.exists() else None


def _split(text: str) -> tuple[Scheme, str]:
    found = _SCHEME.fullmatch(text)
    scheme, rest = (found["scheme"], found["rest"]) if found else ("docker", text)
    match scheme:
        case "docker" | "dockerd" | "podman":
            return scheme, rest
    raise UsageError(f"unknown source of images '{scheme}://'", choices=SCHEMES, do=f"give {FORM}")


def image_name(source: RegistryImage | Path, runtime: str) -> str:
    """The name of the image's file, as the reference suite gives it: ``nvidia+nemo+26.04.01.sqsh``."""
    if isinstance(source, Path):
        return source.stem + SUFFIXES[runtime]
    parts = [*source.path.split("/"), source.tag.replace(":", "-")]
    return "+".join(parts) + SUFFIXES[runtime]


def image_path(text: str, folder: Path, runtime: str) -> Path:
    """The file that an import makes. Raises UsageError."""
    return folder / image_name(image_source(text), runtime)


def needs_daemon(source: RegistryImage | Path) -> bool:
    """Whether the image is on this machine alone."""
    return isinstance(source, RegistryImage) and source.scheme in _DAEMON


PROGRAMS = {"pyxis": "enroot", "apptainer": "apptainer"}
TAKEN = {
    "pyxis": "give a squashfs file (.sqsh), or call 'docker load -i FILE' and give dockerd://NAME:TAG",
    "apptainer": "give a SIF file (.sif), an archive of docker or podman (.tar), or the image's name in a registry",
}
FILES = {"pyxis": (".sqsh", ".squashfs"), "apptainer": (".sif",)}
"""Names of files that a runtime starts as they are."""
LEAST_BYTES = 10**9
LOCK_PATIENCE_S = 2.0
GB = 10**9

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedImage:
    path: Path
    bytes: int
    sha256: str | None
    """None for one that lay in a folder where nothing can be written."""
    made: bool
    """False if it was there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    source: str
    """A name in a registry, ``dockerd://NAME``, or a file."""
    folder: Path
    runtime: str
    """``pyxis`` or ``apptainer``."""
    architecture: str | None = None
    """Architecture of the nodes, as ``uname -m`` prints it; None for that of this machine."""
    force: bool = False
    """Import it again, and replace the existing file."""
    verify: bool = False
    """Read all of a file that is there, and compare its checksum."""


def import_image(request: ImageRequest, say: Say) -> ImportedImage:
    """Keeps an image that has its name; what an import that was killed left is removed by the next one.

    Raises UsageError, EnvironmentProblem, InfrastructureError and RunFailed, each with what to do.
    """
    if request.runtime not in PROGRAMS:
        raise unknown("container runtime", request.runtime, PROGRAMS)
    source = image_source(request.source)
    folder = request.folder.expanduser().absolute()
    target = folder / image_name(source, request.runtime)
    if isinstance(source, Path):
        _check_file(source, request.runtime)
    keep = not request.force
    if keep and not request.verify and has_image(target) and not os.access(folder, os.W_OK):
        _check_same(target, source, request.runtime, read_checksum(target))  # of another user
        return _as_it_was(target, read_checksum(target))
    if not has_image(target):
        _check_possible(source, request)  # before anything is made
    with _work_folder(target) as work:
        if keep and has_image(target) and (kept := _kept(target, request, source, work, say)):
            return kept
        _check_possible(source, request)
        size = source.stat().st_size if isinstance(source, Path) else LEAST_BYTES
        check_room("the image needs", size, folder, "free some space, or give --folder on another disk")
        partial = work / target.name
        _make(source, partial, request, say)
        return _published(partial, target, request.runtime, say)


def has_image(target: Path) -> bool:
    return target.is_file() and target.stat().st_size > 0


@contextmanager
def _work_folder(image: Path) -> Iterator[Path]:
    """A new folder beside ``image`` for the import, which no other process on a host with the same locks does.

    Two hosts whose file system has no common locks never write the same file: one import fails, or is replaced.
    """
    with file_lock(_lock_file(image), LOCK_PATIENCE_S, "importing this image"), writing(image.parent):
        for leftover in _leftovers(image):
            shutil.rmtree(leftover, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=_work_prefix(image), dir=image.parent))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _kept(
    target: Path, request: ImageRequest, source: RegistryImage | Path, work: Path, say: Say
) -> ImportedImage | None:
    """The image that is there, with its checksum beside it; None if it does not have the checksum that it had."""
    recorded = read_checksum(target)
    checksum = recorded if recorded and not request.verify else _checksum(target, say)
    if recorded and checksum != recorded:
        say(f"{target}: its checksum is {checksum}, not {recorded}; it is imported again")
        return None
    _check_same(target, source, request.runtime, checksum)
    if not recorded:
        _write_checksum(target, checksum, work)
    return _as_it_was(target, checksum)


def _as_it_was(target: Path, checksum: str | None) -> ImportedImage:
    return ImportedImage(path=target, bytes=target.stat().st_size, sha256=checksum, made=False)


def _is_copied(source: RegistryImage | Path, runtime: str) -> bool:
    """Whether the image is a file that the runtime starts as it is."""
    return isinstance(source, Path) and source.suffix in FILES[runtime]


def _check_same(target: Path, source: RegistryImage | Path, runtime: str, checksum: str | None) -> None:
    """Raises UsageError if ``target`` is not the copy of a file."""
    if not isinstance(source, Path) or not _is_copied(source, runtime) or source.samefile(target):
        return
    if source.stat().st_size != target.stat().st_size or (checksum and sha256_of(source) != checksum):
        do = "give --force to replace it, or rename the file"
        raise UsageError("another image of this name is there", where=str(target), do=do)


def _check_file(source: Path, runtime: str) -> None:
    """Raises UsageError for a file that cannot be imported."""
    if not has_image(source):
        raise UsageError("there is no such file, or it is empty", where=str(source))
    if _is_copied(source, runtime) or (runtime == "apptainer" and _archive_scheme(source)):
        return
    raise UsageError(f"{runtime} does not start such a file", where=str(source), do=TAKEN[runtime])


def _archive_scheme(path: Path) -> str | None:
    """By the members at its top; None for another file. Raises UsageError."""
    try:
        with tarfile.open(path) as archive:
            names = {member.name.removeprefix("./") for member in archive}
    except OSError as error:
        raise UsageError(f"the image cannot be read: {error.strerror}", where=str(path)) from error
    except (tarfile.TarError, EOFError):
        return None
    if "manifest.json" in names:  # Docker's own archives hold both since version 25
        return "docker-archive"
    return "oci-archive" if "oci-layout" in names else None


def _check_possible(source: RegistryImage | Path, request: ImageRequest) -> None:
    """Raises EnvironmentProblem where the tool is not, or does not import for the nodes."""
    program, here = PROGRAMS[request.runtime], platform.machine()
    if _is_copied(source, request.runtime):
        return
    words = [request.source, "--runtime", request.runtime, "--folder", str(request.folder.absolute())]
    again = f"llmb prepare image {shlex.join(words)}"
    if not has_tool(program):
        if needs_daemon(source):
            do = f"install {program} beside Docker, or push the image to a registry"
        else:
            do = f"run it where {program} is, such as on a compute node: srun --ntasks=1 --time=60 {again}"
        raise EnvironmentProblem(f"there is no {program} on this machine", do=do)
    if request.architecture not in (None, here) and (request.runtime == "apptainer" or needs_daemon(source)):
        do = f"run it on a node: srun --ntasks=1 --time=60 {again}"
        what = f"{program} would import it for {here}, and the nodes are {request.architecture}"
        raise EnvironmentProblem(what, do=do)


def _make(source: RegistryImage | Path, partial: Path, request: ImageRequest, say: Say) -> None:
    if isinstance(source, Path) and _is_copied(source, request.runtime):
        say(f"copying {source} ({source.stat().st_size / GB:.1f} GB)")
        shutil.copyfile(source, partial)
        return
    say(f"importing {request.source} into {request.folder}")
    run_tool(tool_command(source, partial, request), partial, say)


def tool_command(source: RegistryImage | Path, target: Path, request: ImageRequest) -> Sequence[str]:
    """The call that makes ``target``, which does not exist. Raises UsageError."""
    if request.runtime == "apptainer":
        origin = source.for_apptainer if isinstance(source, RegistryImage) else f"{_archive_scheme(source)}:{source}"
        return ["apptainer", "build", str(target), origin]
    assert isinstance(source, RegistryImage)
    other = request.architecture not in (None, platform.machine())
    architecture = ["--arch", str(request.architecture)] if other else []
    return ["enroot", "import", *architecture, "--output", str(target), source.for_enroot]


def _published(partial: Path, target: Path, runtime: str, say: Say) -> ImportedImage:
    """The image under its name, with its checksum beside it."""
    if not has_image(partial):
        raise EnvironmentProblem(f"{PROGRAMS[runtime]} ended well, but left no image", where=str(target))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    checksum, size = _checksum(partial, say), partial.stat().st_size
    _checksum_file(target).unlink(missing_ok=True)  # of what is replaced: a checksum is never beside another file
    partial.replace(target)
    _write_checksum(target, checksum, partial.parent)
    return ImportedImage(path=target, bytes=size, sha256=checksum, made=True)


def _checksum(path: Path, say: Say) -> str:
    if (size := path.stat().st_size) > GB:
        say(f"computing the checksum of {path.name} ({size / GB:.1f} GB)")
    return sha256_of(path)


def sha256_of(path: Path) -> str:
    """Reads the whole file. Raises OSError."""
    with path.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_checksum(image: Path) -> str | None:
    """The checksum beside an image, in the form of sha256sum; None if there is none that can be read."""
    try:
        words = _checksum_file(image).read_text().split()
    except (OSError, UnicodeDecodeError):
        return None
    is_one = len(words) == 2 and len(words[0]) == 64 and words[1].lstrip("*") == image.name
    return words[0] if is_one else None


def _write_checksum(image: Path, checksum: str, work: Path) -> None:
    partial = work / "sha256"
    partial.write_text(f"{checksum}  {image.name}\n")
    partial.replace(_checksum_file(image))


def _checksum_file(image: Path) -> Path:
    return image.with_name(f"{image.name}.sha256")


def _lock_file(image: Path) -> Path:
    """Stays: whoever removed it could remove what another process has just locked."""
    return image.with_name(f".{image.name}.lock")


def _work_prefix(image: Path) -> str:
    return f".{image.name}.importing."


def _leftovers(image: Path) -> Sequence[Path]:
    """Folders of imports that are running, or were killed."""
    return sorted(image.parent.glob(f"{glob.escape(_work_prefix(image))}*"))


def remove_image(image: Path) -> None:
    """With all that lies beside it. Raises OSError."""
    for leftover in _leftovers(image):
        shutil.rmtree(leftover)
    for path in (image, _checksum_file(image), _lock_file(image)):
        path.unlink(missing_ok=True)


ERRORS = Path(__file__).with_name("image_errors.yaml")
TAIL_BYTES = 16384
SHOWN_LINES = 4
POLL_S = 0.5
PROGRESS_S = 30.0
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ToolError(Record):
    """Something that a tool says when it fails."""

    pattern: str
    kind: Literal["environment", "infrastructure"]
    program: str | None = None
    what: str
    do: str


class ToolErrors(Record):
    """``image_errors.yaml``."""

    errors: tuple[ToolError, ...] = Field(min_length=1)


def run_tool(command: Sequence[str], result: Path, say: Callable[[str], None]) -> None:
    """Shows on standard error what a tool prints, and how large the result is; the tool ends with this process.

    Raises the error that the tool's last lines explain, and UserInterrupt.
    """
    with os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            with started_program(command, output, output) as process:
                _follow(process, output.fileno(), result, say)
        except Interrupted as signal:
            raise UserInterrupt(f"interrupted by {signal}; the same command imports the image again") from signal
        size = os.fstat(output.fileno()).st_size
        tail = os.pread(output.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
    if process.returncode:
        raise explained(Path(command[0]).name, process.returncode, tail)


def _follow(process: "subprocess.Popen[bytes]", output: int, result: Path, say: Callable[[str], None]) -> None:
    """Until the tool has ended."""
    spoke_at, ended, position = time.monotonic(), False, 0
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            ended = True
        while block := os.pread(output, TAIL_BYTES, position):
            position += len(block)
            sys.stderr.write(block.decode(errors="replace"))
            sys.stderr.flush()
        if not ended and time.monotonic() - spoke_at > PROGRESS_S:
            size = result.stat().st_size if result.exists() else 0
            say(f"still importing: {size / 10**9:.1f} GB written")
            spoke_at = time.monotonic()


def explained(program: str, code: int, text: str) -> LlmbError:
    """The error for a tool that ended with ``code`` and printed ``text``, the end of its output."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", _ESCAPES.sub("", text)) if line.strip()]
    how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
    for error in read_file(ERRORS, ToolErrors).errors:
        said = [line for line in lines if re.search(error.pattern, line, re.IGNORECASE)]
        if said and error.program in (None, program):
            kind = InfrastructureError if error.kind == "infrastructure" else EnvironmentProblem
            return kind(f"{error.what}: {program} {how}{_quoted(said[-1:])}", do=error.do)
    return RunFailed(f"{program} {how}{_quoted(lines[-SHOWN_LINES:])}")


def _quoted(lines: Sequence[str]) -> str:
    return "".join(f"\n  | {redacted(line)}" for line in lines)


def has_tool(program: str) -> bool:
    return shutil.which(program) is not None
