# SPDX-License-Identifier: Apache-2.0
"""Settings of nodes, read now, and kept under a name below the root of installation, to see later what has changed."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from llmb.catalogue.load import Catalogue
from llmb.catalogue.record import Record
from llmb.errors import UsageError
from llmb.health.checks.nvidia_smi import read_states
from llmb.health.source import FactSource
from llmb.missing import Missing
from llmb.resources.node_settings import NodeSettings, NodesSettings
from llmb.resources.read_settings import read_settings
from llmb.runs.drift import gpu_limits
from llmb.runs.folder import write_atomically, writing
from llmb.runs.host import host_name
from llmb.runs.record_file import BrokenRecord, read_record_file
from llmb.schedulers.lookup import read_cluster_site
from llmb.trust import STATE_FOLDER, check_links, check_owner

SNAPSHOTS = Path(STATE_FOLDER) / "snapshots"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Snapshot(Record):
    """The content of a file of ``.llmb/snapshots``."""

    schema_version: Literal[1] = 1
    name: str
    saved_at: str
    """ISO 8601 in UTC."""
    settings: NodesSettings


def settings_here(install: Path, environ: Mapping[str, str], source: FactSource | None = None) -> NodeSettings:
    """Settings of this node, with those of its GPUs, and the image that jobs train in. Raises UsageError for settings
    of the cluster that are wrong.
    """
    source = source or FactSource(environ=environ)
    found = read_settings(source, environ)
    states, _ = read_states(source, host_name())
    site = read_cluster_site(Catalogue(), install, environ)
    container = site.config.container
    image = _image(container.image) if container.image and container.runtime != "none" else {}
    limits = {} if isinstance(states, Missing) else gpu_limits(states.gpus)
    missing = {"hardware": states.reason} if isinstance(states, Missing) else {}
    return NodeSettings(values={**found.values, **limits, **image}, missing={**found.missing, **missing})


def _image(image: str) -> dict[str, str]:
    """With what shows that it was replaced, if it is a file."""
    found = {"software.image": image}
    try:
        state = Path(image).stat()
    except (OSError, ValueError):
        return found
    made = datetime.fromtimestamp(state.st_mtime, UTC).isoformat(timespec="seconds")
    return {**found, "image.file": f"{state.st_size} bytes of {made}"}


def new_snapshot(install: Path, name: str, *, replace: bool) -> Path:
    """Its file. Raises UsageError for a name that no file can have, and that a snapshot has, unless it is replaced."""
    if not _NAME.fullmatch(name):
        what = f"{name!r} cannot be the name of a snapshot"
        raise UsageError(what, do="give up to 64 letters, digits, '.', '_' and '-', beginning with a letter or a digit")
    path = install / SNAPSHOTS / f"{name}.json"
    if path.exists() and not replace:
        do = "give another name, or --force, which replaces it"
        raise UsageError(f"there is a snapshot '{name}'", where=str(path), do=do)
    return path


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    """Raises NotWritable."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, snapshot.model_dump_json(indent=2) + "\n")


def read_snapshot(install: Path, name: str) -> Snapshot | None:
    """None if there is none. Raises UsageError if its file is damaged or another user's."""
    path = install / SNAPSHOTS / f"{name}.json"
    if not _NAME.fullmatch(name) or not path.is_file():
        return None
    check_links(path)
    check_owner(path, install)
    try:
        return read_record_file(path, Snapshot)
    except BrokenRecord as error:
        do = f"make it again with 'llmb doctor --save {name} --force' on a node that is as it should be"
        raise UsageError(f"the snapshot '{name}' cannot be read: {error.what}", where=error.where, do=do) from error


def snapshot_names(install: Path) -> list[str]:
    return sorted(path.stem for path in (install / SNAPSHOTS).glob("*.json"))
