# SPDX-License-Identifier: Apache-2.0
"""Imports an image into a folder that all nodes share; it has its name only when it is complete."""

import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llmb.errors import EnvironmentProblem, UsageError, unknown
from llmb.install.image_claim import claimed
from llmb.install.image_files import (
    BLOCK,
    checksum_file,
    image_kind,
    image_problem,
    read_checksum,
    sha256_of,
    write_checksum,
)
from llmb.install.image_sources import SUFFIXES, RegistryImage, image_name, image_source, needs_daemon
from llmb.install.image_tools import has_tool, run_tool
from llmb.runs.disk_space import check_room
from llmb.runs.folder import cannot_write

PROGRAMS = {"pyxis": "enroot", "apptainer": "apptainer"}
KINDS = {"pyxis": "squashfs", "apptainer": "SIF"}
ARCHIVES = {"OCI archive": "oci-archive", "Docker archive": "docker-archive"}
CACHES = {
    "pyxis": (("ENROOT_CACHE_PATH", "~/.cache/enroot"), ("ENROOT_TEMP_PATH", "/tmp")),  # noqa: S108 (Enroot's own)
    "apptainer": (("APPTAINER_CACHEDIR", "~/.apptainer/cache"), ("APPTAINER_TMPDIR", "/tmp")),  # noqa: S108
}
"""Variables that name the tools' folders, and what holds without them and the tools' own settings."""
TAKEN = {
    "pyxis": "give a squashfs file (.sqsh), or call 'docker load -i FILE' and give dockerd://NAME:TAG",
    "apptainer": "give a SIF file, an archive of docker or podman, or the image's name in a registry",
}
LEAST_BYTES = 10**9
USUAL_BYTES = 40 * 10**9
"""An image with PyTorch takes 10 to 30 GB, and as much again where it is unpacked."""
SAY_EVERY_S = 10.0
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
    """Of the nodes, as ``uname -m`` prints it; None for that of this machine."""
    force: bool = False
    """Import it again, and replace what there is."""
    verify: bool = False
    """Read all of a file that is there, and compare its checksum."""


def import_image(request: ImageRequest, say: Say) -> ImportedImage:
    """An import that was killed is begun again by the next one; a file that is whole is kept.

    Raises UsageError, EnvironmentProblem, InfrastructureError and RunFailed, each with what to do.
    """
    if request.runtime not in PROGRAMS:
        raise unknown("container runtime", request.runtime, PROGRAMS)
    source = image_source(request.source)
    folder = request.folder.expanduser().absolute()
    target = folder / image_name(source, request.runtime)
    if isinstance(source, Path):
        _check_file(source, request.runtime)
    if not request.force and (known := _known(target, request, source, say)):
        return known
    if not target.exists():
        _check_possible(source, request)  # before anything is made
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
    with claimed(target, say) as work:
        if not request.force and (kept := _kept(target, request, source, say)):
            return kept
        _check_possible(source, request)
        _check_space(source, request, folder, say)
        partial = work / target.name
        _make(source, partial, request, say)
        return _published(partial, target, request.runtime, say)


def _known(target: Path, request: ImageRequest, source: RegistryImage | Path, say: Say) -> ImportedImage | None:
    """A whole image for which nothing has to be written, so that it can be another user's."""
    if not target.exists() or _problem(target, request.runtime) or request.verify:
        return None
    checksum = read_checksum(target)
    if checksum is None and os.access(target.parent, os.W_OK):
        return None
    _check_same(target, request, source, say)
    return ImportedImage(path=target, bytes=target.stat().st_size, sha256=checksum, made=False)


def _kept(target: Path, request: ImageRequest, source: RegistryImage | Path, say: Say) -> ImportedImage | None:
    """An image that is there, if it is whole; it gets its checksum."""
    if not target.exists():
        return None
    if problem := _problem(target, request.runtime):
        say(f"{target}: {problem}; it is imported again")
        return None
    _check_same(target, request, source, say)
    known = read_checksum(target)
    found = known if known and not request.verify else _checksum(target, say)
    if known and found != known:
        say(f"{target}: its checksum is {found}, not {known}; it is imported again")
        return None
    if known is None:
        write_checksum(target, found)
    return ImportedImage(path=target, bytes=target.stat().st_size, sha256=found, made=False)


def _problem(image: Path, runtime: str) -> str | None:
    try:
        problem, kind = image_problem(image), image_kind(image)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return problem or (None if kind == KINDS[runtime] else f"it is {kind}, not {KINDS[runtime]}")


def _is_copied(source: RegistryImage | Path, runtime: str) -> bool:
    """Whether the image is a file that the runtime starts as it is."""
    return isinstance(source, Path) and image_kind(source) == KINDS[runtime]


def _check_same(target: Path, request: ImageRequest, source: RegistryImage | Path, say: Say) -> None:
    """Raises UsageError if ``target`` is not the copy of a file."""
    if not isinstance(source, Path) or not _is_copied(source, request.runtime):
        return
    known = None if source.samefile(target) else read_checksum(target)
    if source.stat().st_size != target.stat().st_size or (known and _checksum(source, say) != known):
        do = "give --force to replace it, or rename the file"
        raise UsageError("another image of this name is there", where=str(target), do=do)


