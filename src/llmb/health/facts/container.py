# SPDX-License-Identifier: Apache-2.0
"""Runtimes of containers, and where Enroot keeps its files."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llmb.health.facts.disk import DiskFacts, read_disk
from llmb.health.facts.source import FactSource, Missing

LIMIT_S = 20.0
VERSIONS = {
    "enroot": ("enroot", "version"),
    "apptainer": ("apptainer", "--version"),
    "singularity": ("singularity", "--version"),
    "docker": ("docker", "--version"),
    "podman": ("podman", "--version"),
}
DEFAULTS = {
    "ENROOT_CACHE_PATH": "${XDG_CACHE_HOME:-${HOME}/.cache}/enroot",
    "ENROOT_DATA_PATH": "${XDG_DATA_HOME:-${HOME}/.local/share}/enroot",
    "ENROOT_TEMP_PATH": "${TMPDIR:-/tmp}",
}
"""Enroot's own, of its documentation; names of files in the configuration begin where these point to."""
CONFIGURATION = ("/etc/enroot/enroot.conf", "/etc/enroot/enroot.conf.d")
_SETTING = re.compile(r"^\s*(ENROOT_\w+)\s+(\S.*?)\s*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")


class EnrootFolder(NamedTuple):
    """``path`` is None if the setting cannot be read without a shell."""

    setting: str
    path: Path | None
    disk: DiskFacts | Missing


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerFacts:
    versions: dict[str, str]
    """By the runtime; those that are not installed are left out."""
    enroot: tuple[EnrootFolder, ...] | Missing


def read_containers(source: FactSource) -> ContainerFacts:
    versions = {}
    for name, command in VERSIONS.items():
        said = source.ask(command, LIMIT_S)
        found = re.search(r"\d+(\.\d+)+", said.text)
        if said.problem is None and found:
            versions[name] = found[0]
    if "enroot" not in versions:
        return ContainerFacts(versions=versions, enroot=Missing("Enroot is not installed"))
    settings = {**DEFAULTS, **enroot_settings(source)}
    settings |= {name: source.environ[name] for name in DEFAULTS if source.environ.get(name)}
    folders = tuple(_folder(source, name, settings[name]) for name in DEFAULTS)
    return ContainerFacts(versions=versions, enroot=folders)


def enroot_settings(source: FactSource) -> dict[str, str]:
    """Settings of the system's configuration; later files replace what earlier ones set."""
    main, more = CONFIGURATION
    files = [main, *(f"{more}/{name}" for name in sorted(source.names(more)) if name.endswith(".conf"))]
    lines = (line for name in files for line in (source.text(name) or "").splitlines())
    found = (_SETTING.match(line) for line in lines)
    return {setting[1]: setting[2].strip("\"'") for setting in found if setting}


def _folder(source: FactSource, setting: str, value: str) -> EnrootFolder:
    path = expanded(value, source.environ)
    if path is None:
        return EnrootFolder(setting, None, Missing(f"{value} needs a shell"))
    return EnrootFolder(setting, path, read_disk(source, path, 0))


def expanded(value: str, environ: Mapping[str, str]) -> Path | None:
    """The path that a shell makes of it; None where it would have to call a program, or knows no value."""
    known = {"UID": str(os.getuid()), "EUID": str(os.geteuid()), **environ}
    for command in ("$(id -u)", "$(id --user)"):
        value = value.replace(command, known["UID"])
    for _ in range(4):
        if "$" not in value:
            break
        value = _VARIABLE.sub(lambda found: known.get(found[1] or found[3]) or found[2] or "", value)
    return Path(value) if value.startswith("/") and not set(value) & set("$`\0") else None
