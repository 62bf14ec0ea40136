# SPDX-License-Identifier: Apache-2.0
"""Container images: their source, their name, and their import into a folder that all nodes share."""

import glob
import platform
import re
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmb.base.errors import EnvironmentProblem, UsageError, UserInterrupt, see, unknown
from llmb.base.processes import Interrupted, started_program
from llmb.runs.folder import writing

SUFFIXES = {"pyxis": ".sqsh", "apptainer": ".sif"}
PROGRAMS = {"pyxis": "enroot", "apptainer": "apptainer"}
STDERR = 2
ARCHIVE = ".tar"
"""Suffix of the output of ``docker save`` and ``podman save``, which Apptainer reads."""
FORM = "[docker://][REGISTRY/]NAME[:TAG], dockerd://NAME:TAG, or the path of a file"
_NAME = re.compile(
    r"((?P<scheme>docker|dockerd)://)?((?P<registry>[\w.-]+(:\d+)?)#)?(?P<path>[\w.-]+(:\d+(?=/))?(/[\w.-]+)*)"
    r"(:(?P<tag>\w[\w.-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)


class RegistryImage(NamedTuple):
    """An image in a registry, or in Docker's store on this machine."""

    name: str
    """The reference suite's name for the image's file, without its suffix: ``nvidia+nemo+26.04.01``."""
    for_enroot: str
    for_apptainer: str
    of_daemon: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedImage:
    path: Path
    bytes: int
    made: bool
    """False if an existing file is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRequest:
    source: str
    """A name in a registry, ``dockerd://NAME``, or a file."""
    folder: Path
    runtime: str
    """``pyxis`` or ``apptainer``."""
    architecture: str | None = None
    """Architecture of the nodes, as ``uname -m`` prints it; None for this machine's architecture."""
    force: bool = False
    """True to import the image again and replace the existing file."""


def image_source(text: str) -> RegistryImage | Path:
    """Parse the name of an image, or the path of a file; raise UsageError for anything else."""
    if text.startswith(("/", "./", "../", "~")) or text.endswith((*SUFFIXES.values(), ARCHIVE)):
        return Path(text).expanduser().absolute()
    match = _NAME.fullmatch(text)
    if match is None:
        raise UsageError(f"this is not the name of an image: '{text}'", do=f"use {FORM}, without a password")
    of_daemon, host, path = match["scheme"] == "dockerd", match["registry"], match["path"]
    first, slash, inner = path.partition("/")
    if not of_daemon and host is None and slash and ("." in first or ":" in first or first == "localhost"):
        host, path = first, inner  # parsed as by Docker; Enroot requires a # behind the registry
    tag, behind = match["digest"] or match["tag"] or "latest", "@" if match["digest"] else ":"
    return RegistryImage(
        "+".join([*path.split("/"), tag.replace(":", "-")]),
        f"{'dockerd' if of_daemon else 'docker'}://{host + '#' if host else ''}{path}:{tag}",
        f"{'docker-daemon' if of_daemon else 'docker'}://{host + '/' if host else ''}{path}{behind}{tag}",
        of_daemon,
    )


def source_problem(text: str) -> str | None:
    """Describe the problem with an answer that names an image, if any."""
    try:
        source = image_source(text)
    except UsageError as error:
        return f"{error.what}: {error.do}"
    return f"there is no file {source}" if isinstance(source, Path) and not source.exists() else None


def image_path(text: str, folder: Path, runtime: str) -> Path:
    """Return the path of the image's file: ``text`` if it is an image file, or else in ``folder``."""
    source = image_source(text)
    if isinstance(source, Path):
        return folder / (source.stem + SUFFIXES[runtime]) if source.suffix == ARCHIVE else source
    return folder / (source.name + SUFFIXES[runtime])


def import_image(request: ImageRequest, say: Callable[[str], None]) -> ImportedImage:
    """Import an image if missing, or with ``force``.

    Raise UsageError for invalid requests, EnvironmentProblem on failure, UserInterrupt on a signal.
    """
    if request.runtime not in PROGRAMS:
        raise unknown("container runtime", request.runtime, PROGRAMS)
    source, folder = image_source(request.source), request.folder.absolute()
    target = image_path(request.source, folder, request.runtime)
    if isinstance(source, Path):
        _check_file(source, request.runtime)
    if imports := target != source and (request.force or not has_image(target)):
        _check_possible(source, request)
        with writing(folder), _new_file(target) as partial:
            folder.mkdir(parents=True, exist_ok=True)
            _call(import_command(source, partial, request), say)
    return ImportedImage(path=target, bytes=target.stat().st_size, made=imports)


def has_image(target: Path) -> bool:
    return target.is_file() and target.stat().st_size > 0


def _check_file(source: Path, runtime: str) -> None:
    if not has_image(source):
        do = "pass the path of an image file, or an image's name in a registry"
        raise UsageError("there is no file here, or it is empty", where=str(source), do=do)
    endings = (SUFFIXES[runtime], *([ARCHIVE] if runtime == "apptainer" else []))
    if source.suffix not in endings:
        do = f"use a file that ends in {' or '.join(endings)}, or the image's name in a registry"
        raise UsageError(f"{runtime} cannot run a file of this type", where=str(source), do=do)


def _check_possible(source: RegistryImage | Path, request: ImageRequest) -> None:
    program, here = PROGRAMS[request.runtime], platform.machine()
    again = shlex.join([request.source, "--runtime", request.runtime, "--folder", str(request.folder.absolute())])
    do = f"import the image on a node: srun --ntasks=1 --time=60 llmb prepare image {again}"
    if of_daemon := isinstance(source, RegistryImage) and source.of_daemon:
        do = "push the image to a registry, and import it from there"  # nodes do not have this machine's images
    if shutil.which(program) is None:
        raise EnvironmentProblem(f"there is no {program} on this machine", do=f"install {program} here, or {do}")
    if (of_daemon or request.runtime == "apptainer") and request.architecture not in (None, here):
        what = f"{program} would import the image for {here}, but the nodes are {request.architecture}"
        raise EnvironmentProblem(what, do=do)


def import_command(source: RegistryImage | Path, target: Path, request: ImageRequest) -> list[str]:
    """Return the command that creates ``target``, which must not exist."""
    if request.runtime == "apptainer":
        origin = source.for_apptainer if isinstance(source, RegistryImage) else f"docker-archive:{source}"
        return ["apptainer", "build", str(target), origin]
    assert isinstance(source, RegistryImage)
    other = request.architecture not in (None, platform.machine())
    architecture = ["--arch", str(request.architecture)] if other else []
    return ["enroot", "import", *architecture, "--output", str(target), source.for_enroot]


@contextmanager
def _new_file(target: Path) -> Iterator[Path]:
    partial = target.with_name(f".{secrets.token_hex(4)}.{target.name}")
    try:
        yield partial
        if not has_image(partial):
            raise EnvironmentProblem("the import ended without an error, but left no image", where=str(target))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _call(command: list[str], say: Callable[[str], None]) -> None:
    say(shlex.join(command))
    try:
        with started_program(command, STDERR, STDERR) as process:
            code = process.wait()
    except Interrupted as signal:
        raise UserInterrupt(f"interrupted by {signal}; the same command imports the image again") from signal
    if code:
        how = f"was killed by signal {-code}" if code < 0 else f"failed with exit code {code}"
        do = see("install", "for private registries and small disks")
        raise EnvironmentProblem(f"{command[0]} {how}; its output is above", where=command[-1], do=do)


def remove_image(image: Path) -> None:
    """Remove an image and the leftovers of killed imports; raise OSError if that fails."""
    for path in (image, *image.parent.glob(f".????????.{glob.escape(image.name)}")):
        path.unlink(missing_ok=True)
