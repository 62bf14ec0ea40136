# SPDX-License-Identifier: Apache-2.0
"""Keeps the content of this package's data files as JSON in the user's cache: parsing YAML takes ten times as long.

A file is found by the checksum of its text, so a changed one is parsed again.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path


def parsed(path: Path, text: bytes, parse: Callable[[bytes], object]) -> object:
    """``parse(text)``, of the data file at ``path``, or what was kept of it. A cache that cannot be used is not."""
    folder = cache_folder()
    if folder is None:
        return parse(text)
    name = f"{path.parent.name}-{path.stem}"
    kept = folder / f"{name}-{blake2b(text, digest_size=16).hexdigest()}.json"
    try:
        if kept.stat().st_uid not in (0, os.geteuid()):
            return parse(text)
        return json.loads(kept.read_bytes())
    except (OSError, ValueError):
        data = parse(text)
        with suppress(OSError, TypeError, ValueError):
            _keep(kept, data, replaces=f"{name}-*.json")
        return data


def cache_folder() -> Path | None:
    """``llmb`` below the folder for caches (XDG base directory specification); None without a home."""
    for variable, below in (("XDG_CACHE_HOME", ""), ("HOME", ".cache")):
        if (place := os.environ.get(variable, "")).startswith("/"):
            return Path(place, below, "llmb")
    return None


def _keep(kept: Path, data: object, replaces: str) -> None:
    content = json.dumps(data)
    if json.loads(content) != data:  # such as a key that is no text
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    for old in kept.parent.glob(replaces):
        old.unlink(missing_ok=True)
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    try:
        temporary.write_text(content)
        temporary.replace(kept)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
