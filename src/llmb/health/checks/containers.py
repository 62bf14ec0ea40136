# SPDX-License-Identifier: Apache-2.0
"""Checks of the runtimes of containers, and of where Enroot keeps its files."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from llmb.health.checks.disk import read_disk
from llmb.health.rules import Finding, gb, rule
from llmb.health.source import FactSource
from llmb.health.wanted import WantedFacts
from llmb.missing import Missing
from llmb.shown_text import listed

LIMIT_S = 20.0
VERSIONS = {
    "enroot": ("enroot", "version"),
    "apptainer": ("apptainer", "--version"),
    "singularity": ("singularity", "--version"),
    "docker": ("docker", "--version"),
    "podman": ("podman", "--version"),
}
NEEDED = {"pyxis": ("enroot",), "apptainer": ("apptainer", "singularity")}
"""A runtime of cluster_config.yaml needs one of its programs."""
DEFAULTS = {
    "ENROOT_CACHE_PATH": "${XDG_CACHE_HOME:-${HOME}/.cache}/enroot",
    "ENROOT_DATA_PATH": "${XDG_DATA_HOME:-${HOME}/.local/share}/enroot",
    "ENROOT_TEMP_PATH": "${TMPDIR:-/tmp}",
}
"""Enroot's own, of its documentation; names of files in the configuration begin where these point to."""
CONFIGURATION = ("/etc/enroot/enroot.conf", "/etc/enroot/enroot.conf.d")
_SETTING = re.compile(r"^\s*(ENROOT_\w+)\s+(\S.*?)\s*$")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^{}]*))?\}|(\w+))")


def container_checks(source: FactSource, wanted: WantedFacts) -> Iterator[Finding]:
    versions = {}
    for name, command in VERSIONS.items():
        said = source.ask(command, LIMIT_S)
        found = re.search(r"\d+(\.\d+)+", said.text)
        if said.problem is None and found:
            versions[name] = found[0]
    yield _runtime(versions, wanted)
    yield _enroot(source, installed="enroot" in versions)


def _runtime(versions: Mapping[str, str], wanted: WantedFacts) -> Finding:
    of = rule("container_runtime")
    shown = listed(f"{name} {version}" for name, version in versions.items())
    needed = NEEDED.get(wanted.runtime, ())
    if needed and not set(needed) & versions.keys():
        has = f"; only {shown}" if shown else ""
        return of.found("fail", f"no {needed[0]}{has}; cluster_config.yaml has runtime: {wanted.runtime}")
    if not versions:
        return of.skipped("no runtime of containers is installed, and none is requested")
    return of.passed(shown)


def _enroot(source: FactSource, *, installed: bool) -> Finding:
    of, folders = rule("container_enroot_folders"), enroot_folders(source)
    if not installed:
        return of.skipped("Enroot is not installed")
    if not folders:
        return of.skipped("its settings cannot be read without a shell")
    disks = {f"{setting} {path}": read_disk(source, path, 0) for setting, path in folders.items()}
    hung = [f"{where}: {disk.reason}" for where, disk in disks.items() if isinstance(disk, Missing)]
    if hung:
        return of.found("fail", listed(hung), "closed")
    seen = {where: disk for where, disk in disks.items() if not isinstance(disk, Missing)}
    if closed := [where for where, disk in seen.items() if not disk.writable]:
        return of.found("fail", f"not writable: {listed(closed)}", "closed")
    free, where = min((disk.free, where) for where, disk in seen.items())
    return of.measured(free / 1e9, f"at least {gb(free)} free ({where})")


def enroot_folders(source: FactSource) -> dict[str, Path]:
    """By the setting; of the system's configuration, later files replace what earlier ones set."""
    main, more = CONFIGURATION
    files = [main, *(f"{more}/{name}" for name in sorted(source.names(more)) if name.endswith(".conf"))]
    lines = (line for name in files for line in (source.text(name) or "").splitlines())
    found = (_SETTING.match(line) for line in lines)
    configured = {setting[1]: setting[2].strip("\"'") for setting in found if setting}
    values = ((name, source.environ.get(name) or configured.get(name, default)) for name, default in DEFAULTS.items())
    return {name: path for name, value in values if (path := expanded(value, source.environ))}


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
