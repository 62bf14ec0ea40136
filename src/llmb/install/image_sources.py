# SPDX-License-Identifier: Apache-2.0
"""Where an image comes from, and the names that it has for tools and as a file. Pure."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmb.errors import UsageError
from llmb.secrets import has_secret

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