def _check_file(source: Path, runtime: str) -> None:
    """Raises UsageError for a file that cannot be imported."""
    try:
        kind = image_kind(source)
    except OSError as error:
        raise UsageError(f"the image cannot be read: {error.strerror}", where=str(source)) from error
    if kind == KINDS[runtime]:
        if problem := image_problem(source):
            raise UsageError(f"this image is not whole: {problem}", where=str(source))
        return
    if runtime == "apptainer" and kind in ARCHIVES:
        return
    if kind is None:
        problem = "it may be half-written" if source.suffix in SUFFIXES.values() else "of no known kind"
        raise UsageError(f"this is no image, {problem}", where=str(source))
    raise UsageError(f"{runtime} does not start {kind} files", where=str(source), do=TAKEN[runtime])


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


def _check_space(source: RegistryImage | Path, request: ImageRequest, folder: Path, say: Say) -> None:
    """Raises EnvironmentProblem; an image's size is not known before it is imported, unless it is a file."""
    advice = "free some space, or give --folder on another disk"
    check_room("the image needs", source.stat().st_size if isinstance(source, Path) else LEAST_BYTES, folder, advice)
    if isinstance(source, Path):
        return
    named = [(name, os.environ.get(name) or _default(default)) for name, default in CACHES[request.runtime]]
    places = [("the folder", folder), *((name, Path(text).expanduser()) for name, text in named)]
    disks = set()
    for name, place in places:
        existing = next(path for path in (place, *place.parents) if path.exists())
        free, disk = shutil.disk_usage(existing).free, existing.stat().st_dev
        if free < USUAL_BYTES and disk not in disks:
            say(f"warning: {free / GB:.1f} GB free for {name} ({place}); an image with PyTorch may need 40 GB")
        disks.add(disk)


def _default(folder: str) -> str:
    return os.environ.get("TMPDIR") or folder if folder == "/tmp" else folder  # noqa: S108 (compared, not used)


def _make(source: RegistryImage | Path, partial: Path, request: ImageRequest, say: Say) -> None:
    if isinstance(source, Path) and _is_copied(source, request.runtime):
        _copy(source, partial, say)
        return
    say(f"importing {request.source} into {request.folder}")
    command = tool_command(source, partial, request)
    run_tool(command, lambda: partial.stat().st_size if partial.exists() else 0, say)


def tool_command(source: RegistryImage | Path, target: Path, request: ImageRequest) -> Sequence[str]:
    """The call that makes ``target``, which does not exist. Raises UsageError."""
    if request.runtime == "apptainer":
        archive = ARCHIVES[str(image_kind(source))] if isinstance(source, Path) else None
        origin = source.for_apptainer if isinstance(source, RegistryImage) else f"{archive}:{source}"
        return ["apptainer", "build", str(target), origin]
    assert isinstance(source, RegistryImage)
    other = request.architecture not in (None, platform.machine())
    architecture = ["--arch", str(request.architecture)] if other else []
    return ["enroot", "import", *architecture, "--output", str(target), source.for_enroot]


def _copy(source: Path, partial: Path, say: Say) -> None:
    with source.open("rb", buffering=0) as old, partial.open("xb", buffering=0) as new:
        told = _Told(say, f"copying {source.name}", source.stat().st_size)
        while block := old.read(BLOCK):
            view = memoryview(block)
            while view:
                view = view[new.write(view) :]
            told.more(len(block))


def _published(partial: Path, target: Path, runtime: str, say: Say) -> ImportedImage:
    """The image under its name, with its checksum beside it."""
    program = PROGRAMS[runtime]
    if problem := _problem(partial, runtime) if partial.exists() else "it is not there":
        raise EnvironmentProblem(f"{program} ended well, but left no whole image: {problem}", where=str(target))
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    checksum, size = _checksum(partial, say), partial.stat().st_size
    checksum_file(target).unlink(missing_ok=True)  # of what is replaced: a checksum is never beside another file
    partial.replace(target)
    _sync_folder(target.parent)
    shutil.rmtree(partial.parent, ignore_errors=True)  # before the checksum, beside which no import looks for leftovers
    write_checksum(target, checksum)
    return ImportedImage(path=target, bytes=size, sha256=checksum, made=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path, say: Say) -> str:
    return sha256_of(path, _Told(say, f"checksum of {path.name}", path.stat().st_size).more)


class _Told:
    """Says how far long work is, every few seconds."""

    def __init__(self, say: Say, text: str, total: int) -> None:
        self.say, self.text, self.total = say, text, total
        self.done, self.spoke_at = 0, time.monotonic()

    def more(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self.spoke_at > SAY_EVERY_S:
            self.spoke_at = time.monotonic()
            self.say(f"{self.text}: {self.done / GB:.1f} of {self.total / GB:.1f} GB")
